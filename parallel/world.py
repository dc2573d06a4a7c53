"""Process groups of this run, from megatron-core's parallel_state."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from parallel import cpu_backend
from parallel.config import ParallelConfig, ParallelError, check_sizes, data_parallel_size, sequence_parallel, world_size
from parallel.stages import stage_count

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class World:
    """Where this process stands. Passed to whatever communicates; nothing fetches groups from globals."""

    groups: ProcessGroupCollection
    device: torch.device
    rank: int
    size: int
    config: ParallelConfig

    @property
    def data_rank(self) -> int:
        """Among the ranks that read different samples."""
        return self.groups.dp.rank()

    @property
    def data_size(self) -> int:
        return self.groups.dp.size()

    @property
    def stages(self) -> range:
        """The pipeline stages of this rank, by their number in the model's order; one without virtual stages."""
        return range(self.groups.pp.rank(), stage_count(self.config), self.config.pp)

    @property
    def sequence_parallel(self) -> bool:
        """Between column- and row-parallel layers, each tensor rank holds a slice of the sequence."""
        return sequence_parallel(self.config)


def start(config: ParallelConfig | None = None, device: str = "auto") -> World:
    """Starts torch.distributed (unless it runs already) and megatron-core's process groups; `device` is auto, cpu or cuda.

    Raises ParallelError for sizes that do not fit, or for device=cuda where torch sees none.
    """
    config = config or ParallelConfig()
    check_sizes(config)
    if device not in ("auto", "cpu", "cuda"):
        raise ParallelError(f"device={device}: give auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ParallelError("device=cuda: torch sees no CUDA device; give device=cpu or auto")
    if device == "cpu" and torch.cuda.is_available():
        # megatron-core would place its buffers on the GPU: the CPU backend stands aside where CUDA is there
        raise ParallelError("device=cpu: this machine has a CUDA device; hide it with CUDA_VISIBLE_DEVICES= to run on the CPU")
    on_cuda = torch.cuda.is_available()
    cpu_backend.install()
    # megatron-core calls collectives by names that torch is renaming
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Transformer Engine and Apex are not installed ..."
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "nccl" if on_cuda else "gloo"
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    processes = dist.get_world_size()
    wanted = world_size(config, processes)
    dp = data_parallel_size(config, processes)
    if wanted != processes:
        raise ParallelError(
            f"parallel sizes tp*pp*cp*dp = {config.tp}*{config.pp}*{config.cp}*{dp} = {wanted}, but {processes} processes run; "
            "start as many as the layout needs"
        )
    check_sizes(replace(config, dp=dp))  # ep over the data ranks there are
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
            context_parallel_size=config.cp,
            expert_model_parallel_size=config.ep,
            expert_tensor_parallel_size=1,
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return World(
        groups=groups,
        device=torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu"),
        rank=dist.get_rank(),
        size=processes,
        config=config,
    )


def stop() -> None:
    """Ends the process groups; a later `start` begins anew."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
