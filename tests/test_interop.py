"""The folders `kernels` and `data` on the path must not disturb a library that probes packages of those names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]

PROBES = """
import importlib.util, pathlib, sys
root = pathlib.Path({root!r})
for name in ("kernels", "data"):
    assert pathlib.Path(importlib.util.find_spec(name).origin).is_relative_to(root), name
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.utils import import_utils
assert import_utils.is_kernels_available() is False, "our folder was taken for the package `kernels`"
import transformers.integrations.hub_kernels as hub
import transformers.modeling_utils
import torch
model = AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2))
assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 32)
import kernels.documents, data
assert pathlib.Path(kernels.__file__).parent == root / "kernels" and data.prepare
print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["checkout first", "checkout last"])
def test_transformers_works_beside_the_project(first, tmp_path):
    """From elsewhere with the checkout on PYTHONPATH, and from the checkout itself (where "" leads sys.path)."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    code = PROBES.format(root=str(ROOT))
    if not first:
        code = f"import sys; sys.path = [p for p in sys.path if p not in ('', {str(ROOT)!r})] + [{str(ROOT)!r}]\n" + code
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT if first else tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.strip().endswith("fine"), run.stderr[-3000:]
