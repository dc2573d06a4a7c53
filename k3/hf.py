"""The published checkpoint layout (spec 10.1): `load` a folder of safetensors into a model, `save` a model as one.

Reading and writing go tensor by tensor; nothing is ever unpickled. Every tensor must be whole on this rank: models cut over
tensor or expert ranks are refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3.cards import published_prefix
from k3.construct import build, cards, unwrap
from k3.hf_config import from_published, to_published
from k3.model import Model
from parallel.cards import Card
from parallel.world import World

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
A_LOG_PADDED = {96: 128}  # a fresh export writes what the release writes; other head counts have no published padding


class CheckpointError(ValueError):
    """A folder that is not a whole checkpoint of the model its config.json describes; the message lists names."""


def load(path: str | os.PathLike[str], dtype: torch.dtype | None = None, world: World | None = None) -> Model:
    """The model in folder `path`: config.json and model.safetensors, or several files with an index.

    `dtype` None takes the stored one of the matrices; tensors that the release keeps in float32 stay so. Raises
    CheckpointError for missing, extra or misshapen tensors and ConfigError for a config.json this stack cannot represent.
    """
    folder = Path(path)
    if world is not None:
        _refuse_cut(world)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json; give the folder of a published checkpoint")
    try:
        document = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{folder / 'config.json'}: not JSON ({error})") from None
    config = from_published(document)
    stored = _Stored(folder)
    if dtype is None:
        dtype = stored.dtype(f"{published_prefix(config)}model.embed_tokens.weight")
    mtp = f"{published_prefix(config)}mtp."
    if config.mtp_layers and not any(name.startswith(mtp) for name in stored.names):
        config.mtp_layers = 0  # an export may leave the MTP layers out
    model = build(config, world, dtype=dtype)
    table = cards(model)
    wanted = {slot: card for card in table.values() for slot in _slots(card)}
    _check(folder, wanted, stored)
    with torch.no_grad():
        for (name, expert, rows), card in wanted.items():
            _target(table.tensor(card.name), expert, rows).copy_(_fit(stored.read(name), card))
    lengths = {stored.shape(n)[0] for (n, _, _) in wanted if n.endswith(".A_log")}
    model.a_log_length = lengths.pop() if lengths else None
    return model


def save(
    model: torch.nn.Module, path: str | os.PathLike[str], *, mtp: bool = True, shard_bytes: int = 5_000_000_000
) -> None:  # fmt: skip
    """Writes `model` to the new folder `path` in the published layout, tensors in their present precision.

    mtp=False leaves the MTP layers out. Above `shard_bytes` the tensors are spread over numbered files with an index. The
    folder appears only when it is whole. Raises CheckpointError where `path` exists already or the model is cut over ranks.
    """
    folder = Path(path)
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; give a new folder or remove it")
    whole = unwrap(model)
    _refuse_cut(whole.world)
    building = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        document = to_published(whole.k3)
        if not mtp:
            document.get("text_config", document)["num_nextn_predict_layers"] = 0
        (building / "config.json").write_text(json.dumps(document, indent=1) + "\n")
        _write_shards(building, _published_tensors(whole, mtp), shard_bytes)
        os.replace(building, folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def cut(world: World) -> str | None:
    """Over which ranks a model's tensors are cut there; None where every rank holds them whole."""
    axes = {"tensor": world.groups.tp, "expert": world.groups.ep, "pipeline": world.groups.pp}
    return " and ".join(f"{group.size()} {axis} ranks" for axis, group in axes.items() if group.size() > 1) or None


def _refuse_cut(world: World) -> None:
    if (ranks := cut(world)) is not None:
        raise CheckpointError(f"the model is cut over {ranks}; the published layout needs every tensor whole in one process")


Slot = tuple[str, int | None, tuple[int, int] | None]  # published name, expert, rows of our tensor


def _slots(card: Card) -> Iterator[Slot]:
    for p in card.published:
        if p.per_expert:
            for expert in range(card.shape[0]):
                yield p.name.format(expert=expert), expert, p.rows
        else:
            yield p.name, None, p.rows


