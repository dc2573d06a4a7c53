"""Several ranks on this machine's CPU: runs a function on N gloo processes and brings back what each returned.

Starting N interpreters that each import torch and megatron-core costs seconds a rank. So one helper process imports everything
once, with one thread and without any tensor work (a child forked from a process whose thread pools have run would hang), and
forks the ranks from itself.

Who cleans up: the caller owns the helper and the folder of results. The helper runs in a process group of its own, so Ctrl-C
reaches the caller alone, which then ends that group; a helper whose caller has gone ends its ranks and removes the folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 300.0  # seconds
SETTLE = 1.0  # seconds after a failure: a rank that was killed may be collected later than one that lost its connection to it
# What a rank must find set when it imports torch: one thread, nothing compiled at import, no CUDA device.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
# What users of parallel/megatron.py import later, inside functions: here once for all ranks.
LATER = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.token_dispatcher",
)


class RankError(RuntimeError):
    """A rank failed, died or did not finish. `rank` is the first one, None where no single rank is to blame."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> Any:
        return RankError, (str(self), self.rank)


class Helper:
    """The process that ranks are forked from. Starts at the first call, and anew after an interrupted one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._folder: Path | None = None

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run_ranks(self, target: str, size: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Calls `target` ("module:function") with `args` on `size` ranks; returns what they returned, in the order of ranks.

        torch.distributed runs (gloo) when the function is called; RANK, WORLD_SIZE and LOCAL_RANK are set. Arguments and results
        are pickled. Raises RankError with the traceback of the rank that failed first, or with where each rank stands after
        `timeout` seconds.
        """
        try:
            connection, folder = self._started()
            connection.send((target, size, _pickled(args), timeout))
            error: RankError | None = connection.recv()
            if error is None:
                return [_unpickled((folder / f"{rank}.result").read_bytes()) for rank in range(size)]
        except (EOFError, ConnectionError) as gone:
            self.close()
            raise RankError(f"{target}: the process that ranks are forked from has died") from gone
        except BaseException:  # Ctrl-C above all: an answer nobody waited for must not meet the next question
            self.close()
            raise
        raise error

    def close(self) -> None:
        """Ends the helper and any rank still running, and removes what they wrote. Idempotent."""
        if self._connection is not None:
            self._connection.close()  # tells the helper to go
        if self._process is not None:
            try:
                code = self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:  # it could not end its ranks; they are what is left in its group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._process = self._connection = self._folder = None

    def _started(self) -> tuple[Connection, Path]:
        if self._connection is None or self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
            (self._folder / "tmp").mkdir()  # for what imported packages put there and a stopped process leaves
            self._connection, theirs = multiprocessing.Pipe()
            program = "import sys; from parallel import local; local.serve(int(sys.argv[1]), sys.argv[2])"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), str(self._folder)],
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "TMPDIR": str(self._folder / "tmp"),
                },
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
        return self._connection, self._folder


def serve(descriptor: int, folder: str) -> None:
    """The helper's life: answers calls until its caller closes the connection or has gone."""
    caller = Connection(descriptor)
    try:
        # "Transformer Engine and Apex are not installed ...", and invalid escapes in what is compiled for the first time
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
        while True:
            target, size, args, timeout = caller.recv()
            try:
                _run(target, size, args, timeout, Path(folder), caller)
                caller.send(None)
            except RankError as error:
                caller.send(error)
    except (EOFError, ConnectionError):
        shutil.rmtree(folder, ignore_errors=True)


