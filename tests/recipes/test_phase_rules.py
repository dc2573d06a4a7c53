"""What the phases after pretraining refuse, and what they would not read: one message with the key, its value and the fix."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from data.errors import DataError
from recipes import cli
from recipes.chain import stages
from recipes.compose import compose
from recipes.errors import UserError
from recipes.phases import PHASES
from recipes.phases.rules import IDLE
from recipes.training import train
from tests.recipes.small_phases import words
from tests.recipes.small_run import do

EXPERTS = "distill.teachers=[chain_sum:x,gcd:x,family_relationships:x]"
REFUSED = [  # verb, words behind run.init, what the message must hold
    ("rl", "rl.samples=1", "rl.samples=1: must be at least 2; a group's mean"),
    ("rl", "rl.prompts=0", "rl.prompts=0: must be at least 1"),
    ("rl", "rl.complete=0", "rl.complete=0"),
    ("rl", "rl.complete=1.5", "rl.complete=1.5: is a share"),
    ("rl", "rl.low=1.1", "rl.low=1.1: the clipped ratio must hold 1"),
    ("rl", "rl.tau=-1", "rl.tau=-1"),
    ("rl", "rl.budget.start=1 rl.budget.end=2", "rl.budget.end=2"),
    ("rl", "rl.budget.start=-1", "rl.budget.start=-1.0: is a factor of the initial model's lengths"),
    ("rl", "rl.effort=low", "rl.effort=low: data.chat.mode=instruct answers without thinking"),
    ("rl", "parallel.pp=2", "parallel.pp=2: a pipeline does not generate yet"),
    ("rl", "tasks.generators=[gdc]", "tasks.generators=gdc: no such generator of reasoning-gym; the nearest is gcd"),
    ("rl", "tasks.parameters.gcd.max_valu=3", "tasks.parameters.gcd.max_valu: no such parameter; the nearest is max_value"),
    ("rl", "rewards.names=[exct]", "rewards.names=exct: no such reward; the nearest is exact"),
    ("rl", "rewards.names=[mine.py:f]", "mine.py: no such file"),
    ("rl", "exam.max_new_tokens=0", "exam.max_new_tokens=0: must be at least 1"),
    ("rl", "data.tokenizer=train", "data.tokenizer=train: the model reads its own tokens"),
    ("rl", "model.layers=3", "model.layers=3: the weights of run.init="),
    ("sft", "sft.examples=0", "sft.examples=0: must be at least 1"),
    ("sft", "exam.enabled=true parallel.pp=2", "give 1, or exam.enabled=false"),
    ("sft", "data.chat.path=nowhere.jsonl", "data.chat.path=nowhere.jsonl: no such file or folder"),
    ("extend", "recall.lengths=[64]", "recall.lengths=[64]: rows must have room for facts"),
    ("extend", "data.seq_length=64 data.long.recall=0", "data.seq_length=64: recall is measured in such rows"),
    ("extend", "recall.rows=0", "recall.rows=0: must be at least 1"),
    ("extend", "qat=mxfp4", "give qat=none"),
    ("distill", "", "distill.teachers=[]: names no expert"),
    ("distill", "distill.teachers=[gcd]", "gcd is no DOMAIN:PATH"),
    ("distill", "distill.teachers=[gcd:x,gcd:y]", "gcd has a teacher already"),
    ("distill", "distill.teachers=[gcd:x]", "no expert is for chain_sum, family_relationships"),
    ("distill", "tasks.generators=[gcd] distill.teachers=[gcd:x,lcm:y]", "there are no tasks of lcm"),
    ("distill", "tasks.generators=[gcd] distill.teachers=[gcd/low:x]", "data.chat.mode=instruct answers without thinking"),
    ("distill", f"{EXPERTS} distill.limit=0", "distill.limit=0.0: must be above 0"),
    ("distill", EXPERTS, "distill.teachers: chain_sum: x: neither a checkpoint, nor a run folder"),
    ("eval", "eval.what=[]", "eval.what=[]: give each measure once, and at least one: heldout, tasks"),
    ("eval", "eval.what=[recall,recall]", "give each measure once"),
    ("eval", "eval.out=.", "eval.out=.: is a folder; give a file"),
    ("eval", "parallel.pp=2", "give 1, or eval.what without tasks"),
    ("eval", "run.resume=here", "run.resume=here"),
    ("eval", "eval.what=[context] recall.lengths=[96,256]", "must divide the longest, 256; leave out 96"),
    ("eval", "eval.what=[draft] parallel.cp=2", "what the model says of later tokens lies on other context ranks; give 1"),
]
IGNORED = [  # verb, words behind run.init: the last one would do nothing
    *[("extend", w) for w in ("data.chat.mode=instruct", "data.chat.path=x")],
    *[("sft", w) for w in ("data.corpus=.", "data.long.documents=0.5", "data.heldout_fraction=0.2", "data.chat.heldout=x")],
    *[("sft", f"data.chat.path=x {w}") for w in ("tasks.seed=3", "rewards.seconds=3", "exam.max_new_tokens=3", "sft.examples=3")],
    *[("sft", f"exam.enabled=false {w}") for w in ("rewards.seconds=3", "exam.max_new_tokens=3")],
    *[("rl", f"exam.enabled=false {w}") for w in ("exam.max_new_tokens=3", "tasks.heldout=3", "run.eval_every=3")],
    *[
        ("rl", f"data.{w}")
        for w in ("corpus=.", "cache=x", "heldout_fraction=0.2", "heldout_tokens=3", "seed=3", "batch_size=32")
    ],
    *[
        ("rl", f"data.{w}")
        for w in ("ramp.samples=8 data.ramp.start=8", "long.documents=0.5", "chat.path=x", "chat.too_long=refuse")
    ],
    *[("rl", w) for w in ("rl.budget.end=0.5", "model.mtp_weight=0.3", "optim.guard.loss=9")],
    *[("distill", f"{EXPERTS} {w}") for w in ("rl.effort=none data.batch_size=32", "rl.budget.start=2", "data.batch_size=32")],
    *[("eval", f"run.{w}") for w in ("steps=3", "dir=x", "seed=3", "eval_every=3", "sample_tokens=3")],
    *[
        ("eval", w)
        for w in ("model.moe.ema=0.5", "activations.layer=recompute", "data.ramp.samples=8 data.ramp.start=8", "data.seed=3")
    ],
    *[
        ("eval", f"eval.what=[heldout] {w}")
        for w in ("tasks.seed=3", "rewards.seconds=3", "recall.rows=3", "data.chat.mode=thinking")
    ],
    *[("eval", f"eval.what=[tasks] {w}") for w in ("data.corpus=.", "data.heldout_tokens=3", "recall.rows=3", "draft.steps=3")],
    *[("eval", f"eval.what={w}") for w in ("[context] recall.rows=3", "[heldout] recall.lengths=[64]")],
]


@pytest.mark.parametrize(("verb", "line", "says"), REFUSED)
def test_a_phase_refuses(
    verb: str,
    line: str,
    says: str,
    pretrained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([verb, f"run.init={pretrained / 'base'}", *line.split()]) == 2
    said = capfd.readouterr()
    assert says in said.err and "Traceback" not in said.err
    assert all(text.startswith("k3: ") for text in said.err.splitlines())
    assert not list((tmp_path / "runs").glob("*")), "a run folder was left"


@pytest.mark.parametrize(("verb", "line"), IGNORED)
def test_what_a_phase_would_not_read_is_refused(verb: str, line: str, pretrained: Path) -> None:
    *_, last = line.split()
    with pytest.raises(UserError) as caught:
        compose([f"run.init={pretrained / 'base'}", *line.split()], verb)
    assert f"{last.split('=')[0]}: has no effect, because" in str(caught.value)


def test_every_key_of_the_rules_exists() -> None:
    cfg = compose()
    for key, _ in IDLE:
        value = cfg
        for part in key.split("."):
            value = getattr(value, part)


def test_a_teacher_of_another_shape(pretrained: Path) -> None:
    code, other = do(pretrained, "shallow", "model.layers=2", "model.residual_block=1", "run.steps=1", "run.sample_tokens=0")
    assert code == 0
    cfg = compose(
        words(pretrained, "distill", "shaped", f"distill.teachers=[sums:{pretrained / 'base'},words:{other}]"), "distill"
    )
    with pytest.raises(UserError, match=rf"distill.teachers: words: model.layers=\d+: the weights of {other} have 2"):
        train(cfg)
    assert not (pretrained / "shaped").exists()


@pytest.mark.parametrize(
    ("teachers", "says"), [(["sums"], "no expert is for words"), (["sums", "words", "x"], "there are no tasks of x")]
)
def test_domains_of_a_folder_have_their_experts(teachers: list[str], says: str, pretrained: Path) -> None:
    given = ",".join(f"{name}:{pretrained / 'base'}" for name in teachers)
    cfg = compose(words(pretrained, "distill", "domains", f"distill.teachers=[{given}]"), "distill")
    with pytest.raises(UserError, match=says):
        train(cfg)
    assert not (pretrained / "domains").exists()


def test_rows_too_short_for_a_prompt(pretrained: Path) -> None:
    cfg = compose(words(pretrained, "rl", "short", "data.seq_length=40", "exam.enabled=null"), "rl")
    with pytest.raises(
        UserError, match=r"data.seq_length=40: task .* has a prompt of \d+ tokens, which with rl.max_new_tokens=8"
    ):
        train(cfg)
    cfg = compose(words(pretrained, "sft", "short", "data.seq_length=20"), "sft")
    with pytest.raises((UserError, DataError), match=r"data\.seq_length=20"):
        train(cfg)
    assert not (pretrained / "short").exists()


@pytest.mark.parametrize("verb", ["rl", "sft", "pretrain"])
def test_a_run_is_continued_by_its_own_verb(verb: str, pretrained: Path) -> None:
    own = "pretrain" if verb != "pretrain" else "sft"
    folder = pretrained / "base"
    if own == "sft":
        folder = pretrained / "of-sft"
        from recipes.compose import save_resolved

        save_resolved(compose(words(pretrained, "sft", "of-sft"), "sft"), folder / "config.yaml")
    with pytest.raises(UserError, match=rf"run.resume={folder}: is a run of k3 {own}; continue it with that"):
        compose([f"run.resume={folder}"], verb)


def test_a_chain_of_all_phases(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = [
        *("chain=[pretrain,extend,sft,rl,distill]", "cluster=cpu", "submit.dry_run=true", "model=tiny", "run.steps=4"),
        *(
            f"run.dir={tmp_path / 'all'}",
            "extend:run.steps=2",
            "rl:rl.complete=0.5",
            "3:optim.lr=1e-3",
            "distill:tasks.generators=[gcd]",
        ),
        f"distill:distill.teachers=[gcd:{tmp_path / 'all'}-4-rl]",
    ]
    chain = ["pretrain", "extend", "sft", "rl", "distill"]
    made = stages(line, list(PHASES))
    assert [stage.phase for stage in made] == chain == [stage.cfg.phase for stage in made]
    assert [stage.cfg.run.steps for stage in made] == [4, 2, 4, 4, 4]
    assert made[2].cfg.optim.lr == 1e-3 and made[3].cfg.rl.complete == 0.5 and made[4].cfg.qat.name.name == "mxfp4"
    assert all(str(after.cfg.run.init) == before.cfg.run.dir for before, after in pairwise(made))
    assert cli.main(["submit", *line]) == 0
    said = capfd.readouterr().out
    assert all(f"k3 {phase}" in said or phase in said for phase in chain)
    assert not list(tmp_path.iterdir())
