"""`k3 cards model=...`: the table from which sharding, optimizer, gradient reduction, dtypes, import and export are derived."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from k3.cards import describe
from parallel.cards import Card, DType, Optimizer
from recipes.compose import compose
from recipes.config import Config
from recipes.errors import UserError

COLUMNS = ("name", "shape", "blocks", "placement", "optimizer", "decay", "dtype", "fp8", "quantise", "published")  # widest last


def run(words: Sequence[str]) -> int:
    """Prints one line a parameter and the totals. Builds no model: the table of the full-size K3 takes a second, too."""
    for word in words:
        if word.lstrip("+~").split("=", 1)[0].split(".", 1)[0] != "model":
            raise UserError(f"{word}: the table depends on the model alone; give model=... or model.KEY=...")
    cfg = compose(words)
    cards = describe(cfg.model)
    for line in aligned([COLUMNS, *(row(card) for card in cards.values())]):
        print(line)
    print()
    for line in totals(list(cards.values()), cfg):
        print(line)
    return 0


def row(card: Card) -> tuple[str, ...]:
    place = card.placement
    return (
        card.name,
        "×".join(str(n) for n in card.shape),
        card.blocks.describe(),
        f"{place.tensor.value} {place.group.value}",
        card.optimizer.value,
        "decay" if card.decay else "-",
        card.dtype.value,
        ("product" if card.blocks.is_matrix else "library") if card.low_precision else "-",
        card.quantise.value if card.quantise else "-",
        " + ".join(p.name for p in card.published),
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with each column as wide as its widest cell: to be read, or taken apart by a script at two blanks."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in rows]


def totals(cards: Sequence[Card], cfg: Config) -> list[str]:
    moe = cfg.model.moe

    def size(chosen: Iterable[Card]) -> int:
        return sum(math.prod(card.shape) for card in chosen)

    experts = [card for card in cards if card.blocks.per_expert]
    embedding = [card for card in cards if card.role == "embedding"]
    routed = size(experts)
    active = size(cards) - size(embedding) - routed + (routed * moe.top_k // moe.experts if moe.experts else 0)
    by = {optimizer: [card for card in cards if card.optimizer is optimizer] for optimizer in Optimizer}
    matrices = sum(_matrices(card) for card in by[Optimizer.MUON])
    return [
        f"parameters  {size(cards):,} in {len(cards)} tensors; {active:,} active per token without the input embedding",
        f"muon        {size(by[Optimizer.MUON]):,} in {len(by[Optimizer.MUON])} tensors, {matrices:,} logical matrices",
        f"adamw       {size(by[Optimizer.ADAMW]):,} in {len(by[Optimizer.ADAMW])} tensors",
        f"balance     {size(by[Optimizer.BALANCE]):,} in {len(by[Optimizer.BALANCE])} tensors, set by the router's loads",
        f"kept fp32   {size(card for card in cards if card.dtype is DType.FP32):,}",
        f"quantised   {size(card for card in cards if card.quantise):,} in the phases after pretraining",
    ]


def _matrices(card: Card) -> int:
    if not card.blocks.is_matrix:
        return 1
    experts = card.shape[0] if card.blocks.per_expert else 1
    return experts * (card.shape[-2] // card.blocks.period) * len(card.blocks.parts)
