"""The loop, its callbacks and what a complete run leaves behind, at toy size and for real."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import data
import k3
import parallel
from data.batch import Batch
from k3 import hf
from optim.config import GuardConfig
from parallel import checkpoint
from parallel.states import seed_generators
from recipes import summary
from recipes.callbacks import Balance, Checkpoints, Evaluation, Metrics
from recipes.callbacks.progress import clock
from recipes.compose import compose
from recipes.config import CheckpointConfig
from recipes.interrupts import Interrupts
from recipes.objective import Objective, heldout_loss
from recipes.phases.pretrain import Phase
from recipes.trainer import Callback, TrainingError
from recipes.training import build
from tests.recipes.small_run import do, metrics, same_checkpoint, stored, words, write_corpus

MAX_SKIPPED = GuardConfig().max_skipped


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("trainer")
    write_corpus(home / "corpus")
    return home


@pytest.fixture(scope="module")
def world():
    yield parallel.start()
    parallel.stop()


@pytest.fixture
def make(home, world):
    """A trainer from overrides, at step 0."""

    def trainer(*more, steps=20):
        cfg = compose(words(home, "unused", *more))
        cfg.run.steps = steps
        return Phase(cfg, world).trainer(build(cfg, world), 0)

    return trainer


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.module.named_parameters()}


def test_micro_batches_change_nothing_but_rounding(make):
    """Losses over global counts: 4 sequences in one, two or four micro-batches are one step."""
    trainers = [make("precision=fp64", f"data.micro_batch_size={size}") for size in (4, 2, 1)]
    for _ in range(2):
        whole, *cut = [t.train_step() for t in trainers]
        for result in cut:
            assert result.losses == pytest.approx(whole.losses, rel=1e-12)
            assert result.report.grad_norm == pytest.approx(whole.report.grad_norm, rel=1e-9)
    loads = [[b.load.tolist() for b in k3.balancing(t.module)] for t in trainers]
    assert loads[0] == loads[1] == loads[2]
    gradients = [{n: p.main_grad.clone() for n, p in t.module.named_parameters()} for t in trainers]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[2][name], gradient, rtol=1e-7, atol=1e-12)


def test_the_objective_is_the_mean_over_counted_targets(world):
    torch.manual_seed(0)
    masks = [torch.rand(2, 2, 5) < 0.6, torch.rand(2, 2, 5) < 0.2]
    losses = [torch.rand(2, 2, 5, dtype=torch.float64) * mask for mask in masks]
    ids = torch.zeros(2, 5, dtype=torch.int64)
    objective = Objective((1.0, 0.3), world)
    denominators = objective.denominators([Batch(ids, ids, ids.bool(), mask) for mask in masks])
    shares = [objective.share(loss, denominators) for loss in losses]
    every, counted = torch.cat(losses, 1), torch.cat(masks, 1)
    expected = [every[m][counted[m]].mean().item() for m in range(2)]
    assert objective.total([parts for _, parts in shares]) == pytest.approx(expected, rel=1e-14)
    assert sum(value for value, _ in shares).item() == pytest.approx(expected[0] + 0.3 * expected[1], rel=1e-14)


def test_no_counted_target_is_no_division_by_zero(world):
    ids = torch.zeros(1, 3, dtype=torch.int64)
    objective = Objective((1.0, 0.1), world)
    mask = torch.stack([torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.bool)])
    denominators = objective.denominators([Batch(ids, ids, ids.bool(), mask)])
    value, parts = objective.share(torch.tensor([[[1.0, 2.0, 3.0]], [[0.0, 0.0, 0.0]]]), denominators)
    assert value.item() == 2.0 and parts.tolist() == [2.0, 0.0]


def test_heldout_loss_is_the_training_loss_of_the_same_batch_and_leaves_no_trace(make):
    trainer = make("precision=fp64")
    batch = next(trainer.stream).micro_batches[0]
    denominators = trainer.objective.denominators([batch])
    trainer.module.train()
    losses = trainer.objective.forward(trainer.module, batch, batch.tokens.numel())
    expected = trainer.objective.share(losses.detach(), denominators)[1][0].item()
    for target in k3.clip_targets(trainer.module):
        target.reset()
    assert heldout_loss(trainer.model, [batch]) == pytest.approx(expected, rel=1e-12)
    assert trainer.module.training
    assert all(t.max_logits.eq(-torch.inf).all() for t in k3.clip_targets(trainer.module)), (
        "evaluation must not feed the weight clip"
    )
    assert all(b.counting.sum() == 0 for b in k3.balancing(trainer.module)), "evaluation must not feed the balancers"


def test_it_learns(make):
    trainer = make("data.batch_size=16", "data.micro_batch_size=16", "optim.lr=5e-3", steps=30)
    assert trainer.run(30)
    first = math.log(256)
    batch = next(trainer.stream).micro_batches
    assert heldout_loss(trainer.model, batch) < first - 1.5
    assert trainer.progress.step == 30 and trainer.progress.tokens == 30 * 16 * 32


class Spoil(Callback):
    """From a step on, every loss is infinite or large (with the gradients as they are), or a parameter's gradient is NaN."""

    def __init__(self, how, since):
        self.how, self.since = how, since

    def step(self, trainer, result):
        if result.step == self.since:
            self.before = parameters(trainer)
            self.spoil(trainer)

    def spoil(self, trainer):
        share = trainer.objective.share
        if self.how == "loss":
            spoilt = lambda losses, denominators, *_: tuple(x + torch.inf for x in share(losses, denominators))
        elif self.how == "spike":
            spoilt = lambda losses, denominators, *_: (share(losses, denominators)[0], 1000 * share(losses, denominators)[1])
        else:
            spoilt = lambda losses, denominators, *_: (
                share(losses * losses.detach() / 0.0, denominators)[0],
                share(losses, denominators)[1],
            )
        object.__setattr__(trainer.objective, "share", spoilt)


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_steps_without_a_finite_loss_change_nothing_and_end_training(make, tmp_path, how):
    trainer = make()
    spoil = Spoil(how, since=2)
    bias = lambda: [b.bias.clone() for b in k3.balancing(trainer.module)]
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(every=1), {})
    trainer.callbacks = [spoil, Metrics(tmp_path / "metrics.jsonl"), checkpoints]
    with pytest.raises(
        TrainingError, match=rf"steps 3 to {2 + MAX_SKIPPED} were all skipped \(last: the {how}( norm)? is not finite"
    ) as error:
        trainer.run(20)
    assert "none of them changed the parameters" in str(error.value)
    assert trainer.progress.step == 2 + MAX_SKIPPED
    for name, value in parameters(trainer).items():
        assert torch.equal(value, spoil.before[name]), name
    assert all(torch.isfinite(b).all() for b in bias())
    records = metrics(tmp_path)
    assert [r["skipped"] for r in records] == [False] * 2 + [True] * MAX_SKIPPED
    assert (records[2]["loss"] is None) == (how == "loss")
    assert checkpoint.latest(tmp_path / "checkpoints").name == "step_2", "the last good state"


