"""The routed experts' products with MXFP4 weights and MXFP8 inputs: what `k3/qat.py` names, carried out.

Legend: N tokens by expert, E experts of this rank, l latent width, f width inside one expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from k3.qat import Rule
from kernels.mx import fake_quantise, round_trip, straight_through


class QuantisedProducts(nn.Module):
    """As `kernels.experts.grouped_mlp`, which `products` is, or what Transformer Engine has for it.

    The weights of one step are rounded once, however many micro-batches and repetitions read them, inside `fixed`; outside, at
    every call. What was rounded is dropped when `fixed` ends, so the optimizer's step has its memory back.
    """

    def __init__(self, products: Any, rule: Rule, *, rounds_inputs: bool):
        """rounds_inputs: whether `products` rounds what enters it to MXFP8 by itself, as Transformer Engine's do."""
        super().__init__()
        self.products = products
        self.rule = rule.value
        self.inputs = {} if rounds_inputs else {"inputs": partial(fake_quantise, format="mxfp8", rule=self.rule)}
        self.depth = 0
        self.kept: dict[str, tuple[tuple[int, int], Tensor]] = {}

    def forward(self, x: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor, activation: Any, probs: Tensor) -> Tensor:
        """x [N, l], counts [E], gate_up [E, 2f, l], down [E, l, f], probs [N] -> [N, l]. N may be 0."""
        weights = self._rounded("gate_up", gate_up), self._rounded("down", down)
        return self.products(x, counts, *weights, activation, probs, **self.inputs)

    def _rounded(self, name: str, weight: Tensor) -> Tensor:
        # Only inside `fixed`: parameters are views of megatron-core's buffers, and an optimizer's step, written to those, does
        # not count as a change of the parameter. A change through the parameter itself is seen.
        state = weight.data_ptr(), weight._version

        def value() -> Tensor:
            if name in self.kept and self.kept[name][0] == state:
                return self.kept[name][1]
            rounded = round_trip(weight.detach(), "mxfp4", self.rule)
            if self.depth:
                self.kept[name] = state, rounded
            return rounded

        return straight_through(weight, value)

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """As long as it lasts, the weights do not change."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.kept.clear()


@contextmanager
def fixed(model: nn.Module) -> Iterator[None]:
    """As long as it lasts, no parameter of `model` changes: what is derived from them is computed once. May be nested."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, QuantisedProducts):
                stack.enter_context(module.fixed())
        yield
