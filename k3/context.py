"""What every layer of one forward pass shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from k3.kda import KDA
    from k3.mla import MLA


class Past(Protocol):
    """What earlier tokens have left in each layer, for generation (k3/generation): read, and moved on by the tokens at hand.

    The hidden rows are then [N, 1, d], N = rows x new tokens of each, row by row; every context rank holds rows of its own.
    """

    def kda(self, layer: KDA, projected: Sequence[Tensor], z: Tensor, beta_logit: Tensor) -> Tensor:
        """projected q, k, v [N, 1, P] before their convolutions, z [N, 1, P], beta_logit [N, 1, H] -> [N, 1, H, V]."""
        ...

    def mla(self, layer: MLA, query: Tensor, compressed: Tensor) -> Tensor:
        """query [N, 1, H key], compressed [N, 1, kv_lora_rank + rope] -> [N, 1, H V]."""
        ...


@dataclass(frozen=True)
class Context:
    past_starts: (
        Tensor  # bool [B, P + T]: the one document map (kernels/documents.py), of this context rank's T tokens and all before
    )
    tokens: int  # T
    counted: Tensor | None = None  # bool [tokens this rank routes], in the order of the hidden rows: not padding; None: all
    share: float = 1.0  # of the step's tokens, the part in this micro-batch over all data ranks: scales auxiliary losses
    past: Past | None = None  # None: the rows begin here (training, evaluation)

    @property
    def document_starts(self) -> Tensor:
        """bool [B, T], of this context rank's tokens."""
        return self.past_starts[:, -self.tokens :]
