"""Small corpora of made-up words, prepared once a session."""

from pathlib import Path

import numpy as np
import pytest

from data import DataConfig, Prepared, prepare

VOCABULARY = 300


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> Path:
    """Files of 3 to 400 words; names and contents differ."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefghij"), size=rng.integers(1, 9))) for _ in range(200)]
    for i in range(documents):
        path = folder / f"part{i % 3}" / f"doc{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{i}: " + " ".join(rng.choice(words, size=rng.integers(3, 400))) + "\n")
    return folder


@pytest.fixture(scope="session")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    root = tmp_path_factory.mktemp("data")
    return DataConfig(
        corpus=str(write_corpus(root / "corpus")), cache=str(root / "cache"), seq_length=32, batch_size=12, micro_batch_size=2,
        heldout_fraction=0.2, heldout_tokens=1000,
    )  # fmt: skip


@pytest.fixture(scope="session")
def prepared(cfg: DataConfig) -> Prepared:
    return prepare(cfg, VOCABULARY)
