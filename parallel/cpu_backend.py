"""Runs megatron-core without CUDA. The only place that knows megatron-core expects it (design principle 6).

`install()` does nothing where CUDA is there. Otherwise every `megatron.*` module, imported before or after, finds a stand-in
under its global name `torch`: tensor factories place "cuda" tensors on the CPU, and `torch.cuda` answers with streams and events
that do nothing. torch itself stays untouched. `PATCHED` names every attribute of megatron-core that is replaced besides; a test
holds it against megatron-core 0.19.2.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

# module -> attribute -> replacement; filled below
PATCHED: dict[str, dict[str, Any]] = {}
# An importable but unusable Transformer Engine raises RuntimeError inside `import megatron.core`, and a usable one starts CUDA.
MASKED = ("transformer_engine", "transformer_engine_torch", "apex")
FACTORIES = (
    "tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "linspace", "eye",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided", "tril_indices",
)  # fmt: skip

_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Idempotent. Call before anything imports megatron; a no-op where torch sees a CUDA device."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    for name in MASKED:
        sys.modules[name] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, _Finder())
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and module is not None:
            _patch(module)


def installed() -> bool:
    return _installed


def _patch(module: types.ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.torch = _proxy  # type: ignore[attr-defined]
    for attribute, replacement in PATCHED.get(module.__name__, {}).items():
        if not hasattr(module, attribute):
            raise ImportError(
                f"{module.__name__} has no {attribute}: the CPU backend is written for megatron-core 0.19.2 exactly"
            )
        setattr(module, attribute, replacement)


class _Finder(importlib.abc.MetaPathFinder):
    """Patches each megatron module right after its body ran."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            _patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Stream:
    """A CUDA stream on a device that has none: everything is already in order."""

    priority = 0
    device = _CPU
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Cuda(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _make_cuda() -> _Cuda:
    cuda = _Cuda("torch.cuda")
    stream = _Stream()
    nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, mark=_nothing, range=contextlib.nullcontext)
    members: dict[str, Any] = {
        "Stream": _Stream, "Event": _Event, "nvtx": nvtx,
        "current_device": lambda: _CPU,
        "current_stream": lambda *a, **k: stream, "default_stream": lambda *a, **k: stream,
        "stream": lambda *a, **k: contextlib.nullcontext(),
        "device_count": lambda: 0, "is_available": lambda: False, "is_initialized": lambda: False,
        "get_device_capability": lambda *a, **k: (0, 0),
        "_lazy_call": lambda f, **k: f(),
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
    }  # fmt: skip
    for name in ("synchronize", "empty_cache", "set_device", "set_stream", "reset_peak_memory_stats", "_lazy_init", "init"):
        members[name] = _nothing
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        members[name] = lambda *a, **k: 0
    for name, member in members.items():
        setattr(cuda, name, member)
    return cuda


class _Torch(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(name: str) -> Any:
    factory = getattr(torch, name)

    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    make.__name__ = name
    return make


def _make_proxy() -> _Torch:
    proxy = _Torch("torch")
    proxy.cuda = _make_cuda()  # type: ignore[attr-defined]
    for name in FACTORIES:
        setattr(proxy, name, _on_cpu(name))
    return proxy


_proxy = _make_proxy()


def _to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron-core turns split sizes into numbers only if they lie on a CUDA device; gloo's all-to-all needs numbers too."""
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


for _module in ("megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.token_dispatcher"):
    PATCHED[_module] = {"maybe_move_tensor_to_cpu": _to_numpy}
