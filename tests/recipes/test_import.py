"""`k3 import`, what trains from it (`run.init`), and back to the published layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import parallel
from k3 import hf
from parallel import checkpoint
from recipes import cli
from recipes.compose import compose
from recipes.errors import UserError
from recipes.initial import Initial, initial
from recipes.phases.pretrain import Phase
from recipes.stored import Stored
from recipes.training import build
from tests.golden.vectors import FOLDER
from tests.k3 import test_kimi_linear as kimi_linear
from tests.k3.published import golden, write
from tests.recipes.small_run import SIZES, do, metrics, stored, words, write_corpus

LAYOUTS = {"single": {}, "TP2": {"tp": 2}, "PP2 EP2": {"pp": 2, "ep": 2, "dp": 2}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("import")
    write_corpus(home / "corpus")
    return home


def k3(*words: object) -> int:
    return cli.main([str(word) for word in words])


def same(one: Path, other: Path) -> None:
    for name in (hf.SINGLE, "config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("packed", [False, True])
def test_it_comes_out_as_it_went_in(packed, tmp_path, capsys):
    path = golden(tmp_path / "released", packed=packed)
    assert k3("import", f"published={path}", f"out={tmp_path / 'ours'}") == 0
    assert k3("export", f"run_or_checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'again'}") == 0
    same(path, tmp_path / "again")
    assert k3("inspect", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "686,116 parameters" in said and ("packed as mxfp4" in said) == packed and "\nextras " in said
    if packed:
        assert k3("export", f"run_or_checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'dense'}", "quantise=none") == 0
        hf.convert(path, tmp_path / "want")
        ours, want = (dict(hf.load(tmp_path / name).named_parameters()) for name in ("dense", "want"))
        assert all(torch.equal(ours[name], want[name]) for name in want) and hf.contents(tmp_path / "dense").quantised is None


def test_kimi_linear_goes_in_and_out(tmp_path):
    path = write(tmp_path / "released", kimi_linear.checkpoint(), kimi_linear.CONFIG)
    assert k3("import", f"published={path}", f"out={tmp_path / 'ours'}") == 0
    assert k3("export", f"run_or_checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'again'}") == 0
    same(path, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_through_a_model_and_a_checkpoint_of_any_layout(name, packed, tmp_path, helper):
    """Several ranks import it, a layout loads it and saves it, one process exports that."""
    path, sizes = golden(tmp_path / "released", packed=packed), LAYOUTS[name]
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    helper.run_ranks("tests.recipes.import_ranks:take", ranks, str(path), str(tmp_path / "ours"))
    assert len(list((tmp_path / "ours").glob("*.distcp"))) == ranks
    helper.run_ranks("tests.recipes.import_ranks:through", ranks, sizes, str(tmp_path / "ours"), str(tmp_path / "run"))
    made = checkpoint.latest(tmp_path / "run")
    before, after = stored(tmp_path / "ours", "model."), stored(made, "model.")
    assert {n: t.dtype for n, t in before.items()} == {n: t.dtype for n, t in after.items()}
    quantise = f"quantise={'mxfp4' if packed else 'none'}"
    beside = f"passthrough={tmp_path / 'ours'}"
    assert k3("export", f"run_or_checkpoint={made}", f"out={tmp_path / 'again'}", quantise, beside) == 0
    same(path, tmp_path / "again")


@pytest.mark.slow
def test_the_command_shares_the_work_of_an_import(tmp_path, capfd):
    path = golden(tmp_path / "released", packed=True)
    assert k3("import", f"published={path}", f"out={tmp_path / 'ours'}", "processes=2") == 0
    said = capfd.readouterr()
    assert said.out.count("686,116 parameters") == 1 and said.err == ""
    assert len(list((tmp_path / "ours").glob("*.distcp"))) == 2
    assert k3("export", f"run_or_checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'again'}") == 0
    same(path, tmp_path / "again")


def test_a_run_begins_with_the_weights_and_masters_of_another(home, capsys):
    code, folder = do(home, "first", "run.steps=3", "precision=bf16", "run.sample_tokens=0", "model.layers=4")
    assert code == 0
    kept = stored(checkpoint.latest(folder / "checkpoints"))
    typed = [w for w in words(home, "second", "precision=bf16", f"run.init={folder}") if w != "model=tiny"]
    cfg = compose(typed)
    assert cfg.model.layers == 4, "the model is that of the checkpoint"
    world = parallel.start()
    try:
        for more, source in (([], "optimizer.{}.master"), (["precision=fp32"], "model.{}")):
            cfg = compose([*typed, *more])
            trainer = Phase(cfg, world).trainer(build(cfg, world, initial(cfg.run.init, world)), 0)
            found = trainer.optimizer.masters or dict(trainer.module.named_parameters())
            names = [name for name in found if source.format(name) in kept]
            assert len(names) > 20 and all(
                torch.equal(found[n].view_as(kept[source.format(n)]).float(), kept[source.format(n)].float()) for n in names
            )
            assert all(
                torch.equal(b.bias, kept[f"model.{b.name}.feed_forward.router.balancer.bias"])
                for b in trainer.optimizer.balancing
            )
            assert trainer.optimizer.step_count == 0 and trainer.progress.step == 0
    finally:
        parallel.stop()


def test_a_run_begins_with_a_released_model(home, tmp_path):
    """As it was released: the first held-out loss is that of the folder's model."""
    released = golden(tmp_path / "released", packed=True)
    assert k3("import", f"published={released}", f"out={tmp_path / 'ours'}") == 0
    losses = []
    for number, source in enumerate((released, tmp_path / "ours")):
        typed = [*words(home, f"released{number}", "run.steps=1", "optim.lr=1e-9", "run.sample_tokens=0", f"run.init={source}")]
        assert k3("pretrain", *(w for w in typed if w != "model=tiny")) == 0
        folder = home / f"released{number}"
        losses.append(metrics(folder)[0]["loss"])
        assert json.loads((folder / "checkpoints/step_1/state.json").read_text())["config"]["run"]["init"] == str(source)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "typed, says",
    [
        (["published={released}"], "out: not given; k3 import"),
        (["published={home}", "out={new}"], "no config.json"),
        (["published={released}", "out={home}"], "exists already"),
        (["published={released}", "out={new}", "processes=0"], "processes=0: give a number from 1 on"),
        (["published={released}", "out={new}", "dtype=bf61"], "dtype=bf61: give one of bf16, fp32, fp64; the nearest is bf16"),
        (["published={released}", "out={new}", "type=bf16"], "type: no such key of k3 import; the nearest is dtype"),
    ],
)
def test_import_refuses(typed, says, tmp_path, capsys):
    places = {"released": FOLDER, "home": tmp_path, "new": tmp_path / "new"}
    assert k3("import", *(word.format(**places) for word in typed)) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_init_refuses_another_model_and_other_folders(tmp_path):
    for typed, says in (
        ([f"run.init={tmp_path}"], f"run.init={tmp_path}: neither a checkpoint, nor a run folder, nor a published folder"),
        ([f"run.init={FOLDER}", "model=nano"], f"model.vocab_size=1024: the weights of run.init={FOLDER} have 256"),
        ([f"run.init={FOLDER}", "model.moe.experts=9"], "model.moe.experts=9: the weights of"),
        ([f"run.init={FOLDER}", "run.compare_dense=0.5"], "trains a dense model from scratch, which run.init does not"),
    ):
        with pytest.raises(UserError) as error:
            compose([*SIZES[1:], *typed])
        assert says in str(error.value)
    cfg = compose([*SIZES[1:], f"run.init={FOLDER}", "model.moe.ema=0.5"])
    assert cfg.model.moe.ema == 0.5 and cfg.model.layers == Initial(FOLDER).model.layers


