"""State providers for checkpoints: a module's tensors, and the random generators of a process."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn


class ModuleState:
    """A module's parameters and persistent buffers. Loads in place, so that flat parameter buffers keep their views."""

    def __init__(self, module: nn.Module):
        self.module = module

    def state_dict(self) -> dict[str, Tensor]:
        # megatron-core's layers add non-tensor `_extra_state` entries, empty outside fp8
        return {name: value for name, value in self.module.state_dict().items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        with torch.no_grad():
            for name, value in self.state_dict().items():
                value.copy_(state[name])


def seed_generators(seed: int) -> None:
    """Seeds every generator that `RandomState` holds, so that two fresh runs of one seed draw the same."""
    torch.manual_seed(seed)  # the GPU's too
    np.random.seed(seed)
    random.seed(seed)


class RandomState:
    """The generators of torch (CPU and this process's GPU), numpy and Python, as tensors."""

    def state_dict(self) -> dict[str, Tensor]:
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

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        torch.set_rng_state(state["torch"])
        version, *words = state["python"].tolist()
        gauss = state["python.gauss"].item()
        random.setstate((version, tuple(words), None if gauss != gauss else gauss))
        position, has_gauss = state["numpy.position"].tolist()
        keys = state["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy.gauss"].item()))
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