def _run(target: str, size: int, args: bytes, timeout: float, folder: Path, caller: Connection) -> None:
    """Forks the ranks and waits; their results are in `folder` afterwards. Raises EOFError if the caller goes."""
    for old in folder.iterdir():
        if old.is_file():
            old.unlink()
    try:
        _find(target)  # imports what the ranks share
        if "parallel.megatron" in sys.modules:
            for name in LATER:
                importlib.import_module(name)
    except Exception:
        raise RankError(f"{target}: cannot be imported\n{traceback.format_exc()}") from None
    if threads := _other_threads():
        raise RankError(
            f"{target}: importing it started {threads} more threads, and ranks forked from a process with threads may hang; "
            "importing it must compute nothing"
        )
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(r, size, target, args, folder, caller)) for r in range(size)]
    deadline = time.monotonic() + timeout
    try:
        for process in ranks:
            process.start()
        while running := [p for p in ranks if p.exitcode is None]:
            ready = wait([caller, *(p.sentinel for p in running)], max(0.0, deadline - time.monotonic()))
            if caller in ready:  # nothing is asked while a call runs: the connection has closed
                raise EOFError
            for process in running:
                process.join(0)
            if any(p.exitcode for p in ranks):
                settled = time.monotonic() + SETTLE
                for process in running:
                    process.join(max(0.0, settled - time.monotonic()))
                raise _failure(target, ranks, folder)
            if not ready:
                raise _hang(target, timeout, ranks, folder)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
                process.close()


def _rank(rank: int, size: int, target: str, args: bytes, folder: Path, caller: Connection) -> None:
    """The life of one rank."""
    caller.close()  # else the helper's death would not close the connection
    faulthandler.register(signal.SIGUSR1, file=(folder / f"{rank}.stack").open("w"), all_threads=False)
    try:
        import torch.distributed as dist

        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        # a file, because any port may be taken between choosing and binding it
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
        result = _find(target)(*_unpickled(args))
        (folder / f"{rank}.result").write_bytes(_pickled(result))
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves first would reset connections others still read from
            dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"{time.monotonic()}\n{traceback.format_exc()}")
        # no unwinding: destructors of process groups may wait for other ranks
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _pickled(value: Any) -> bytes:
    """In torch's own format. Connections pass tensors through threads and shared memory; and in plain pickles of a process that
    has imported megatron-core, tensors refer to it, so that whoever reads them imports it, too: nine seconds.
    """
    import torch

    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _unpickled(written: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(written), weights_only=False)


def _find(target: str) -> Any:
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


def _other_threads() -> int:
    tasks = Path("/proc/self/task")
    return (len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()) - 1


def _failure(target: str, ranks: Sequence[Any], folder: Path) -> RankError:
    """The rank that failed first: the others mostly fail because its connections closed."""
    for rank, process in enumerate(ranks):
        if process.exitcode and not (folder / f"{rank}.error").exists():
            how = f"signal {signal.Signals(-process.exitcode).name}" if process.exitcode < 0 else f"exit code {process.exitcode}"
            return RankError(f"{target}: rank {rank} of {len(ranks)} died ({how})", rank)
    failed = []
    for rank, process in enumerate(ranks):
        if process.exitcode:
            stamp, _, text = (folder / f"{rank}.error").read_text().partition("\n")
            failed.append((float(stamp), rank, text))
    _, rank, text = min(failed)
    return RankError(f"{target}: rank {rank} of {len(ranks)} failed\n{text.rstrip()}", rank)


def _hang(target: str, timeout: float, ranks: Sequence[Any], folder: Path) -> RankError:
    """Where every rank that still runs stands: Python stacks, innermost call first."""
    left = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
    stacks = [folder / f"{rank}.stack" for rank in left]
    for rank, stack in zip(left, stacks):
        if stack.exists():  # else the rank has not registered its handler, and the signal would end it
            os.kill(ranks[rank].pid, signal.SIGUSR1)
    limit = time.monotonic() + 2
    while time.monotonic() < limit and not all(stack.exists() and stack.stat().st_size for stack in stacks):
        time.sleep(0.02)
    lines = [f"{target}: rank {', '.join(map(str, left))} of {len(ranks)} did not finish within {timeout:g} s"]
    for rank, stack in zip(left, stacks):
        text = stack.read_text().rstrip() if stack.exists() else ""
        lines.append(f"rank {rank}: {text or 'no answer'}")
    return RankError("\n".join(lines), left[0] if len(left) == 1 else None)