def test_a_run_that_is_stuck_leaves_the_last_good_state(make, tmp_path):
    """The checkpoint is, bit for bit, the one that a run that ended before the skipped steps writes."""
    quick = ("optim.guard.min_steps=2", "optim.guard.window=4", "optim.guard.max_skipped=3")
    stuck, ended = make(*quick), make(*quick)
    saver = Checkpoints(tmp_path / "stuck", CheckpointConfig(every=0), {})
    stuck.callbacks = [Spoil("spike", since=4), Metrics(tmp_path / "metrics.jsonl"), saver]
    seed_generators(1)
    with pytest.raises(TrainingError, match=r"steps 5 to 7 were all skipped \(last: spike of the loss, [\d.e+]+ times the"):
        stuck.run(20)
    reasons = [r.get("skip_reason") for r in metrics(tmp_path)]
    assert reasons[:4] == [None] * 4 and all(" times the median of the last 4 (limit " in r for r in reasons[4:])
    ended.callbacks = [Checkpoints(tmp_path / "ended", CheckpointConfig(every=0), {})]
    seed_generators(1)
    ended.run(4)
    found, wanted = (checkpoint.latest(tmp_path / name) for name in ("stuck", "ended"))
    assert found.name == wanted.name == "step_4"
    same_checkpoint(found, wanted)
    theirs, ours = (checkpoint.facts(path) for path in (wanted, found))
    assert {**theirs["progress"], "train_seconds": 0} == {**ours["progress"], "train_seconds": 0}
    assert theirs["data_position"] == ours["data_position"] == 4


