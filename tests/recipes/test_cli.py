"""The command line: verbs, help, exit codes, and the environment that training starts in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipes import cli, launch

K3 = Path(sys.executable).with_name("k3")


def k3(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The real executable, as a user runs it."""
    return subprocess.run([K3, *words], capture_output=True, text=True, timeout=120, env=env)


def test_the_executable_answers_a_typo_in_one_line():
    done = k3("pretrain", "optim.lrr=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "k3: optim.lrr=1: there is no key optim.lrr; the nearest is optim.lr\n"


def test_help_and_the_dry_run_load_no_torch():
    # a module whose import fails stands for torch: whoever imports it is caught
    script = "import sys; sys.modules['torch'] = None; from recipes.cli import main; "
    for words in (["--help"], ["pretrain", "--help"], ["pretrain", "--cfg", "job", "model=k3"]):
        done = subprocess.run(
            [sys.executable, "-c", f"{script} sys.exit(main({words!r}))"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_verb(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    for name, verb in cli.VERBS.items():
        assert f"  {name} " in out and verb.summary in out


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: k3 {verb} ")


def test_the_help_of_pretrain_lists_groups_and_keys(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["help", "pretrain"]) == 0
    out = capsys.readouterr().out
    assert "model=tiny|nano|small|linear_48b|k3|dense" in out and "optim.clip.tau=100.0" in out and "run.resume=null" in out


@pytest.mark.parametrize("verb", ["pretrain", "prove"])
def test_help_shows_what_is_saved_for_the_backward_pass(verb: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert "activations=keep|full|selective" in out and "activations.head=keep" in out and "keep|recompute" in out


def test_cfg_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["pretrain", "model=tiny", "--cfg", "job", "optim.lr=3e-3"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert (printed.model.layers, printed.optim.lr, printed.parallel.dp, printed.precision.name) == (9, 3e-3, 1, "fp32")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pretain"], "nearest is pretrain"),
        (["help", "crads"], "nearest is cards"),
        (["bench", "kad"], "nearest is kda"),
        (["cards", "optim.lr=1"], "optim.lr=1"),
        (["cards", "model=nan"], "nearest is nano"),
        (["pretrain", "+typo=1"], "+typo=1"),
        (["pretrain", "--cfg", "hydra"], "--cfg job"),
        (["pretrain", "--cfg"], "--cfg job"),
        (["pretrain", "data.corpus=/no/such/folder"], "data.corpus=/no/such/folder"),
        (["pretrain", "model.kda.lower_bound=1", "run.steps=0"], "run.steps=0"),
        (["pretrain", f"run.dir={__file__}/new"], f"{__file__} is no folder"),
    ],
)
def test_a_mistake_is_exit_code_two_and_no_traceback(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and all(line.startswith("k3: ") for line in err.splitlines())


@pytest.mark.skipif(launch.sees_cuda({}), reason="a GPU's memory is torch's to judge")
def test_a_model_that_cannot_fit_is_refused_before_it_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["pretrain", "model=k3", f"run.dir={tmp_path / 'run'}"]) == 2
    assert "2,779,484,476,000 parameters take at least 31,0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_only_known_errors_are_the_users(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(cli.VERBS, "broken", cli.Verb("", f"{__name__}:_broken"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["broken"])


def _broken(words: list[str]) -> int:
    return 1 // len(words)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(cli.VERBS, "full", cli.Verb("", f"{__name__}:_full"))
    assert cli.main(["full"]) == 1
    assert capsys.readouterr().err == "k3: the disk: No space left on device\n"


def _full(words: list[str]) -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def test_the_named_errors_exist():
    import importlib

    for module, name in cli.USER_ERRORS:
        assert issubclass(getattr(importlib.import_module(module), name), Exception)
        assert getattr(importlib.import_module(module), name).__module__ == module, (
            "the errors are compared by the module they are defined in"
        )


def test_cards_prints_a_row_a_parameter_and_the_totals(capsys: pytest.CaptureFixture[str]):
    from k3.cards import describe
    from k3.presets import preset

    assert cli.main(["cards", "model=tiny"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "shape", "blocks", "placement", "optimizer", "decay", "dtype", "fp8", "quantise", "published"]
    cards = describe(preset("tiny"))
    names = [line.split("  ")[0] for line in rows[: len(cards)]]
    assert names == list(cards)
    (experts,) = [line for line in rows if line.startswith("layers.1.feed_forward.experts.gate_up ")]
    assert "16×64×32" in experts and "per expert: gate 32 · up 32" in experts and "  muon  " in experts and "  mxfp4  " in experts
    (decay,) = [line for line in rows if line.startswith("layers.0.attention.A_log ")]
    assert "  adamw  " in decay and "  fp32  " in decay


def test_cards_counts_the_full_size_model(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["cards", "model=k3"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("parameters ")]
    total, active = (int(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdigit() and "," in word)
    assert total == pytest.approx(2.78e12, rel=1e-3) and active == pytest.approx(104.2e9, rel=1e-3)


def test_the_process_starts_itself_once_with_the_settings(tmp_path: Path):
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import json, os, sys\nfrom recipes import launch\nprint('start', flush=True)\nlaunch.ensure()\n"
        "print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))\n"
    )
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in (*launch.ALLOCATOR, "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TORCHDYNAMO_DISABLE")
    }
    env |= {"MALLOC_TOP_PAD_": "4096", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, probe, "a b", "x=1"], env=env, capture_output=True, text=True, check=True, timeout=60)
    *starts, last = done.stdout.splitlines()
    seen = json.loads(last)
    assert starts == ["start", "start"] and seen["argv"] == ["a b", "x=1"]
    assert seen["env"]["MALLOC_TOP_PAD_"] == "4096", "what the user has set stays"
    assert seen["env"]["TORCHDYNAMO_DISABLE"] == "1" and int(seen["env"]["OMP_NUM_THREADS"]) == launch.physical_cores()
    assert launch.settings(seen["env"]) == {}, "a third start would have nothing to add"


def test_settings_leave_alone_what_has_no_meaning_here():
    assert not set(launch.ALLOCATOR) & set(launch.settings({"LD_PRELOAD": "/usr/lib/libjemalloc.so"}))
    assert "OMP_NUM_THREADS" not in launch.settings({"OMP_NUM_THREADS": "3"})
    assert not launch.sees_cuda({"CUDA_VISIBLE_DEVICES": ""})
    assert 1 <= launch.physical_cores() <= (os.cpu_count() or 1)
