"""`k3 bench generate`: tokens/s of prefill and of decode at several batch sizes, and what K samples of one prompt cost."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

import k3
import parallel
from k3.engine import Engine
from recipes.console import say
from recipes.launch import ALLOCATOR
from recipes.summary import versions

ROWS = (16, 32, 64, 128)
PROMPT, NEW = 256, 32  # tokens of each trajectory
DRAFT = 3  # tokens proposed at a time
SAMPLES, LONG, ROUNDS = 8, 500, 7  # of the comparison: samples of one prompt, its tokens, rounds


class Prompts:
    """Random prompts, a new one at every call: nothing is found in a cache by chance."""

    def __init__(self, vocabulary: int, seed: int = 0):
        self.vocabulary, self.made = vocabulary, 0
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, length: int, samples: int = 1) -> list[k3.Trajectory]:
        """`samples` trajectories of one prompt."""
        prompt = torch.randint(self.vocabulary, (length,), generator=self.generator).tolist()
        self.made += 1
        return [k3.Trajectory(prompt, (self.made, k)) for k in range(samples)]


def seconds(engine: Engine, rows: list[k3.Trajectory], new: int) -> float:
    began = time.perf_counter()
    engine.run(rows, k3.Sampling(max_new_tokens=new))
    return time.perf_counter() - began


def speeds(model: k3.Model, rows: int, prompts: Prompts) -> dict[str, Any]:
    """Median over rounds of both rates with `rows` trajectories at once. One token more than the prompt needs no decode pass."""
    engine, prefill, decode = Engine(model, slots=rows, prefix_bytes=0), [], []
    for _ in range(1 + ROUNDS):
        batch = [t for _ in range(rows) for t in prompts(PROMPT)]
        first = seconds(engine, batch, 1)
        for t in batch:
            t.finished, t.tokens, t.logprobs = None, [], []
        passes = engine.stats.decode_passes
        whole = seconds(engine, batch, NEW)
        prefill.append(rows * PROMPT / first)
        decode.append((whole - first) / (engine.stats.decode_passes - passes))
    step = statistics.median(decode[1:])
    return {"rows": rows, "prefill": statistics.median(prefill[1:]), "decode": rows / step, "step_ms": 1e3 * step}


def samples(model: k3.Model, prompts: Prompts) -> dict[str, float]:
    """Medians, in turns: first tokens of one prompt, of as many cold ones, alone or in a batch, and of a cached one."""
    engine = Engine(model, slots=16)
    taken: dict[str, list[float]] = {"together": [], "alone": [], "batch": [], "again": []}
    for turn in range(1 + ROUNDS):
        rows = prompts(LONG, SAMPLES)
        again = [k3.Trajectory(t.prompt, (*t.key, 1)) for t in rows]
        sides = {
            "together": [rows],
            "alone": [prompts(LONG) for _ in range(SAMPLES)],
            "batch": [[t for _ in range(SAMPLES) for t in prompts(LONG)]],
            "again": [again],
        }
        for side, batches in sides.items():
            spent = sum(seconds(engine, batch, 1) for batch in batches)
            if turn:
                taken[side].append(spent)
    return {side: statistics.median(values) for side, values in taken.items()}


def drafted(model: k3.Model, prompts: Prompts) -> dict[str, float]:
    """Decoding with proposals of the MTP layer, beside the 16 rows of `speeds`. Its weights are drawn: few are accepted."""
    engine = Engine(model, slots=16, prefix_bytes=0, draft=DRAFT)
    batch = [t for _ in range(16) for t in prompts(PROMPT)]
    began = time.perf_counter()
    engine.run(batch, k3.Sampling(max_new_tokens=1))
    first, stats = time.perf_counter() - began, engine.stats
    for t in batch:
        t.finished, t.tokens, t.logprobs = None, [], []
    step = (seconds(engine, batch, NEW) - first) / stats.decode_passes
    return {"step_ms": 1e3 * step, "acceptance": stats.acceptance, "tokens_per_pass": stats.tokens_per_pass}


def run() -> None:
    """Prints the figures of model=nano in float32 on one thread, and how far its log-probabilities are from a
    training pass's.
    """
    say(", ".join(f"{name} {value}" for name, value in versions().items()))
    say("allocator: " + (", ".join(f"{n}={os.environ[n]}" for n in ALLOCATOR if n in os.environ) or "as the system has it"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    world = parallel.start()
    try:
        model = k3.build(k3.preset("nano"), world)
        prompts = Prompts(model.k3.vocab_size)
        out: dict[str, Any] = {"speeds": [speeds(model, rows, prompts) for rows in ROWS], **samples(model, prompts)}
        out["draft"] = drafted(model, prompts)
        engine, sampling, rows = Engine(model), k3.Sampling(max_new_tokens=64), prompts(PROMPT, SAMPLES)
        engine.run(rows, sampling)
        out["mismatch"] = engine.mismatch(rows, sampling)
    finally:
        parallel.stop()
        torch.set_num_threads(threads)
    say(f"model=nano, float32, one thread, prompts of {PROMPT} tokens, medians of {ROUNDS}")
    for r in out["speeds"]:
        say(
            f"{r['rows']:>4} rows: prefill {r['prefill']:,.0f} tokens/s, decode {r['decode']:,.0f} tokens/s, "
            f"{r['step_ms']:.1f} ms a step"
        )
    d = out["draft"]
    say(
        f"  16 rows with {DRAFT} proposals of an untrained draft: {d['step_ms']:.1f} ms a pass, {d['acceptance']:.1%} accepted, "
        f"{d['tokens_per_pass']:.2f} tokens a pass"
    )
    ms = {side: 1e3 * out[side] for side in ("together", "alone", "batch", "again")}
    say(f"{SAMPLES} samples of one prompt of {LONG} tokens: {ms['together']:.0f} ms; from the cache {ms['again']:.0f} ms")
    for side, what in (("alone", "one after the other"), ("batch", "in one batch")):
        share = out["together"] / out[side]
        say(f"{SAMPLES} cold prefills {what}: {ms[side]:.0f} ms; the samples of one prompt cost {share:.2f} of it")
    say(f"largest difference to the log-probabilities of a training pass: {out['mismatch']:.1e}")


if __name__ == "__main__":
    run()
