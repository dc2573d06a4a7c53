"""One card per parameter: the single table from which sharding, Muon's blocks, gradient reduction, clipping, dtypes,
quantisation, import and export are derived (design principle 1). The type lives here; `k3/cards.py` fills it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # tables of cards are made without it: it takes seconds to import
    import torch
    from torch import Tensor


class CardError(ValueError):
    """A parameter without a card, a card without a parameter, or a shape that contradicts its card."""


class Optimizer(Enum):
    MUON = "muon"
    ADAMW = "adamw"
    BALANCE = "balance"  # not trained by gradients: the router bias, set by quantile balancing or its alternatives


class DType(Enum):
    MODEL = "model"  # the precision of the run
    FP32 = "fp32"  # what the release keeps in fp32 stays so under bf16 (a float64 model keeps float64)

    def resolve(self, model_dtype: torch.dtype) -> torch.dtype:
        import torch

        if self is DType.MODEL or model_dtype == torch.float64:
            return model_dtype
        return torch.float32

    def width(self, model_width: int) -> int:
        """Bytes of a number, where the model's have `model_width`: `resolve` without a dtype."""
        return model_width if self is DType.MODEL else max(4, model_width)


class Quantise(Enum):
    MXFP4 = "mxfp4"  # in the QAT phases: weights MXFP4, their input activations MXFP8


class Group(Enum):
    DENSE = "dense"  # replicated over data and context ranks
    EXPERT = "expert"  # replicated over the expert-data ranks only


@dataclass(frozen=True)
class Part:
    """A run of `rows` consecutive rows that form one logical matrix."""

    name: str
    rows: int


