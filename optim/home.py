"""Where masters, momenta and moments lie: beside the weights, or with `optim.offload=cpu` in CPU memory.

What is elementwise is computed at home, on gradients that are brought there. Newton-Schulz runs on the weights' device: its input
goes there, the update comes back. Memory at home is pinned where there is CUDA, so that copies run while other work does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from optim.config import Offload


class Home:
    """device: of the weights."""

    def __init__(self, offload: Offload, device: torch.device):
        self.offloaded = offload is Offload.cpu
        self.device = torch.device("cpu") if self.offloaded else device
        self._pinned = self.offloaded and device.type == "cuda" and torch.cuda.is_available()

    def empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=self.device, pin_memory=self._pinned)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return self.empty_like(tensor).zero_()

    def bring(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts to copy a tensor home; what is returned waits for it. A tensor that is at home already is given as it is."""
        if tensor.device == self.device:
            return lambda: tensor
        here = self.empty_like(tensor)
        if not (tensor.is_cuda and self._pinned):
            here.copy_(tensor)
            return lambda: here
        here.copy_(tensor, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()

        def wait() -> Tensor:
            arrival.synchronize()
            return here

        return wait
