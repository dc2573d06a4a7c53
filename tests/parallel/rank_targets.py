"""What the ranks of test_local.py run."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist


def place() -> tuple[int, int, int, str, str]:
    return (
        dist.get_rank(),
        dist.get_world_size(),
        torch.get_num_threads(),
        os.environ["RANK"] + os.environ["LOCAL_RANK"] + os.environ["WORLD_SIZE"],
        os.environ["OMP_NUM_THREADS"] + os.environ["TORCHDYNAMO_DISABLE"],
    )


def total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of rank * tensor, after threaded-size work forwards and backwards."""
    weight = torch.randn(300, 300, requires_grad=True)
    (weight @ weight).sum().backward()
    tensor = tensor * dist.get_rank()
    dist.all_reduce(tensor)
    return tensor


def fails(rank: int) -> None:
    """One rank raises while the others wait for it."""
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def dies(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs(rank: int) -> None:
    if dist.get_rank() == rank:
        waits_for_ever()


def waits_for_ever() -> None:
    time.sleep(3600)
