"""Who builds the modules of a layer: megatron-core and our kernels, or Transformer Engine where a card says low precision.

A layer asks the builder of its place for `column("q_proj", ...)`; the card of that parameter decides. Both providers keep the
same parameters, of the same names and shapes: cards, checkpoints, optimizer blocks and export do not know which one built them.

| parameter (card)                   | Transformer Engine's module, `bias=False`        | its parameter becomes      |
|------------------------------------|--------------------------------------------------|----------------------------|
| `X.weight`, rows cut or whole      | `Linear` of this rank's size, no `parallel_mode` | `weight`, the card's own   |
| `X.weight`, columns cut            | `Linear(parallel_mode="row", tp_group=...)`      | `weight`, the card's own   |
| `experts.gate_up`, `experts.down`  | `GroupedLinear`, one `weight{i}` an expert       | a view: expert i of the card's |
| `X.weight` of a norm               | `RMSNorm`                                        | `weight`, the card's own   |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from k3.linear import Column, Duplicated, RMSNorm, Row
from k3.qat import Qat, QatConfig
from k3.quantised import QuantisedProducts
from kernels.attention import attention
from kernels.experts import grouped_mlp
from parallel.cards import Card
from parallel.megatron import TransformerConfig
from parallel.world import World

type GroupedMLP = Callable[..., Tensor]
"""(tokens, counts, gate_up, down, activation, probabilities): as `kernels.experts.grouped_mlp`."""
type Attention = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v, document_starts=...): as `kernels.attention.attention`, its scale given."""


class Provider(Protocol):
    """Builds modules of one kind each; sizes are those of the whole model, except heads and experts, which are this rank's."""

    grid: int  # the rows of every batch are a multiple of it

    def column(self, size_in: int, size_out: int, megatron: TransformerConfig, world: World) -> nn.Module: ...
    def row(self, size_in: int, size_out: int, megatron: TransformerConfig, world: World) -> nn.Module: ...
    def duplicated(self, size_in: int, size_out: int, megatron: TransformerConfig) -> nn.Module: ...
    def norm(self, size: int, megatron: TransformerConfig) -> Any: ...
    def grouped(self, experts: int, width: int, size: int, megatron: TransformerConfig) -> GroupedMLP: ...
    def attention(self, heads: int, key: int, value: int, world: World) -> Attention: ...


class Local:
    """megatron-core's parallel layers and the kernels here."""

    grid = 1

    def column(self, size_in: int, size_out: int, megatron: TransformerConfig, world: World) -> nn.Module:
        return Column(size_in, size_out, megatron, world)

    def row(self, size_in: int, size_out: int, megatron: TransformerConfig, world: World) -> nn.Module:
        return Row(size_in, size_out, megatron, world)

    def duplicated(self, size_in: int, size_out: int, megatron: TransformerConfig) -> nn.Module:
        return Duplicated(size_in, size_out, megatron)

    def norm(self, size: int, megatron: TransformerConfig) -> RMSNorm:
        return RMSNorm(size, megatron)

    def grouped(self, experts: int, width: int, size: int, megatron: TransformerConfig) -> GroupedMLP:
        return grouped_mlp

    def attention(self, heads: int, key: int, value: int, world: World) -> Attention:
        return partial(attention, scale=key**-0.5)


LOCAL = Local()


@dataclass(frozen=True)
class Builder:
    """Builds what lies at `place` in the model ("layers.3.attention."); `low` builds what its cards call low precision, and with
    `qat` the products of what they call quantised read rounded numbers (k3/qat.py), whoever builds them.
    """

    megatron: TransformerConfig
    world: World
    cards: Mapping[str, Card]
    low: Provider | None = None
    place: str = ""
    qat: QatConfig | None = None  # None: as with Qat.none

    def at(self, *names: str | int) -> Builder:
        return replace(self, place=self.place + "".join(f"{name}." for name in names))

    @property
    def grid(self) -> int:
        return self.low.grid if self.low else 1

    def column(self, name: str, size_in: int, size_out: int) -> nn.Module:
        return self._whose(f"{name}.weight").column(size_in, size_out, self.megatron, self.world)

    def row(self, name: str, size_in: int, size_out: int) -> nn.Module:
        return self._whose(f"{name}.weight").row(size_in, size_out, self.megatron, self.world)

    def duplicated(self, name: str, size_in: int, size_out: int) -> nn.Module:
        return self._whose(f"{name}.weight").duplicated(size_in, size_out, self.megatron)

    def norm(self, name: str, size: int) -> Any:
        return self._whose(f"{name}.weight").norm(size, self.megatron)

    def grouped(self, name: str, experts: int, width: int, size: int) -> GroupedMLP:
        provider = self._whose(name)
        products = provider.grouped(experts, width, size, self.megatron)
        if self.qat is None or self.qat.name is Qat.none or self.cards[self.place + name].quantise is None:
            return products
        return QuantisedProducts(products, self.qat.rule, rounds_inputs=provider is not LOCAL)

    def attention(self, reader: str, heads: int, key: int, value: int) -> Attention:
        """Has no parameter: it goes with the projection `reader` that takes its output."""
        return self._whose(f"{reader}.weight").attention(heads, key, value, self.world)

    def _whose(self, name: str) -> Provider:
        return self.low if self.low and self.cards[self.place + name].low_precision else LOCAL