def test_a_run_that_is_stuck_from_its_first_step_saves_nothing(make, tmp_path):
    trainer = make("optim.guard.max_skipped=2")
    spoil = Spoil("loss", since=0)
    spoil.start = lambda trainer: spoil.spoil(trainer)
    trainer.callbacks = [spoil, Checkpoints(tmp_path / "checkpoints", CheckpointConfig(every=1), {})]
    with pytest.raises(TrainingError, match="steps 1 to 2"):
        trainer.run(20)
    assert not (tmp_path / "checkpoints").exists()


def test_one_bad_step_is_skipped_and_forgotten(make):
    trainer = make()
    share = trainer.objective.share
    trainer.train_step()
    object.__setattr__(trainer.objective, "share", spoilt(share))
    assert trainer.train_step().report.skipped and trainer.progress.skipped_in_a_row == 1
    object.__setattr__(trainer.objective, "share", share)
    result = trainer.train_step()
    assert not result.report.skipped and trainer.progress.skipped_in_a_row == 0
    assert math.isfinite(result.losses[0])


def test_an_idle_step_moves_no_parameter_and_tells_nothing_of_the_models_health(make, tmp_path):
    trainer = make()
    trainer.train_step()
    before = {name: value.clone() for name, value in parameters(trainer).items()}
    guard = {name: value.clone() for name, value in trainer.optimizer.guard.tensors().items()}
    stream = trainer.stream

    class Idle:
        position = 0

        def __next__(self):
            return replace(next(stream), idle="nothing differs")

    trainer.stream = Idle()
    trainer.callbacks = [Metrics(tmp_path / "metrics.jsonl")]
    trainer.run(5)
    assert trainer.progress.step == 5 and trainer.progress.skipped_in_a_row == 0
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
    assert all(torch.equal(value, guard[name]) for name, value in trainer.optimizer.guard.tensors().items())
    assert [(r["idle"], r["skipped"]) for r in metrics(tmp_path)] == [("nothing differs", False)] * 4
    assert trainer.optimizer.skipped_count == 0
    share = trainer.objective.share
    object.__setattr__(trainer.objective, "share", spoilt(share))
    trainer.stream = stream
    assert trainer.train_step().report.skipped
    trainer.stream = Idle()
    assert trainer.train_step().report.skipped, "which is worse than idle"
    object.__setattr__(trainer.objective, "share", share)
    assert trainer.train_step().report.idle and trainer.progress.skipped_in_a_row == 2


def spoilt(share):
    return lambda *a: tuple(x * torch.nan for x in share(*a))


def test_callbacks_run_in_order_and_close_after_an_error(make):
    heard = []

    class Listen(Callback):
        def __init__(self, name):
            self.name = name

        def start(self, trainer):
            heard.append(f"{self.name} start")

        def step(self, trainer, result):
            heard.append(f"{self.name} {result.step}")
            if self.name == "b" and result.step == 2:
                raise RuntimeError("broken")

        def end(self, trainer):
            heard.append("end")

        def close(self, trainer):
            heard.append(f"{self.name} close")

    trainer = make()
    trainer.callbacks = [Listen("a"), Listen("b")]
    with pytest.raises(RuntimeError, match="broken"):
        trainer.run(5)
    assert heard == ["a start", "b start", "a 1", "b 1", "a 2", "b 2", "b close", "a close"]


