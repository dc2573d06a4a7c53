"""From words to one checked configuration: what users type works, and nothing is dropped in silence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.activations import full
from k3.config import Balance
from k3.presets import PRESETS
from optim.config import OptimizerName
from parallel.config import ParallelConfig, data_parallel_size
from recipes.compose import CONFIG_FILE, compose, load_resolved, save_resolved
from recipes.config import JOBS, Config, Precision, leaves
from recipes.errors import UserError, nearest, shown
from recipes.help import keys
from recipes.phases import PHASES


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        compose(words)
    return str(caught.value)


def test_the_default_is_the_nano_job():
    cfg = compose()
    assert cfg.model == PRESETS["nano"]()
    assert (cfg.optim.name, cfg.precision.name) == (OptimizerName.muon, Precision.fp32)
    assert cfg.run.dir is not None and cfg.run.dir.startswith("runs/nano-")
    assert cfg.parallel.dp == 1 and cfg.parallel.sp is False


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_chosen(name: str):
    cfg = compose([f"model={name}"])
    assert cfg.model == PRESETS[name]() and f"runs/{name}-" in str(cfg.run.dir)


def test_the_names_that_users_type():
    words = """
        model=tiny model.hidden_size=128 model.layers=5 model.kda.heads=2 model.kda.lower_bound=-4 model.mla.heads=2
        model.moe.experts=8 model.moe.top_k=3 model.moe.latent_size=16 model.moe.balance=none model.residual=sum
        model.latent=true model.activation=swiglu model.mtp_layers=0
        optim=muon optim.lr=1e-3 optim.weight_decay=0 optim.muon.per_head=false optim.clip.tau=50
        data.corpus=stdlib data.tokenizer=train data.seq_length=64 data.batch_size=6 data.micro_batch_size=3
        parallel.tp=1 parallel.sp=false parallel.ep=1 parallel.pp=1 parallel.vpp=1 parallel.cp=1 parallel.dp=1
        precision=bf16 qat=none run.steps=7 run.seed=3 run.resume=null run.dir=here
        checkpoint.every=2 checkpoint.keep_last=1 wandb.mode=disabled
    """
    cfg = compose(words.split())
    assert cfg.model.hidden_size == 128 and cfg.model.kda.lower_bound == -4.0 and cfg.model.moe.balance is Balance.none
    assert cfg.optim.name is OptimizerName.muon and cfg.optim.muon.per_head is False and cfg.optim.lr == 1e-3
    k2 = compose(["optim=muonclip", "optim.lr=1e-3"]).optim
    assert (k2.name, k2.muon.per_head, k2.clip.enabled, k2.lr) == (OptimizerName.muon, False, True, 1e-3)
    off = compose(["model=tiny", "model.latent=false", "optim=adamw"])
    assert off.model.latent is False and off.optim.name is OptimizerName.adamw
    assert cfg.precision.name is Precision.bf16 and cfg.run.dir == "here" and cfg.data.micro_batch_size == 3


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optim.lrr=1", "nearest is optim.lr"),
        ("lr=1", "nearest is optim.lr"),
        ("model.moe.topk=2", "nearest is model.moe.top_k"),
        ("modle=nano", "nearest is model"),
        ("+optim.lrr=1", "nearest is optim.lr"),
        ("typo=1", "k3 VERB --help lists all keys"),
        ("+optim.lr=1", "give optim.lr=value"),
        ("++optim.lrr=1", "nearest is optim.lr"),
        ("~optim.lr", "every key is needed"),
        ("~model", "every key is needed"),
        ("model=nanoo", "nearest is nano;"),
        ("model=null", "there are tiny, nano"),
        ("model=[tiny]", "there are tiny, nano"),
        ("precision=fp16", "nearest is fp"),
        ("optim.lr=fast", "could not be converted to Float"),
        ("optim.lr=null", "optim.lr"),
        ("optim.lr=nan", "finite"),
        ("optim.lr=[1]", "could not be converted to Float"),
        ("run.steps=1.5", "by default"),
        ("run.steps=???", "run.steps"),
        ("model.latent=2", "true or false"),
        ("model.moe.balance=quantle", "nearest is quantile"),
        ("optim.lr=1e-3,2e-3", "one run"),
        ("optim.lr", "has no value"),
        ("optim", "one of muon, adamw"),
        ("run=fast", "run is a section"),
        ("model.moe=4", "model.moe is a section"),
        ("model.layers.x=1", "no key model.layers.x"),
        ("hydra.run.dir=x", "run.dir"),
        ("--multirun", "--multirun"),
        ("", "no key"),
        ("run.dir=a{b", 'run.dir="a{b"'),
        ("run.dir=${oc.env:K3_NO_SUCH_VARIABLE}", "K3_NO_SUCH_VARIABLE"),
        ("model.kda.lower_bound=-7", "must lie in [-5, 0)"),
        ("model.moe.top_k=32", "top_k=32"),
        ("parallel.vpp=2", "parallel.vpp=2: virtual stages need parallel.pp"),
        ("parallel.tp=3", "parallel.tp=3: must divide model.kda.heads = 2"),
        ("parallel=tensr", "tensor"),
        ("parallel.sp=true", "parallel.sp=true"),
        ("qat=mxfp4", "give qat=none"),
        ("data.micro_batch_size=3", "multiple of data.micro_batch_size"),
        ("data.seq_length=2", "must be at least 3"),
        ("data.corpus=/no/such/folder", "data.corpus=/no/such/folder"),
        ("data.tokenizer=/no/such/file", "data.tokenizer=/no/such/file"),
        ("optim.lr=-1", "must be positive"),
        ("optim.adamw.beta2=1", "must lie in [0, 1)"),
        ("optim.schedule.warmup=2", "fraction"),
        ("optim.muon.steps=0", "at least 1"),
        ("run.steps=0", "at least 1"),
        ("run.threads=0", "at least 1"),
        ("run.eval_every=-1", "at least 0"),
        ("checkpoint.keep_last=0", "at least 1"),
        ("run.resume=auto", "give run.dir"),
        ("run.resume=/no/such/run", "no run is there"),
    ],
)
def test_a_mistake_is_named_with_its_fix(word: str, says: str):
    message = refusal(word)
    assert says in message and word.split("=")[0].lstrip("+~") in message and "Traceback" not in message


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_low_precision_is_refused_not_ignored(name: str):
    message = refusal(f"precision={name}")
    assert f"precision={name}" in message and "give precision=bf16" in message


def test_all_refusals_come_in_one_message():
    lines = refusal("model.kda.lower_bound=-7", "qat=mxfp4", "run.steps=0", "parallel.vpp=4", "data.seed=-1").splitlines()
    assert [line.split("=")[0] for line in lines] == ["model.kda.lower_bound", "parallel.vpp", "data.seed", "qat", "run.steps"]


@pytest.mark.parametrize(
    ("tp", "cp", "ep", "dp"), [(1, 1, 1, 1), (2, 1, 8, 4), (2, 2, 8, 2), (4, 2, 8, 1), (3, 1, 2, 2), (4, 1, 6, 3)]
)
def test_dp_is_the_least_for_which_ep_divides(tp: int, cp: int, ep: int, dp: int):
    assert data_parallel_size(ParallelConfig(tp=tp, cp=cp, ep=ep)) == dp
    assert (tp * cp * dp) % ep == 0 and all((tp * cp * less) % ep for less in range(1, dp))


def test_the_resolved_file_gives_the_same_configuration(tmp_path: Path):
    cfg = compose(
        ["model=tiny", "optim=adamw", "precision=bf16", "run.sample_prompt='a: \"b\" # c'", "model.mla.q_lora_rank=null"]
    )
    save_resolved(cfg, tmp_path / "new" / CONFIG_FILE)
    assert load_resolved(tmp_path / "new" / CONFIG_FILE) == cfg
    assert [p.name for p in (tmp_path / "new").iterdir()] == [CONFIG_FILE]


@pytest.mark.parametrize("text", ["run:\n  stepz: 3\n", "run: [", "just words", "optim:\n  lr: fast\n"])
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path: Path, text: str):
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(UserError, match=CONFIG_FILE):
        load_resolved(tmp_path / CONFIG_FILE)


def test_a_resume_takes_the_configuration_of_the_run(tmp_path: Path):
    first = compose(["model=tiny", "model.layers=5", "optim.lr=1e-3", f"run.dir={tmp_path}", "run.steps=9"])
    save_resolved(first, tmp_path / CONFIG_FILE)

    again = compose([f"run.resume={tmp_path}", "checkpoint.every=3"])
    assert again.checkpoint.every == 3 and again.run.resume == str(tmp_path)
    again.checkpoint.every, again.run.resume = first.checkpoint.every, None
    assert again == first

    automatic = compose(["run.resume=auto", f"run.dir={tmp_path}", "optim=muon"])
    assert automatic.model == first.model and automatic.optim == first.optim, "a group typed again resets nothing inside it"
    assert compose([f"run.resume={tmp_path}", "optim=muonclip"]).optim.muon.per_head is False, "but what the option is about"
    assert compose([f"run.resume={tmp_path}", "activations=full"]).activations == full()
    assert compose([f"run.resume={tmp_path}", "model=nano"]).model == PRESETS["nano"](), "what is typed is never dropped"


def test_auto_begins_where_nothing_is(tmp_path: Path):
    cfg = compose(["run.resume=auto", f"run.dir={tmp_path / 'new'}", "model=tiny"])
    assert cfg.model == PRESETS["tiny"]() and cfg.run.dir == str(tmp_path / "new")


def test_a_resume_elsewhere_and_a_near_miss_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_resolved(Config(), tmp_path / "runs" / "nano-7" / CONFIG_FILE)
    monkeypatch.chdir(tmp_path)
    assert "continues in its own folder" in refusal("run.resume=runs/nano-7", "run.dir=elsewhere")
    assert "nearest is runs/nano-7" in refusal("run.resume=runs/nano-8")


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    seen = set()
    for _ in range(3):
        cfg = compose(["model=tiny"])
        Path(str(cfg.run.dir)).mkdir(parents=True)
        seen.add(cfg.run.dir)
    assert len(seen) == 3


def test_every_key_can_be_typed_and_is_in_the_help():
    for job, sections in JOBS.items():
        if job in (*PHASES, "eval") and job != "pretrain":
            continue  # they begin with a model: tests/recipes/test_phase_rules.py
        table, words, default = keys(sections), [], compose([], job)
        for key, value in leaves(default):
            if key.split(".")[0] in sections:
                assert f"\n  {key}=" in table, key
                words.append(f"{key}='{value}'" if isinstance(value, str) else f"{key}={shown(value)}")
        assert compose(words, job) == default


def test_the_help_shows_types_defaults_and_comments():
    table = keys()
    assert "model.moe.balance=quantile" in table and "quantile|bias|aux|none" in table
    (line,) = [line for line in table.splitlines() if line.startswith("  run.threads=")]
    assert line.split()[:2] == ["run.threads=null", "int|null"] and "CPU threads" in line
    assert "model.layers" in keys(["model"]) and "optim.lr" not in keys(["model"])


@given(st.sampled_from([key for key, _ in leaves(Config())]), st.data())
def test_one_letter_too_many_still_finds_the_key(key: str, data: st.DataObject):
    names = [name for name, _ in leaves(Config())]
    at = data.draw(st.integers(0, len(key)))
    typo = key[:at] + data.draw(st.sampled_from("xq_")) + key[at:]
    assert nearest(typo, names) == key or typo in names or len(key) < 7


def test_the_yaml_holds_no_key_of_its_own():
    from omegaconf import OmegaConf

    import recipes

    raw = OmegaConf.load(Path(recipes.__path__[0]) / "conf" / "pretrain.yaml")
    sections = {field.name for field in dataclasses.fields(Config)}
    assert set(raw) - {"defaults"} <= sections
