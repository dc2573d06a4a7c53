"""Whether parallel sizes fit a model, said before a process starts with size, value and fix; which stage holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd

from k3.config import K3Config, Residual
from parallel.config import ParallelConfig, ParallelError
from parallel.stages import RowPlan, split_layers


def check_layout(model: K3Config, parallel: ParallelConfig, *, length: int | None = None) -> None:
    """Raises ParallelError, all reasons in one message, one a line, for sizes that do not divide the model's parts.

    `length`: tokens in a row, where known.
    """
    wrong = [*_tensor(model, parallel.tp), *_expert(model, parallel.ep)]
    try:
        split_layers(model.layers, parallel)
    except ParallelError as error:
        wrong += str(error).splitlines()
    if length is not None:
        wrong += _sequence(model, parallel, length)
    if wrong:
        raise ParallelError("\n".join(wrong))


def row_plan(model: K3Config, parallel: ParallelConfig, layers: Sequence[range] | None = None) -> RowPlan:
    """Which rows of Attention Residuals travel between the stages: one is made where a block begins (report 2.2).

    layers: of each stage, by default those of `parallel`.
    """
    attnres = model.residual is Residual.attnres
    stops = [of.stop for of in layers or split_layers(model.layers, parallel)]
    return RowPlan(tuple(-(-stop // model.residual_block) if attnres else 0 for stop in stops), parallel.pp)


def holder(c: K3Config, layers: Sequence[range]) -> Callable[[str], Iterator[int]]:
    """name of a parameter -> the stages that hold it, as `k3.model.Model.holds` finds them: one, or both ends."""
    of_layer = {index: number for number, held in enumerate(layers) for index in held}
    last = len(layers) - 1

    def stages(name: str) -> Iterator[int]:
        part, _, rest = name.partition(".")
        if part == "layers":
            yield of_layer[int(rest.split(".", 1)[0])]
            return
        if part == "embedding":
            yield 0
        if part != "embedding" or (c.mtp_layers and last):
            yield last

    return stages


def _tensor(c: K3Config, tp: int) -> Iterator[str]:
    layers = range(c.layers)
    dense = not c.moe.experts or c.dense_layers > 0
    parts = [
        ("model.kda.heads", c.kda.heads, not all(c.is_mla(i) for i in layers)),
        ("model.mla.heads", c.mla.heads, any(c.is_mla(i) for i in layers) or c.mtp_layers > 0),
        ("model.dense_size", c.dense_size, dense),
        ("model.moe.shared_experts * model.moe.expert_size", c.moe.shared_experts * c.moe.expert_size, c.moe.experts > 0),
        ("model.vocab_size", c.vocab_size, True),
    ]
    sizes = {name: size for name, size, there in parts if there}
    if cut := [f"{name} = {size}" for name, size in sizes.items() if size % tp]:
        yield f"parallel.tp={tp}: must divide {', '.join(cut)}; {_below(tp, gcd(*sizes.values()))} divides all"


def _expert(c: K3Config, ep: int) -> Iterator[str]:
    if ep > 1 and not c.moe.experts:
        yield f"parallel.ep={ep}: model.moe.experts=0 has no experts to spread; leave it out"
    elif c.moe.experts % ep:
        yield f"parallel.ep={ep}: must divide model.moe.experts = {c.moe.experts}; {_below(ep, c.moe.experts)} does"


def _below(size: int, total: int) -> int:
    """The largest divisor of `total` that is at most `size`."""
    return max(d for d in range(1, size + 1) if total % d == 0)


def _sequence(c: K3Config, parallel: ParallelConfig, length: int) -> Iterator[str]:
    ranks = parallel.cp * parallel.tp
    if length % ranks:
        yield (
            f"parallel.cp={parallel.cp} and parallel.tp={parallel.tp}: the {length} tokens of a row must be a multiple of "
            f"cp * tp = {ranks}; give rows of {-(-length // ranks) * ranks}"
        )
    elif parallel.cp > 1 and length // parallel.cp < c.kda.conv_size - 1:
        yield (
            f"parallel.cp={parallel.cp}: leaves {length // parallel.cp} of {length} tokens a rank, and the convolutions reach "
            f"{c.kda.conv_size - 1} back; give longer rows or a smaller cp"
        )
