"""`k3 doctor` on this machine as it is, and on ones made of real folders, programs and servers."""

from __future__ import annotations

import importlib.metadata
import socket
import sys
from pathlib import Path

import pytest
import torch
import wandb as client

from recipes import cli, doctor
from tests.recipes.wandb_server import Server

STATES = (doctor.OK, doctor.ABSENT, doctor.WRONG)


@pytest.fixture
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    client.teardown()  # it reads the environment once a process
    yield
    client.teardown()


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[str, str]]:
    """component -> (state, text)."""
    assert cli.main(["doctor", *words]) == 0
    out = {}
    for line in capsys.readouterr().out.splitlines():
        state, component, text = line[:3].strip(), line[4:24].strip(), line[25:]
        assert state in STATES and text and component not in out, line
        out[component] = (state, text)
    return out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_every_component_has_its_line(capsys: pytest.CaptureFixture[str]):
    lines = printed(capsys)
    wanted = ["python", "torch", "driver", "gpu", "nccl", "megatron-core", "emerging-optimizers", "triton", "fla-core"]
    wanted += ["transformer-engine", "apex", "deepspeed", "slurm", "wandb", "sandbox"]
    wanted += [f"kernel {name}" for name in ("kda", "attention", "experts", "newton-schulz", "adamw")]
    assert list(lines) == [*wanted, "precision fp8", "precision mxfp8"]
    for name in ("torch", "megatron-core", "emerging-optimizers", "fla-core", "wandb"):
        state, text = lines[name]
        assert state == doctor.OK and text.startswith(importlib.metadata.version(name))
    assert lines["kernel kda"] == (doctor.OK, "chunked (fla refused: its kernels need CUDA, q is on cpu) [float32 on cpu]")
    assert lines["precision mxfp8"][0] == doctor.ABSENT and "pip install" in lines["precision mxfp8"][1]


def test_a_wrong_topic_is_named(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", "wandbb"]) == 2
    assert "wandbb: no such topic" in capsys.readouterr().err and cli.main(["doctor", "wandb", "more"]) == 2


def test_another_version_than_the_pinned_one_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A real distribution of that name, found before the installed one."""
    info = tmp_path / "megatron_core-0.16.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = doctor.package("megatron-core", "megatron.core")
    assert line.state == doctor.WRONG and "0.16.1" in line.text and "0.19.2 exactly" in line.text
    assert doctor.package("no-such-distribution", "nothing").state == doctor.ABSENT


@pytest.mark.parametrize(
    ("files", "state", "says"),
    [
        ((), doctor.ABSENT, "pip install apex` brings another project"),
        (("apex/__init__.py",), doctor.WRONG, "pip uninstall apex"),
        (("apex/__init__.py", "apex/multi_tensor_apply/__init__.py"), doctor.WRONG, "no amp_C"),
        (("apex/__init__.py", "apex/multi_tensor_apply/__init__.py", "amp_C.py"), doctor.OK, "NVIDIA's"),
    ],
)
def test_which_apex_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[str, ...], state: str, says: str):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.delitem(sys.modules, "apex", raising=False)  # the CPU backend hides it from megatron-core
    monkeypatch.syspath_prepend(str(tmp_path))
    line = doctor.apex()
    assert line.state == state and says in line.text


def test_programs_of_the_machine_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "sinfo"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.slurm().state == doctor.ABSENT
    for script, answer in (("echo slurm-wlm 22.05.8", "slurm-wlm 22.05.8"), ("exit 1", None)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert doctor.answer("sinfo", "--version") == answer
    monkeypatch.setattr(doctor, "PATIENCE", 0.2)
    program.write_text("#!/bin/sh\nwhile :; do :; done\n")
    assert doctor.answer("sinfo", "--version") is None


def test_where_metrics_will_go(no_configuration: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        lines = printed(capsys, "wandb")
        assert "is offline here" in lines["wandb"][1] and "(k3 doctor wandb)" in lines["wandb"][1]
        assert lines["wandb key"][0] == doctor.ABSENT and lines["wandb server"] == (doctor.OK, f"{server.url} answers")
        assert "wandb sync runs/" in lines["wandb sync"][1] and "offline-run-" in lines["wandb offline"][1]
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        lines = printed(capsys, "wandb")
        assert "is online here" in lines["wandb"][1] and lines["wandb key"][0] == doctor.OK
        assert "0" * 40 not in str(lines) and not server.runs  # nothing is shown of it, and nothing sent


def test_a_server_that_does_not_answer(
    no_configuration: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert "does not answer" in printed(capsys, "wandb")["wandb server"][1]
