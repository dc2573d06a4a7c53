"""State providers for checkpoints: a model's tensors, and the random generators of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from parallel.boxes import Box, place
from parallel.cards import CardTable
from parallel.world import World


class ModuleState:
    """A module's parameters and persistent buffers, those of `cards` placed by their cards. Loads in place, so that flat
    parameter buffers keep their views.

    Buffers without a card must be alike on all ranks that hold the module (the averages of router balancers are).
    """

    per_rank = False

    def __init__(self, module: nn.Module, cards: CardTable, world: World):
        self.module, self.cards, self.world = module, cards, world

    def boxes(self) -> Iterator[Box]:
        # megatron-core's layers add non-tensor `_extra_state` entries, empty outside fp8
        for name, value in self.module.state_dict().items():
            if not isinstance(value, Tensor):
                continue
            if name in self.cards:
                yield place(self.cards[name], value, self.world).box(name, value)
            else:
                yield Box.whole(name, value, self.world.groups.tp_dp_cp.rank())

    def loaded(self, anew: int | None = None) -> None:
        pass


def seed_generators(seed: int) -> None:
    """Seeds every generator that `RandomState` holds, so that two fresh runs of one seed draw the same."""
    torch.manual_seed(seed)  # the GPU's too
    np.random.seed(seed)
    random.seed(seed)


class RandomState:
    """The generators of torch (CPU and this process's GPU), numpy and Python, as tensors."""

    per_rank = True

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """As they stand now."""
        version, words, gauss = random.getstate()
        _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor([version, *words], dtype=torch.int64),
            "python.gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
            "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "numpy.position": torch.tensor([position, has_gauss], dtype=torch.int64),
            "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def boxes(self) -> Iterator[Box]:
        self._tensors = self.tensors()
        yield from (Box.whole(name, tensor) for name, tensor in self._tensors.items())

    def loaded(self, anew: int | None = None) -> None:
        """Sets the generators to what was loaded into the tensors of `boxes`, and with `anew`, this rank's number, draws every
        generator's seed from that and the number.
        """
        state = self._tensors
        torch.set_rng_state(state["torch"])
        if anew is not None:
            seed_generators((int(torch.randint(2**31, ())) + anew) % 2**31)
            return
        version, *words = state["python"].tolist()
        gauss = state["python.gauss"].item()
        random.setstate((version, tuple(words), None if gauss != gauss else gauss))
        position, has_gauss = state["numpy.position"].tolist()
        keys = state["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy.gauss"].item()))
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