def test_a_damaged_import_is_refused(tmp_path):
    assert k3("import", f"published={FOLDER}", f"out={tmp_path / 'ours'}") == 0
    (file,) = (tmp_path / "ours").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    world = parallel.start()
    try:
        with pytest.raises(checkpoint.CheckpointError, match=f"{file.name}: damaged"):
            initial(str(tmp_path / "ours"), world)
    finally:
        parallel.stop()
    with pytest.raises(checkpoint.CheckpointError, match=f"{file.name}: damaged"):
        Stored(tmp_path / "ours").check()


def test_a_checkpoint_that_is_not_its_models_is_refused(tmp_path, capsys):
    """state.json has no checksum of its own: what it says is compared with what is stored."""
    assert k3("import", f"published={FOLDER}", f"out={tmp_path / 'ours'}") == 0
    state = json.loads((tmp_path / "ours/state.json").read_text())
    for change, says in (
        (lambda s: s["model"].update(hidden_size=128), "torch.float32 [256, 64], and its model has [256, 128]"),
        (lambda s: s.pop("step"), "state.json is damaged"),
        (lambda s: s["files"].update(x="y"), "state.json is damaged"),
        (lambda s: s.update(released={}), "state.json is damaged"),
        (lambda s: s["layout"].update(tp="two"), None),
    ):
        broken = json.loads(json.dumps(state))
        change(broken)
        (tmp_path / "ours/state.json").write_text(json.dumps(broken))
        capsys.readouterr()
        if says is not None:
            assert k3("export", f"run_or_checkpoint={tmp_path / 'ours'}", f"out={tmp_path / 'out'}") == 2
            assert says in capsys.readouterr().err and not (tmp_path / "out").exists()
        else:
            assert k3("inspect", tmp_path / "ours") == 2
            assert "state.json is damaged" in capsys.readouterr().err


def test_paths_that_cannot_be_are_one_message(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file/x", tmp_path / ("n" * 300)):
        assert k3("import", f"published={FOLDER}", f"out={out}") == 2
        assert k3("export", f"run_or_checkpoint={tmp_path / 'nothing'}", f"out={out}") == 2
        assert all(line.startswith("k3: ") for line in capsys.readouterr().err.splitlines())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
