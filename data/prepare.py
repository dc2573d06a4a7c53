"""Text to token files: Megatron .bin/.idx for training and held-out, the tokenizer, and a manifest, made once and then reused.

A preparation is a folder named after everything that determines it. It is built beside its place and renamed into it, so a
folder of that name is always whole; a lock keeps a second process from doing the same work, and without a working lock (some
network file systems) the first to rename wins.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.config import DataConfig, validate
from data.corpus import Corpus, Document, Split, name_hash
from data.errors import DataError
from data.tokenizer import Tokenizer, grouped, load_tokenizer, train
from data.workshop import once

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

log = logging.getLogger(__name__)

FORMAT = 2  # raise it when this code writes other files from the same corpus
SPLITS = ("train", "heldout")
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.json"
_SAMPLE = 8 << 20  # characters the tokenizer is trained on
_EXCERPT = 1 << 18  # of one document at most
_BATCH = 1 << 22  # characters that are encoded at once
_TELL = 3.0  # seconds between progress lines


@dataclass(frozen=True)
class Prepared:
    """A finished preparation. `key` names its content: equal keys mean equal token files."""

    folder: Path
    key: str
    manifest: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Entries of the tokenizer (the model may have more)."""
        return self.manifest["tokenizer"]["vocab_size"]

    @property
    def eos(self) -> int:
        """The id that ends every document."""
        return self.manifest["tokenizer"]["eos"]

    def count(self, split: str) -> int:
        """Tokens in "train" or "heldout", ends of text included."""
        return self.manifest[split]["tokens"]

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder / _TOKENIZER)

    def dataset(self, split: str) -> IndexedDataset:
        """The split through megatron-core: one sequence a document, each ending in `eos`.

        Keep the dataset while you use an array that came from it: it unmaps its files when it goes, and reading then crashes.
        """
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        return IndexedDataset(str(self.folder / split))


