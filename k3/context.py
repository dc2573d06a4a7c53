"""What every layer of one forward pass shares."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Context:
    past_starts: (
        Tensor  # bool [B, P + T]: the one document map (kernels/documents.py), of this context rank's T tokens and all before
    )
    tokens: int  # T
    counted: Tensor | None = None  # bool [tokens this rank routes], in the order of the hidden rows: not padding; None: all
    share: float = 1.0  # of the step's tokens, the part in this micro-batch over all data ranks: scales auxiliary losses

    @property
    def document_starts(self) -> Tensor:
        """bool [B, T], of this context rank's tokens."""
        return self.past_starts[:, -self.tokens :]