def test_asked_to_stop_it_ends_without_completing(make):
    trainer = make()
    heard = []

    class Listen(Callback):
        def end(self, trainer):
            heard.append("end")

        def complete(self, trainer):
            heard.append("complete")

    trainer.callbacks = [Listen()]
    trainer.asked_to_stop = lambda: trainer.progress.step >= 2
    assert not trainer.run(5)
    assert trainer.progress.step == 2 and heard == ["end"]


def test_metrics_say_what_the_step_did(make, tmp_path):
    trainer = make()
    heads = {name for name, card in k3.cards(trainer.module).items() if card.blocks.per_head}
    batches = next(make().stream).micro_batches
    lines = data.Baselines(unigram=3.0, bigram=2.0, targets=1)
    trainer.callbacks = [
        Evaluation(batches, lines, every=2),
        Balance(k3.balancing(trainer.module)),
        Metrics(tmp_path / "metrics.jsonl", heads),
    ]
    trainer.run(5)
    records = metrics(tmp_path)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert [("heldout_loss" in r) for r in records] == [False, True, False, True, True], "every second, and the last"
    layers = [b.name for b in k3.balancing(trainer.module)]
    assert len(layers) == 9, "eight MoE layers and the MTP layer's"
    for r in records:
        assert r["tokens"] == r["step"] * 128 and r["loss"] > 0 and r["mtp_loss/1"] > 0 and r["grad_norm"] > 0
        assert r["tokens_per_second"] == pytest.approx(128 / r["seconds"])
        for name in layers:
            load = r["load/experts"][name]
            assert sum(load) == 128 * 2, "every token went to two experts"
            assert r[f"load/max_over_mean/{name}"] == pytest.approx(max(load) / 16)
            assert r[f"load/dead_fraction/{name}"] == load.count(0) / 16
        assert r["load/max_over_mean"] == max(r[f"load/max_over_mean/{name}"] for name in layers)
        assert r["load/dead_fraction"] == max(r[f"load/dead_fraction/{name}"] for name in layers)
        assert len(r["update_rms/heads"]["layers.0.attention.q_proj.weight"]) == 4
        assert r["max_logit"] is not None and r["update_rms/min"] <= r["update_rms/max"]


def test_long_runs_thin_out_the_details_only(make, tmp_path):
    trainer = make(steps=400)
    trainer.callbacks = [Balance(k3.balancing(trainer.module)), Metrics(tmp_path / "metrics.jsonl")]
    trainer.asked_to_stop = lambda: trainer.progress.step >= 2
    trainer.run(400)
    one, two = metrics(tmp_path)
    assert "load/experts" not in one and "load/experts" in two
    assert "load/max_over_mean/layers.1" in one


