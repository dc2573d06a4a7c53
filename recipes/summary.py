"""What a finished run amounts to: one dictionary (summary.json) and the same as a short text (summary.txt)."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import torch

from parallel.cards import Card

SETTLED = 21  # the first step at which the experts' balance is judged
WINDOW = 20  # steps over which it may not fluctuate


def summarise(records: Sequence[dict[str, Any]], model: dict[str, Any], results: dict[str, Any], finished: Any) -> dict[str, Any]:
    """From metrics.jsonl's records, the model's sizes, what callbacks left in `results`, and the trainer's progress."""
    heldout = [r for r in records if r.get("heldout_loss") is not None]
    last = heldout[-1] if heldout else {}
    losses = [r["loss"] for r in records[-WINDOW:] if r["loss"] is not None]
    return {
        "model": model,
        "steps": finished.step,
        "tokens": finished.tokens,
        "train_seconds": finished.train_seconds,
        "tokens_per_second": finished.tokens / finished.train_seconds if finished.train_seconds else None,
        "train_loss_steps": len(losses),
        "train_loss": sum(losses) / len(losses) if losses else None,
        "heldout_loss": last.get("heldout_loss"),
        "bigram_loss": last.get("bigram_loss"),
        "unigram_loss": last.get("unigram_loss"),
        "skipped_steps": sum(bool(r["skipped"]) for r in records),
        "idle_steps": sum("idle" in r for r in records),
        "balance": balance(records),
        "dense": results.get("dense"),
        "report": results.get("report", []),
        **{name: results[name] for name in ("exam", "recall") if name in results},
        "export": results.get("export"),
        "checkpoint": results.get("checkpoint"),
        "saving": results.get("saving"),
        "versions": versions(),
    }


def balance(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The worst layer's mean of max/mean expert load from step 21 on, its worst mean over 20 steps, and dead experts.

    A run of at most 20 steps is judged from its first. None for a model without experts.
    """
    key = "load/max_over_mean/"
    settled = [r for r in records if r["step"] >= SETTLED] or list(records)
    layers = [name for name in settled[0] if name.startswith(key)] if settled else []
    if not layers:
        return None
    means, windows = {}, {}
    for layer in layers:
        ratios = [r[layer] for r in settled]
        means[layer] = sum(ratios) / len(ratios)
        spans = range(max(1, len(ratios) - WINDOW + 1))
        windows[layer] = max(sum(part) / len(part) for part in (ratios[i : i + WINDOW] for i in spans))
    worst = max(means, key=means.__getitem__)
    return {
        "worst_layer": worst.removeprefix(key),
        "max_over_mean": means[worst],
        "worst_window": max(windows.values()),
        "window": min(WINDOW, len(settled)),
        "dead_fraction": max(r["load/dead_fraction"] for r in settled),
    }


def sizes(cards: Iterable[Card], top_k: int) -> dict[str, int]:
    """Parameters in all, and those that one token meets: `top_k` of the routed experts; the input embedding is not counted."""
    total = active = 0
    for card in cards:
        count = torch.Size(card.shape).numel()
        total += count
        if card.role != "embedding":
            active += count * top_k // card.shape[0] if card.blocks.per_expert else count
    return {"parameters": total, "active": active}


def versions() -> dict[str, Any]:
    names = ("megatron-core", "emerging-optimizers", "numpy")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in names},
        "threads": torch.get_num_threads(),
    }


def text(s: dict[str, Any], folder: str) -> str:
    """The summary as a user reads it."""
    model, held = s["model"], s["heldout_loss"]
    lines = [
        f"{model['name']}: {model['parameters'] / 1e6:.2f} M parameters, {model['active'] / 1e6:.2f} M active a token",
        f"trained     {s['steps']} steps, {s['tokens']:,} tokens in {s['train_seconds']:.0f} s"
        + (f" ({s['tokens_per_second']:,.0f} tokens/s)" if s["tokens_per_second"] else ""),
    ]
    if (p := s["parallel"])["processes"] > 1:
        sizes = ", ".join(f"{axis} {p[axis]}" for axis in ("tp", "ep", "pp", "vpp", "cp", "dp") if p[axis] > 1)
        lines.append(f"layout      {p['processes']} processes: {sizes}")
    if s["train_loss"] is not None:
        lines.append(f"train loss  {s['train_loss']:.4f} {s['loss_unit']} (mean of the last {s['train_loss_steps']} steps)")
    if held is not None:
        than = ""
        if (bigram := s["bigram_loss"]) is not None:
            than = f": {'below' if held < bigram else 'NOT below'} the bigram {bigram:.4f}; unigram {s['unigram_loss']:.4f}"
        lines.append(f"held-out    {held:.4f} nats{than}")
    if (b := s["balance"]) is not None:
        lines.append(
            f"experts     max/mean load {b['max_over_mean']:.2f} on average in the worst layer ({b['worst_layer']}), at most "
            f"{b['worst_window']:.2f} over {b['window']} steps; dead experts {b['dead_fraction']:.1%}"
        )
    if (d := s["dense"]) is not None:
        lines.append(
            f"equal time  at {d['share_of_schedule']:.0%} of its schedule a dense transformer of {d['parameters'] / 1e6:.2f} M "
            f"parameters stood at {d['heldout_loss']:.4f} nats after {d['train_seconds']:.0f} s ({d['steps']} steps, "
            f"{d['tokens']:,} tokens); K3 at {d['k3_heldout_loss']:.4f} after {d['k3_train_seconds']:.0f} s"
        )
    lines += [f"{'measured' if number == 0 else '':<12}{line}" for number, line in enumerate(s["report"])]
    if s["skipped_steps"]:
        lines.append(f"skipped     {s['skipped_steps']} steps whose loss or gradient was not finite or a spike")
    if s["idle_steps"]:
        lines.append(f"no update   in {s['idle_steps']} steps, in which there was nothing to learn (`idle` in metrics.jsonl)")
    export = f"the model in {s['export']}/ (k3.hf.load), " if s["export"] else ""
    lines.append(f"files       {folder}: metrics.jsonl, pictures, {export}{s['checkpoint']}")
    return "\n".join(lines)