def _target(tensor: Tensor, expert: int | None, rows: tuple[int, int] | None) -> Tensor:
    if expert is not None:
        tensor = tensor[expert]
    return tensor if rows is None else tensor[rows[0] : rows[1]]


def _published_shape(card: Card, expert: int | None, rows: tuple[int, int] | None) -> tuple[int, ...]:
    shape = card.shape if expert is None else card.shape[1:]
    if rows is not None:
        shape = (rows[1] - rows[0], *shape[1:])
    if card.role == "convolution":  # ours is [channels, width]; a Conv1d weight has its input channel between
        shape = (shape[0], 1, shape[1])
    return shape


def _is_padded_a_log(card: Card, shape: tuple[int, ...]) -> bool:
    return card.name.endswith(".A_log") and len(shape) == 1 and shape[0] > card.shape[0]


def _fit(value: Tensor, card: Card) -> Tensor:
    if _is_padded_a_log(card, tuple(value.shape)):
        return value[: card.shape[0]]
    if card.role == "convolution":
        return value.squeeze(1)
    return value


def _check(folder: Path, wanted: dict[Slot, Card], stored: _Stored) -> None:
    names = {slot[0] for slot in wanted}
    problems = []
    if absent := sorted(names - stored.names):
        problems.append(f"missing: {_some(absent)}")
    if extra := sorted(stored.names - names):
        problems.append(f"not part of this model: {_some(extra)}")
    misshapen = []
    for (name, expert, rows), card in wanted.items():
        if name in stored.names:
            got, want = stored.shape(name), _published_shape(card, expert, rows)
            if got != want and not _is_padded_a_log(card, got):
                misshapen.append(f"{name} is {list(got)}, config.json says {list(want)}")
    if misshapen:
        problems.append(f"misshapen: {_some(misshapen)}")
    if len({stored.shape(n) for n in names & stored.names if n.endswith(".A_log")}) > 1:
        problems.append("A_log has different lengths in different layers")
    if problems:
        raise CheckpointError(f"{folder}: " + "; ".join(problems))


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _published_tensors(model: Model, mtp: bool) -> Iterator[tuple[str, Tensor]]:
    table = cards(model)
    length = model.a_log_length
    for card in table.values():
        if card.name.startswith("mtp.") and not mtp:
            continue
        for name, expert, rows in _slots(card):
            value = _target(table.tensor(card.name).detach(), expert, rows)
            if name.endswith(".A_log"):
                padded = length or A_LOG_PADDED.get(card.shape[0], card.shape[0])
                value = torch.cat([value, value.new_zeros(padded - value.shape[0])])
            yield name, value.reshape(_published_shape(card, expert, rows)) if card.role == "convolution" else value


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        save_file(pending, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        size = 0

    for name, tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        if pending and size + count > shard_bytes:
            flush()
        pending[name] = tensor.cpu().contiguous()
        size, total = size + count, total + count
    flush()
    if len(shards) == 1:
        os.replace(folder / "0.part", folder / SINGLE)
        return
    where: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"{i}.part", folder / file)
        where |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1) + "\n")


class _Stored:
    """The tensors of a folder, read one at a time."""

    def __init__(self, folder: Path):
        if (folder / INDEX).is_file():
            where = json.loads((folder / INDEX).read_text())["weight_map"]
            files = sorted(set(where.values()))
            if absent := [f for f in files if not (folder / f).is_file()]:
                raise CheckpointError(f"{folder}: {INDEX} names files that are not there: {_some(absent)}")
        elif (folder / SINGLE).is_file():
            files = [SINGLE]
        else:
            raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
        self._where: dict[str, str] = {}
        self._folder = folder
        self._open = {}
        for file in files:
            try:
                self._open[file] = safe_open(folder / file, framework="pt")
            except Exception as error:  # the library raises its own type for a damaged or foreign file
                raise CheckpointError(f"{folder / file}: not a readable safetensors file ({error})") from None
            self._where |= dict.fromkeys(self._open[file].keys(), file)
        self.names = set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._where[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        if name not in self._where:
            raise CheckpointError(f"{self._folder}: missing: {name}")
        return self.read(name).dtype

    def read(self, name: str) -> Tensor:
        return self._open[self._where[name]].get_tensor(name)