def test_a_complete_run_leaves_everything(home, capsys):
    more = ("run.eval_every=2", "run.compare_dense=0.5", "run.sample_tokens=5", "checkpoint.every=2")
    code, folder = do(home, "complete", "run.steps=4", *more)
    said = capsys.readouterr().out
    assert code == 0
    facts = json.loads((folder / "summary.json").read_text())
    assert facts["steps"] == 4 and facts["tokens"] == 4 * 128 and facts["skipped_steps"] == 0
    last = metrics(folder)[-1]
    assert facts["heldout_loss"] == last["heldout_loss"] and facts["bigram_loss"] == last["bigram_loss"] < last["unigram_loss"]
    dense = facts["dense"]
    assert dense["k3_heldout_loss"] == metrics(folder)[1]["heldout_loss"], "K3 at half of its schedule: step 2 of 4"
    assert dense["steps"] >= 1 and dense["tokens"] == dense["steps"] * 128 and dense["heldout_loss"] < math.log(256) + 0.5
    for name in ("loss.png", "experts.png", "residuals.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name
    assert (folder / "sample.txt").read_text().startswith("def ")
    assert (folder / "checkpoints/latest").read_text() == "step_4\n"
    exported = dict(hf.load(folder / "hf").named_parameters())
    kept = stored(folder / "checkpoints/step_4", "model.")
    assert all(torch.equal(value, kept[f"model.{name}"]) for name, value in exported.items()) and exported
    recorded = [r for r in metrics(folder) if "checkpoint/seconds" in r]
    assert [r["step"] for r in recorded] in ([3], [4]), "a step after the first save, whose end no step waits for"
    for times in (*recorded, facts["saving"]):
        assert 0 < times["checkpoint/stall_seconds"] <= times["checkpoint/seconds"]
    text = (folder / "summary.txt").read_text()
    assert text.strip() in said and "equal time  at 50% of its schedule a dense transformer" in text and "unigram" in text
    assert "layers.*.attention.q_proj.weight" in said and "muon" in said, "the parameter -> optimizer table"
    assert "step 4/4: loss" in said and "tokens/s" in said and "left" in said, "plain lines where there is no terminal"
    assert not (folder / "wandb").exists(), "wandb.mode=disabled"


@pytest.mark.parametrize("off", [("model.residual=sum",), ("model=dense", "model.vocab_size=256")])
def test_models_without_the_techniques_run_too(home, off):
    code, folder = do(home, f"off-{off[0][6:9]}", *off, "run.steps=2", "run.sample_tokens=0")
    assert code == 0 and (folder / "loss.png").exists() and not (folder / "residuals.png").exists()
    assert (folder / "experts.png").exists() == (off[0] != "model=dense")


def test_a_run_that_diverges_exits_with_one_and_names_the_last_checkpoint(home, capsys):
    code, folder = do(
        home,
        "diverges",
        "run.steps=40",
        "optim.lr=1e30",
        "optim.weight_decay=0",
        "checkpoint.every=1",
        "run.eval_every=0",
        "optim.grad_clip=0",
    )
    said = capsys.readouterr().out
    assert code == 1
    assert "were all skipped (last: " in said and f"the last good state is {folder / 'checkpoints' / 'step_'}" in said


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGUSR1, 0)])
def test_a_signal_is_a_request_and_the_handlers_come_back(number, code):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with Interrupts() as interrupts:
        assert not interrupts
        os.kill(os.getpid(), number)
        assert interrupts and interrupts.received == number and interrupts.exit_code == code
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_second_ctrl_c_stops_at_once():
    program = """
import os, signal, time
from recipes.interrupts import Interrupts
with Interrupts() as interrupts:
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGINT and "still here" in done.stdout


def test_balance_is_judged_by_the_worst_layer_from_step_21_on():
    def record(step, a, b):
        return {
            "step": step,
            "load/max_over_mean/a": a,
            "load/max_over_mean/b": b,
            "load/dead_fraction": 0.5 if step < 21 else 0.0,
        }

    early = [record(step, 9.0, 9.0) for step in range(1, 21)]
    late = [record(step, 1.2, 2.0 if 41 <= step <= 60 else 1.0) for step in range(21, 101)]
    found = summary.balance(early + late)
    assert found["worst_layer"] == "b" and found["max_over_mean"] == pytest.approx(1.25)
    assert found["worst_window"] == pytest.approx(2.0) and found["dead_fraction"] == 0.0
    assert summary.balance(early)["max_over_mean"] == 9.0, "a short run is judged as a whole"
    assert summary.balance([{"step": 1}]) is None and summary.balance([]) is None


def test_clock():
    assert [clock(s) for s in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]