@dataclass(frozen=True)
class Blocks:
    """The logical matrices inside one stored tensor.

    The stored tensor is `[experts,] rows, cols` (a leading expert axis only if `per_expert`). Its rows are a repetition of
    `parts` (once for a whole or fused matrix, once per head for a projection split by heads). An empty `parts` says that
    the tensor is not a matrix for the optimizer (norms, biases, convolutions, residual queries, embeddings).
    """

    parts: tuple[Part, ...] = ()
    per_head: bool = False
    per_expert: bool = False

    @property
    def is_matrix(self) -> bool:
        return bool(self.parts)

    @property
    def period(self) -> int:
        """Rows of one repetition of the parts."""
        return sum(p.rows for p in self.parts)

    def views(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Views of `tensor`, one for each part: (part name, [n, rows, cols]), n = local heads x local experts.

        Works on a whole tensor and on a shard along the head or expert axis. Writing to a view writes to the tensor.
        """
        if not self.parts:
            raise CardError(f"a tensor of shape {tuple(tensor.shape)} has no logical matrices on its card")
        rows, cols = tensor.shape[-2], tensor.shape[-1]
        if tensor.dim() != (3 if self.per_expert else 2) or rows % self.period or (rows != self.period and not self.per_head):
            raise CardError(f"a tensor of shape {tuple(tensor.shape)} does not consist of blocks {self.describe()}")
        lead = tensor.shape[0] if self.per_expert else 1
        # [experts, heads, period, cols]; both leading axes merge into one without a copy for a contiguous tensor
        grid = tensor.view(lead * (rows // self.period), self.period, cols)
        out, first = [], 0
        for part in self.parts:
            out.append((part.name, grid[:, first : first + part.rows]))
            first += part.rows
        return out

    def whole(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """As `views`, but heads and fused parts together: what whole-matrix Muon orthogonalises."""
        return [("whole", tensor if self.per_expert else tensor.unsqueeze(0))]

    def describe(self) -> str:
        if not self.parts:
            return "-"
        if self.parts[0].name == "whole":
            inner = "whole"
        else:
            inner = " · ".join(f"{p.name} {p.rows}" for p in self.parts)
        return ("per expert: " if self.per_expert else "") + ("per head: " if self.per_head else "") + inner


def not_a_matrix() -> Blocks:
    return Blocks()


def whole(rows: int, *, per_expert: bool = False) -> Blocks:
    return Blocks((Part("whole", rows),), per_expert=per_expert)


def heads(*parts: tuple[str, int]) -> Blocks:
    """`heads(("query", 192))`: one matrix a head. `heads(("key", 128), ("value", 128))`: two matrices a head."""
    return Blocks(tuple(Part(n, r) for n, r in parts), per_head=True)


def fused(*parts: tuple[str, int], per_expert: bool = False) -> Blocks:
    """`fused(("gate", f), ("up", f))`: two matrices stored one above the other."""
    return Blocks(tuple(Part(n, r) for n, r in parts), per_expert=per_expert)


class TensorAxis(Enum):
    """How a tensor lies on the tensor-parallel ranks, and how the gradient of a replicated one is made whole."""

    ROWS = "shard(0)"  # column-parallel: heads, channels, gate/up rows, vocabulary
    COLS = "shard(1)"  # row-parallel
    REPLICATE_SUM = "replicate(sum)"  # each tensor rank sees a part of the gradient, its heads' or its tokens'
    REPLICATE_SEQUENCE = "replicate(sequence)"  # a part (its tokens') under sequence parallelism, else the whole
    REPLICATE_SAME = "replicate(same)"  # each tensor rank always computes the whole gradient


@dataclass(frozen=True)
class Placement:
    tensor: TensorAxis
    group: Group = Group.DENSE
    both_ends: bool = False  # the first and the last pipeline stage hold it, and each sees a part of its gradient


@dataclass(frozen=True)
class Published:
    """Where a stored tensor, or a slice of it, lives in the released checkpoint.

    `rows` selects [first, last) of the row axis (fused gate and up); None is all. Where `name` holds `{expert}` the stored
    tensor's leading axis enumerates experts.
    """

    name: str
    rows: tuple[int, int] | None = None

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.name


@dataclass(frozen=True)
class Card:
    name: str  # our name: "layers.3.attention.q_proj.weight"
    published: tuple[Published, ...]
    shape: tuple[int, ...]  # global shape, all experts and all tensor ranks together
    blocks: Blocks
    placement: Placement
    optimizer: Optimizer
    decay: bool
    dtype: DType = DType.MODEL
    quantise: Quantise | None = None
    role: str = ""  # "attention", "router", "expert", "norm", ...: what learning-rate dials and reports select by
    init: str = "normal"  # the rule in k3/init.py that draws its first value
    # Under precision=fp8|mxfp8 a matrix's products run in it, and a norm that such a matrix reads comes from the same library.
    low_precision: bool = False

    def numel(self, *, tp: int = 1, ep: int = 1) -> int:
        """Elements on one of `tp` tensor and `ep` expert ranks."""
        cut = self.placement.tensor in (TensorAxis.ROWS, TensorAxis.COLS)
        return math.prod(self.shape) // (ep if self.placement.group is Group.EXPERT else tp if cut else 1)


class CardTable(Mapping[str, Card]):
    """The cards of one model (part), each bound to its tensor. Iterates in the model's own order."""

    def __init__(self, cards: Mapping[str, Card], tensors: Mapping[str, Tensor]):
        unknown = [n for n in tensors if n not in cards]
        if unknown:
            raise CardError(f"parameters without a card: {', '.join(unknown[:8])}; give each one in k3/cards.py")
        absent = [n for n in cards if n not in tensors]
        if absent:
            raise CardError(f"cards without a parameter: {', '.join(absent[:8])}")
        self._cards = {n: cards[n] for n in tensors}
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Card:
        return self._cards[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cards)

    def __len__(self) -> int:
        return len(self._cards)

    def tensor(self, name: str) -> Tensor:
        """The bound parameter or buffer (this rank's shard)."""
        return self._tensors[name]

    def trained(self) -> Iterator[tuple[Card, torch.nn.Parameter]]:
        """(card, parameter) of everything that gradients train, in the model's order: not what is frozen (`requires_grad`)."""
        for name, card in self._cards.items():
            tensor = self._tensors[name]
            # a plain tensor, as in `k3 bench muon`, is given its gradients
            frozen = type(tensor).__name__ == "Parameter" and not tensor.requires_grad
            if card.optimizer is not Optimizer.BALANCE and not frozen:
                yield card, cast("torch.nn.Parameter", tensor)
