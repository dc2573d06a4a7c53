"""The prefix cache: what the blocks of earlier prompts left in the model, found again by their tokens.

A block's key hashes its tokens onto the key of the block before, so a key names a whole prefix. A node keeps the fixed-size
states at the block's end and the latents of the block alone: prompts that begin alike share them. The last node of a prompt,
shorter than a block where the prompt ends between boundaries, keeps the logits too: a repeated prompt computes nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from k3.generation.states import State


@dataclass(frozen=True)
class Node:
    state: State  # latents of the node's own tokens only
    logits: Tensor | None  # [V], of its last token

    @property
    def bytes(self) -> int:
        return self.state.bytes + (0 if self.logits is None else self.logits.numel() * self.logits.element_size())


class Prefixes:
    """At most `limit` bytes; the least recently used node goes first, and no node before those that build on it."""

    def __init__(self, block: int, limit: int):
        self.block, self.limit = block, limit
        self.bytes = 0
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def clear(self) -> None:
        self._nodes.clear()
        self.bytes = 0

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Of each block of `tokens`, the last one perhaps shorter."""
        ids, key, out = np.asarray(tokens, np.int64), b"", []
        for start in range(0, len(ids), self.block):
            key = hashlib.blake2b(key + ids[start : start + self.block].tobytes(), digest_size=16).digest()
            out.append(key)
        return out

    def find(self, tokens: Sequence[int]) -> tuple[State | None, Tensor | None]:
        """The state after the longest known prefix, and where that is all of `tokens` the logits of the last one.

        A prefix is whole blocks, and without the logits leaves at least one token to compute.
        """
        keys = self.keys(tokens)
        found: list[Node] = []
        for key in keys:
            if (node := self._nodes.get(key)) is None:
                break
            found.append(node)
        if len(found) == len(keys) and found[-1].logits is None:
            found.pop()
        if not found:
            return None, None
        self._touch(keys[: len(found)])
        last = found[-1].state
        latents = torch.cat([node.state.latents for node in found], 1)
        return replace(last, latents=latents), found[-1].logits if len(found) == len(keys) else None

    def put(self, keys: Sequence[bytes], node: Node) -> None:
        """Adds the node of the prefix that ends in keys[-1]."""
        if node.bytes > self.limit or any(key not in self._nodes for key in keys[:-1]):
            return  # without the nodes before it nobody would find it
        if (old := self._nodes.pop(keys[-1], None)) is not None:
            self.bytes -= old.bytes
        self._nodes[keys[-1]] = node
        self.bytes += node.bytes
        self._touch(keys)
        while self.bytes > self.limit:
            _, dropped = self._nodes.popitem(last=False)
            self.bytes -= dropped.bytes

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._nodes.move_to_end(key)
