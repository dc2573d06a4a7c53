"""A device that is not the CPU, on a machine that has none: tensors say they are on CUDA, and their values lie in CPU memory.

What a real device refuses is refused here, too: an operator that mixes tensors of both (but for numbers without dimensions, and
copies). So a test sees where every tensor lies, and still gets the right values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default}
CROSSING = {*COPIES, torch.ops.aten._to_copy.default}


class DeviceTensor(torch.Tensor):
    """Wraps `values`, a tensor in CPU memory."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        out = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype, device=DEVICE
        )
        out.values = values
        return out

    def tolist(self) -> Any:
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class PretendDevice(TorchDispatchMode):
    """While it is entered, tensors can be made on DEVICE."""

    def __enter__(self) -> Any:
        torch._C._ensureCUDADeviceGuardSet()  # what torch's own fake tensors do where there is no driver
        self._initialise, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.cuda._lazy_init = self._initialise
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    away = [t for t in tensors if isinstance(t, DeviceTensor)]
    here = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim() > 0]
    if away and here and func not in CROSSING:
        raise RuntimeError(f"{func}: tensors on two devices: {[t.shape for t in away]} and {[t.shape for t in here]}")
    asked = kwargs.get("device")
    there = bool(away) if asked is None else torch.device(asked).type == DEVICE.type
    inner_args, inner_kwargs = tree_map_only(DeviceTensor, lambda t: t.values, (args, kwargs))
    if asked is not None:
        inner_kwargs["device"] = torch.device("cpu")
    out = func(*inner_args, **inner_kwargs)
    if out is None or func._schema.name.endswith("_"):  # in place
        return None if out is None else args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return tree_map_only(Tensor, DeviceTensor, out) if there else out
