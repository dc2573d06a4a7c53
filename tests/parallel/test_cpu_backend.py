"""The CPU backend touches what it says and nothing else, and stands aside where CUDA is there."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib.metadata import version

import torch

from parallel import cpu_backend


def test_written_for_this_megatron() -> None:
    assert version("megatron-core") == "0.19.2"


def test_names_it_touches_are_pinned() -> None:
    assert {m: sorted(a) for m, a in cpu_backend.PATCHED.items()} == {
        "megatron.core.transformer.moe.moe_utils": ["maybe_move_tensor_to_cpu"],
        "megatron.core.transformer.moe.token_dispatcher": ["maybe_move_tensor_to_cpu"],
    }
    assert cpu_backend.MASKED == ("transformer_engine", "transformer_engine_torch", "apex")


def test_patched_names_exist_and_are_replaced() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    import parallel.megatron  # noqa: F401

    for module in (moe_utils, token_dispatcher):
        assert module.maybe_move_tensor_to_cpu is cpu_backend.PATCHED[module.__name__]["maybe_move_tensor_to_cpu"]


def test_torch_itself_is_untouched() -> None:
    from megatron.core.pipeline_parallel import schedules

    import parallel.megatron  # noqa: F401

    assert schedules.torch is not torch and schedules.torch.Tensor is torch.Tensor
    assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
    assert schedules.torch.empty_like(torch.ones(2), device=0).device.type == "cpu"
    assert isinstance(torch.cuda, types.ModuleType) and torch.cuda.Stream.__module__.startswith("torch")


def test_unusable_transformer_engine_is_masked(tmp_path) -> None:
    """A Transformer Engine without its CUDA part raises RuntimeError on import, which would break `import megatron.core`."""
    (tmp_path / "transformer_engine.py").write_text("raise RuntimeError('cudnn shared object not found')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import parallel; world = parallel.start(); print(world.size, world.device)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "cpu"], done.stderr[-800:]


def test_no_op_with_cuda() -> None:
    code = (
        "import sys, torch\n"
        "torch.cuda.is_available = lambda: True\n"  # what the backend asks; nothing else of CUDA runs here
        "before = list(sys.meta_path)\n"
        "from parallel import cpu_backend\n"
        "cpu_backend.install()\n"
        "assert not cpu_backend.installed() and sys.meta_path == before and 'transformer_engine' not in sys.modules\n"
        "print('aside')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "aside", done.stderr[-800:]
