"""What autograd holds after a forward pass, measured: the reading that k3/memory.py must agree with."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from k3.activations import ActivationConfig
from k3.backend import megatron_config
from k3.builder import Builder
from k3.cards import describe
from k3.config import K3Config
from k3.layout import row_plan
from k3.stage import Stage
from parallel.config import ParallelConfig
from parallel.rows import RowBank
from parallel.world import World


class _Box:
    """A saved tensor; it lives as long as the graph that saved it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Watch:
    """Inside `with`, notes every tensor that autograd saves; `storages` are the distinct ones still saved."""

    def __init__(self, known: Iterable[Tensor] = ()):
        self.boxes: weakref.WeakSet[_Box] = weakref.WeakSet()
        self.foreign = {x.untyped_storage().data_ptr() for x in known}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box.tensor)

    def _pack(self, x: Tensor) -> _Box:
        box = _Box(x)
        self.boxes.add(box)
        return box

    def __enter__(self) -> Watch:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def storages(self, beside: Iterable[Tensor] = ()) -> dict[int, int]:
        """Address -> bytes."""
        found = [x.untyped_storage() for x in (*(box.tensor for box in self.boxes), *beside)]
        return {s.data_ptr(): s.nbytes() for s in found if s.data_ptr() not in self.foreign}


def beside(root: Any) -> Iterator[Tensor]:
    """Tensors that the nodes of a graph hold without having saved them through autograd."""
    done, todo = set(), [root]
    while todo:
        node = todo.pop()
        if node is None or node in done:
            continue
        done.add(node)
        yield from _tensors(list(getattr(node, "__dict__", {}).values()))
        todo += [following for following, _ in node.next_functions]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) or (type(value).__module__.startswith("kernels.") and hasattr(value, "__dict__")):
        yield from _tensors([v for v in vars(value).values() if not isinstance(v, nn.Module)])


def stages_held(
    config: K3Config,
    world: World,
    dtype: torch.dtype,
    layers: list[range],
    pp: int,
    batch: dict[str, Any],
    policy: ActivationConfig | None = None,
) -> list[int]:
    """Bytes that each stage of a pipeline holds for one micro-batch, its stages run one after another in this process.

    batch: keywords of Stage.forward. Every stage is given what the one before sent, without its graph, as from another rank.
    """
    megatron = megatron_config(config, world, dtype)
    plan = row_plan(config, ParallelConfig(pp=pp), layers)
    banks = [RowBank(plan) for _ in range(pp)]
    payload: Tensor | None = None
    out = []
    for number, part in enumerate(layers):
        build = Builder(megatron, world, describe(config))
        with torch.device(world.device):
            stage = Stage(config, build, policy or ActivationConfig(), number, part, banks[number % pp])
        draw = torch.Generator().manual_seed(number)
        for p in stage.parameters():
            nn.init.normal_(p, std=0.02, generator=draw)
        given = [x for x in batch.values() if isinstance(x, Tensor)]
        given += [kept.row for rows in banks[number % pp]._kept.values() for kept in rows]  # held by the stages that made them
        stage.set_input_tensor([payload])
        with Watch([*stage.parameters(), *given]) as watch:
            sent = stage(**batch)
        # also what functions of ours keep without autograd's knowing: masks, windows
        out.append(sum(watch.storages(beside(sent.grad_fn)).values()))
        payload = sent.detach().clone().requires_grad_()
    return out
