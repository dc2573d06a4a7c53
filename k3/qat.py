"""Quantisation-aware training: which numbers the routed experts compute with. Free of torch.

With `qat=mxfp4` the forward pass reads the weights that the cards call quantised, the routed experts' and those of MTP layers
among them, rounded to MXFP4, and what enters each of their products rounded to MXFP8 E4M3 (report 4.1.1, 4.1.4): blocks of 32
along the reduction axis share a power of two. What enters the second product is the activation times its routing weight.
Gradients pass the rounding as if it were not there, to the master weights and to the layers before. All else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from k3.cards import describe
from k3.config import K3Config
from k3.low_precision import LowPrecision

BLOCK = 32  # of kernels/mx, which needs torch


class Qat(Enum):
    none = "none"
    mxfp4 = "mxfp4"  # routed experts: weights MXFP4, the inputs of their products MXFP8 (report 4.1.4)


class Rule(Enum):
    rceil = "rceil"  # a block's scale is rounded up: its greatest element never saturates
    floor = "floor"  # the text of the OCP standard: elements beyond the greatest of the format saturate


@dataclass
class QatConfig:
    name: Qat = Qat.none
    rule: Rule = Rule.rceil  # how the shared scale of 32 numbers is chosen


def refusals(config: K3Config, qat: QatConfig, low: LowPrecision | None = None) -> Iterator[tuple[str, str | int, str]]:
    """(key, value, what is wrong and the fix) of everything that `qat` cannot honour in this model and precision."""
    if qat.name is Qat.none:
        return
    name = qat.name.name
    quantised = [card for card in describe(config).values() if card.quantise]
    if not quantised:
        yield "qat", name, "the model has no routed experts, and nothing else is quantised; give qat=none"
    widths = {"model.moe.latent_size" if config.latent else "model.hidden_size": config.expert_width}
    widths["model.moe.expert_size"] = config.moe.expert_size
    off = {card.shape[-1] for card in quantised if card.shape[-1] % BLOCK}
    for key, width in widths.items():
        if width in off:
            yield key, width, f"qat={name} scales blocks of {BLOCK} along it: give a multiple of {BLOCK}, or qat=none"
    if low is LowPrecision.fp8:
        yield (
            "qat",
            name,
            "the experts' inputs are MXFP8, and precision=fp8 has blocks of 128; give precision=bf16 or mxfp8, or qat=none",
        )
    if low is LowPrecision.mxfp8 and qat.rule is not Rule.rceil:
        yield (
            "qat.rule",
            qat.rule.name,
            "precision=mxfp8 rounds scales up; give qat.rule=rceil, or precision=bf16",
        )