def prepare(cfg: DataConfig, vocab_size: int) -> Prepared:
    """Tokenises the corpus for a model with `vocab_size` embeddings, or finds it done under `cfg.cache`.

    Raises DataError for a corpus, tokenizer, cache or number that cannot be used, and then leaves nothing but a lock file.
    """
    validate(cfg)
    corpus = Corpus.open(cfg.corpus)
    tokenizer = None if cfg.tokenizer == "train" else load_tokenizer(cfg.tokenizer, vocab_size)
    made_by = {
        "format": FORMAT,
        "corpus": corpus.fingerprint(),
        "lenient": corpus.lenient,
        "vocab_size": vocab_size,
        "tokenizer": "train" if tokenizer is None else _digest(Path(cfg.tokenizer).expanduser()),
        "tokenizers": version("tokenizers"),
        "heldout_fraction": cfg.heldout_fraction,
    }
    key = blake2b(json.dumps(made_by, sort_keys=True).encode(), digest_size=12).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", Path(cfg.corpus).stem).strip("-")[:32] or "corpus"
    folder = Path(cfg.cache).expanduser() / f"{readable}-{vocab_size}-{key}"

    def build(here: Path) -> None:
        manifest = _build(here, cfg, corpus, tokenizer, vocab_size)
        manifest = {"key": key, "corpus": cfg.corpus, "made_by": made_by, **manifest}
        (here / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")

    return once(folder, lambda: _open(folder, key), build, cfg.cache)


def _build(here: Path, cfg: DataConfig, corpus: Corpus, tokenizer: Tokenizer | None, vocab_size: int) -> dict[str, Any]:
    began = time.monotonic()
    log.info("data: %d files, %.1f MB of %s", len(corpus.sources), corpus.bytes / 1e6, cfg.corpus)
    split = Split(
        cfg.heldout_fraction, (d.name for d in corpus.documents(tell=True)), cfg.corpus
    )  # reads all: bad text is found here
    if tokenizer is None:
        share = min(1.0, _SAMPLE / corpus.bytes)
        tokenizer = train(_sample(corpus.documents(), split, share), vocab_size)
        if tokenizer.vocab_size < vocab_size:
            log.warning("data: the corpus yields %d tokens, model.vocab_size=%d", tokenizer.vocab_size, vocab_size)
        log.info("data: tokenizer of %d entries after %.1f s", tokenizer.vocab_size, time.monotonic() - began)
    tokenizer.save(here / _TOKENIZER)
    stats = _write(here, corpus, split, tokenizer, began)
    return {"tokenizer": {"vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos}, **stats}


def _sample(documents: Iterable[Document], split: Split, share: float) -> Iterator[str]:
    """Training text, about `share` of it: documents picked by name, long ones in part; never nothing."""
    empty = True
    for document in documents:
        if not split.is_heldout(document.name) and (empty or name_hash(document.name, "sample") < share):
            empty = False
            yield document.text[:_EXCERPT]


def _write(here: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer, began: float) -> dict[str, dict[str, int]]:
    """Both token files, documents in the corpus's order. Returns their counts."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builders = {s: IndexedDatasetBuilder(str(here / f"{s}.bin"), dtype=dtype) for s in SPLITS}
    stats = {s: {"documents": 0, "tokens": 0, "characters": 0} for s in SPLITS}
    told, characters = time.monotonic(), 0
    for batch in grouped(corpus.documents(), lambda d: len(d.text), _BATCH):
        for document, ids in zip(batch, tokenizer.encode_documents([d.text for d in batch])):
            if len(ids) < 2:  # a user's tokenizer may drop all of a text
                continue
            side = "heldout" if split.is_heldout(document.name) else "train"
            builders[side].add_document(ids, [len(ids)])
            for name, more in ("documents", 1), ("tokens", len(ids)), ("characters", len(document.text)):
                stats[side][name] += more
        characters += sum(len(d.text) for d in batch)
        if time.monotonic() - told > _TELL:
            told = time.monotonic()
            tokens = sum(s["tokens"] for s in stats.values())
            log.info(
                "data: %.0f %%, %.1f M tokens after %.0f s", 100 * min(1, characters / corpus.bytes), tokens / 1e6, told - began
            )
    for side, builder in builders.items():
        if not stats[side]["tokens"]:
            raise DataError(f"data.tokenizer: leaves no tokens of the {side} documents; use another, or data.tokenizer=train")
        builder.finalize(str(here / f"{side}.idx"))
        for ending in ("bin", "idx"):
            path = here / f"{side}.{ending}"
            with path.open("rb") as file:
                os.fsync(file.fileno())
            stats[side][f"{ending}_bytes"] = path.stat().st_size
    log.info(
        "data: %.2f M training and %.2f M held-out tokens from %d + %d documents in %.1f s",
        stats["train"]["tokens"] / 1e6, stats["heldout"]["tokens"] / 1e6,
        stats["train"]["documents"], stats["heldout"]["documents"], time.monotonic() - began,
    )  # fmt: skip
    return stats


def _open(folder: Path, key: str) -> Prepared | None:
    """The finished preparation in `folder`, if its manifest and the sizes of its files say that it is one."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        whole = manifest["key"] == key and (folder / _TOKENIZER).is_file()
        for split in SPLITS:
            for ending in ("bin", "idx"):
                whole = whole and (folder / f"{split}.{ending}").stat().st_size == manifest[split][f"{ending}_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Prepared(folder, key, manifest) if whole else None


def _digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


def token_array(prepared: Prepared, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of a split as one read-only array in file order, and the length of each document (int64)."""
    dataset = prepared.dataset(split)
    tokens = np.memmap(prepared.folder / f"{split}.bin", dtype=dataset.index.dtype, mode="r")
    return tokens, dataset.sequence_lengths.astype(np.int64)  # a copy: the dataset unmaps its files when it goes
