"""Whether the ranks of a layout are as many as a job's nodes have room for."""

from __future__ import annotations

import dataclasses

from parallel.config import data_parallel_size, world_size
from recipes.config import Config, Device
from recipes.errors import UserError
from slurm.config import ranks_per_node, wrong


def place(cfg: Config) -> None:
    """Fills `parallel.dp` with what the nodes have room for, where it is null.

    Raises UserError for values of `cluster` that cannot be, all in one message, and for sizes that do not fill the nodes: the
    message names all keys that have a part in it, and what to give.
    """
    lines = list(wrong(cfg.cluster))
    if cfg.nodes < 1:
        lines.append(f"nodes={cfg.nodes}: must be at least 1")
    gpus = cfg.cluster.gpus_per_node
    if cfg.run.device is Device.cuda and not gpus:
        lines.append("run.device=cuda: cluster.gpus_per_node=0 asks for no GPU; give run.device=auto, or ask for some")
    if cfg.run.device is Device.cpu and gpus:
        lines.append(f"run.device=cpu: cluster.gpus_per_node={gpus} asks for GPUs; give cluster=cpu or cluster.gpus_per_node=0")
    if not lines and min(cfg.parallel.tp, cfg.parallel.pp, cfg.parallel.cp, cfg.parallel.ep, cfg.parallel.dp or 1) > 0:
        lines = _misfit(cfg)
    if lines:
        raise UserError("\n".join(lines))


def _misfit(cfg: Config) -> list[str]:
    p, each = cfg.parallel, ranks_per_node(cfg.cluster)
    room = cfg.nodes * each
    of = f"nodes={cfg.nodes}, with {each} rank{'s' * (each > 1)} a node ({_why(cfg)})"
    inner = p.tp * p.pp * p.cp
    if p.dp is None and room % inner:
        text = f"{of}: {room} ranks, which parallel.tp * pp * cp = {p.tp} * {p.pp} * {p.cp} = {inner} does not divide"
        return [f"{text}; {_give(inner, each)}"]
    p.dp = data_parallel_size(p, room)
    if (spread := p.tp * p.cp * p.dp) % p.ep:
        text = f"{of}: {room} ranks, and parallel.ep={p.ep} does not divide tp * cp * dp = {p.tp} * {p.cp} * {p.dp} = {spread}"
        return [f"{text}; {_give(world_size(dataclasses.replace(p, dp=None)), each)}"]
    if (size := world_size(p)) == room:
        return []
    text = f"{of}: {room} ranks, and parallel.tp * pp * cp * dp = {p.tp} * {p.pp} * {p.cp} * {p.dp} = {size}"
    other = [f"parallel.dp={room // inner}"] if room % inner == 0 and p.tp * p.cp * (room // inner) % p.ep == 0 else []
    return [f"{text}; {', or '.join(['give ' + word for word in other] + [_give(size, each)])}"]


def _why(cfg: Config) -> str:
    key = "gpus_per_node" if cfg.cluster.tasks_per_node is None and cfg.cluster.gpus_per_node else "tasks_per_node"
    return f"cluster.{key}={dataclasses.asdict(cfg.cluster)[key] or 1}"


def _give(size: int, each: int) -> str:
    """Nodes for `size` ranks."""
    if size % each == 0:
        return f"give nodes={size // each}"
    fewer = next(ranks for ranks in range(min(each, size), 0, -1) if size % ranks == 0)
    return f"give nodes={size // fewer} cluster.tasks_per_node={fewer}"
