"""What a published checkpoint has that the values of its tensors do not tell: needed to write the same bytes again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Origin:
    """Kept beside the model that was loaded from a published checkpoint (k3/hf)."""

    a_log_shape: tuple[int, ...] | None = None  # with its padding; None: what the release has for this architecture
    narrow: Mapping[str, str] = field(default_factory=dict)  # published name -> dtype, where the release would keep float32
    # card name -> the E8M0 scale codes that came with packed weights, uint8 [E, rows, cols / 32] of this rank's experts
    scales: dict[str, Tensor] = field(default_factory=dict)
