"""Ranks that must take the same steps: those that exchange tokens for experts, and those that share a row's heads."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from parallel.world import World

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Lockstep:
    """Experts that are spread over ranks make every pass a collective: a rank without work goes along with empty rows."""

    def __init__(self, world: World):
        self.world = world
        self.together = world.groups.ep.size() > 1

    def any(self, *mine: bool) -> tuple[bool, ...]:
        """For each question whether some rank that steps along says yes."""
        return self._any(mine, None) if self.together else mine

    def anyone(self, mine: bool) -> bool:
        """The same among tensor ranks too, which otherwise agree because they compute the same."""
        if self.together:
            return self._any((mine,), None)[0]
        return self._any((mine,), self.world.groups.tp)[0] if self.world.groups.tp.size() > 1 else mine

    def _any(self, mine: tuple[bool, ...], group: dist.ProcessGroup | None) -> tuple[bool, ...]:
        flags = torch.tensor(mine, dtype=torch.int32, device=self.world.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        return tuple(bool(flag) for flag in flags.tolist())


def fingerprint(model: nn.Module) -> tuple[int, ...]:
    """Sums of the bit patterns of all weights and router biases: another after any change, however it was made."""
    tensors = [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("balancer.bias"))]
    sums = [t.detach().contiguous().view(INTEGERS[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
    return tuple(torch.stack(sums).tolist())
