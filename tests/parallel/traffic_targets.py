"""What the ranks of test_traffic.py run."""

from __future__ import annotations

import torch
import torch.distributed as dist

import parallel
from parallel.config import ParallelConfig
from parallel.megatron import copy_to_tensor_model_parallel_region
from parallel.traffic import Traffic


def each_collective() -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """Bytes of one call of every collective on tensors of 24 bytes a rank, and of a backward pass through megatron-core's."""
    world = parallel.start(ParallelConfig(tp=2, dp=2))
    tp, dp = world.groups.tp, world.groups.dp
    x = torch.ones(6)
    with Traffic(world) as forward:
        dist.all_reduce(x, group=tp)
        dist.all_gather_into_tensor(torch.empty(12), x, group=tp)
        dist.all_gather([torch.empty(6), torch.empty(6)], x, group=dp)
        dist.reduce_scatter_tensor(torch.empty(3), x, group=tp)
        dist.all_to_all_single(torch.empty(6), x, group=tp)
        received = [1, 1] if tp.rank() == 0 else [5, 5]
        dist.all_to_all_single(torch.empty(sum(received)), x, received, [1, 5], group=tp)
        dist.broadcast(x, group=dp, group_src=0)
        dist.reduce(x, group=dp, group_dst=1)
        dist.gather(x, [torch.empty(6), torch.empty(6)] if dp.rank() == 0 else None, group=dp, group_dst=0)
        dist.scatter(torch.empty(6), [x, x] if dp.rank() == 0 else None, group=dp, group_src=0)
        if dp.rank() == 0:
            dist.isend(x, group=dp, group_dst=1).wait()
        else:
            dist.irecv(torch.empty(6), group=dp, group_src=0).wait()
        dist.all_reduce(x)
        dist.barrier()
        dist.all_reduce(x, group=world.groups.cp)  # alone in its group: nothing leaves
    y = torch.ones(6, requires_grad=True)
    with Traffic(world) as backward:
        copy_to_tensor_model_parallel_region(y, group=tp).sum().backward()
    return forward.bytes, backward.bytes
