"""Whether the nodes of a job are fit to train: `python -m slurm.health`, one process a rank, as srun starts them.

Each node counts its GPUs, and looks at the disk of the run folder and at its clock; then all ranks add up a tensor. The first
rank judges: one line names each node that fails or does not answer, and every rank ends with 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

ELEMENTS = 2**20  # of the tensor that is added up: more than fits the small-message paths


@dataclass(frozen=True)
class Place:
    """This rank among those of the job."""

    rank: int
    size: int
    local: int  # on its node
    nodes: tuple[str, ...]  # in the order of their ranks
    address: str
    port: int

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Place:
        rank, size, local = (int(env[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID"))
        return cls(rank, size, local, tuple(env["K3_NODES"].split()), env["MASTER_ADDR"], int(env["MASTER_PORT"]))

    def node(self, rank: int) -> str:
        """srun gives each node as many ranks, one node after the other."""
        return self.nodes[rank * len(self.nodes) // self.size]


def local_faults(gpus: int, folder: Path, free_gib: float) -> Iterator[str]:
    """What this node alone can tell."""
    import torch

    there = torch.cuda.device_count()
    if there < gpus:
        yield f"{there} of {gpus} GPUs"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        of = os.statvfs(folder)
        free = of.f_bavail * of.f_frsize / 2**30
        if free < free_gib:
            yield f"{free:,.1f} GiB left in {folder}, and cluster.health.free_gib={free_gib:g}"
    except OSError as error:
        yield f"{folder} cannot be written to ({error.strerror})"


def main(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """0 where all is well, on every rank; else 1, and the first rank says why."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--free-gib", type=float, required=True)
    parser.add_argument("--clock-skew", type=float, required=True)
    args = parser.parse_args(argv)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # not what each socket has waited for; before torch is imported
    place = Place.of(env)
    faults = list(local_faults(args.gpus, args.folder, args.free_gib)) if place.local == 0 else []
    lines = meet(place, faults, args.timeout, args.clock_skew, "nccl" if args.gpus else "gloo")
    if place.rank == 0:
        for line in lines:
            print(f"k3: health: {line}", file=sys.stderr)
        if not lines:
            print(f"k3: health: {len(place.nodes)} nodes and {place.size} ranks are well", flush=True)
    return 1 if lines else 0


def meet(place: Place, faults: Sequence[str], timeout: float, clock_skew: float, backend: str) -> list[str]:
    """The first rank's verdict, one line a node that fails, on every rank; empty where all is well."""
    from torch.distributed import DistStoreError, PrefixStore, TCPStore

    wait, longer = timedelta(seconds=timeout), timedelta(seconds=2 * timeout)  # the others wait for one who waits
    try:
        store = TCPStore(place.address, place.port, is_master=place.rank == 0, timeout=wait, wait_for_workers=False)
    except (DistStoreError, RuntimeError):
        line = f"{place.node(place.rank)}: does not reach {place.address}:{place.port} within {timeout:g} s"
        print(f"k3: health: {line}", file=sys.stderr)
        return [line]
    store.set(f"fault/{place.rank}", "; ".join(faults))
    heard = answers(store, "fault", place, wait) if place.rank == 0 else {}
    lines = _verdict(store, "first", place, heard, longer)
    now = time.time()  # all ranks are told at once
    if lines:
        return lines
    store.set(f"clock/{place.rank}", repr(now))
    # A broken network makes collectives wait for ever, and cannot be interrupted: this process ends from beside them.
    give_up = threading.Timer(timeout, _abandon, (place, store))
    give_up.daemon = True
    give_up.start()
    store.set(f"sum/{place.rank}", _add_up(place, PrefixStore("group", store), wait, backend))
    heard = answers(store, "sum", place, wait) if place.rank == 0 else {}
    give_up.cancel()
    if place.rank == 0:
        clocks = {rank: float(store.get(f"clock/{rank}")) for rank, fault in heard.items() if not fault}
        heard |= clock_faults(clocks, clock_skew, place.node(0))
    return _verdict(store, "second", place, heard, longer)


def clock_faults(clocks: Mapping[int, float], most: float, first: str) -> dict[int, str]:
    """By rank, what is wrong with clocks (in seconds, read at one moment) beside that of rank 0, whose node is `first`."""
    ahead = {rank: clock - clocks[0] for rank, clock in clocks.items()} if 0 in clocks else {}
    text = "its clock is {:.1f} s {} that of {}"
    return {r: text.format(abs(a), "ahead of" if a > 0 else "behind", first) for r, a in ahead.items() if abs(a) > most}


def answers(store, part: str, place: Place, wait: timedelta) -> dict[int, str]:  # type: ignore[no-untyped-def]
    """What each rank has said, by rank, all of them given `wait` together."""
    from torch.distributed import DistStoreError

    heard, deadline = {}, time.monotonic() + wait.total_seconds()
    for rank in range(place.size):
        try:
            store.wait([f"{part}/{rank}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            heard[rank] = store.get(f"{part}/{rank}").decode()
        except DistStoreError:
            heard[rank] = f"does not answer within {wait.total_seconds():g} s"
    return heard


def _verdict(store, name: str, place: Place, heard: Mapping[int, str], wait: timedelta) -> list[str]:  # type: ignore[no-untyped-def]
    if place.rank == 0:
        told = {f"{place.node(rank)}: {text}": None for rank, text in heard.items() if text}  # each node once
        store.set(name, "\n".join(told))
        lines = list(told)
    else:
        store.wait([name], wait)
        lines = store.get(name).decode().splitlines()
    # the first rank holds the store: it leaves last
    store.set(f"{name}/{place.rank}", "left")
    if place.rank == 0 and (lines or name == "second"):
        for rank, text in heard.items():
            if not text.startswith("does not answer"):
                store.wait([f"{name}/{rank}"], timedelta(seconds=10))
    return lines


def _add_up(place: Place, store, wait: timedelta, backend: str) -> str:  # type: ignore[no-untyped-def]
    """What is wrong with adding up a tensor over all ranks; empty: nothing."""
    import torch
    import torch.distributed as dist

    try:
        device = torch.device("cuda", place.local) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=wait)
        ones = torch.full((ELEMENTS,), float(place.rank + 1), device=device)
        dist.all_reduce(ones)
        wanted = place.size * (place.size + 1) / 2
        if not bool((ones == wanted).all()):
            return f"an all-reduce over {backend} gives {float(ones[0]):g} where {wanted:g} is right"
        dist.destroy_process_group()
    except Exception as error:  # whatever a network does
        return f"an all-reduce over {backend} fails: {' '.join(str(error).split())[:200]}"
    return ""


def _abandon(place: Place, store) -> None:  # type: ignore[no-untyped-def]
    if place.rank == 0:
        missing = {place.node(rank): None for rank in range(place.size) if not store.check([f"sum/{rank}"])}
        print(f"k3: health: {', '.join(missing)}: an all-reduce does not end in time", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
