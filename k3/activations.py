"""What a model saves for its backward pass: policies by name, as the user types them (`activations.layer=recompute`).

Every policy gives the same numbers, bit for bit, and a head in pieces the same up to rounding; they trade memory for time.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum


class Save(Enum):
    keep = "keep"  # all that the backward pass reads
    recompute = "recompute"  # the inputs alone: the backward pass computes the rest once more


@dataclass
class ActivationConfig:
    layer: Save = Save.keep  # whole decoder and MTP layers
    attention: Save = Save.keep  # in each decoder layer its read, norm and attention; an MTP layer's attention half
    feed_forward: Save = Save.keep  # likewise read, norm and feed-forward
    head: Save = Save.keep  # final norm, logits and loss, for each predicted token
    head_chunk: int | None = None  # tokens whose logits exist at once: long rows' never all do; null: all. Implies head=recompute

    def effective(self) -> ActivationConfig:
        """As they act: what is inside a recomputed layer is recomputed with it, and not a second time; a head in pieces is."""
        out = replace(self, attention=Save.keep, feed_forward=Save.keep) if self.layer is Save.recompute else self
        return out if out.head_chunk is None else replace(out, head=Save.recompute)


def keep() -> ActivationConfig:
    return ActivationConfig()


def full() -> ActivationConfig:
    """The least memory: one forward pass more."""
    return ActivationConfig(layer=Save.recompute, head=Save.recompute)


def selective() -> ActivationConfig:
    """About half the bytes for a sixth more time (docs/log.md).

    The feed-forward halves rather than the attention halves: as many bytes for fewer products, and the ones that grow with the
    experts a token goes to and with the load of a rank's experts. Their exchange between expert ranks is repeated, which a slow
    network may make the dearer choice. The head, because its logits are as wide as the vocabulary.
    """
    return ActivationConfig(feed_forward=Save.recompute, head=Save.recompute)


OPTIONS: dict[str, Callable[[], ActivationConfig]] = {f.__name__: f for f in (keep, full, selective)}
