"""What to read and how to batch it, as the user types it (`data.corpus=/path/to/text`)."""

from __future__ import annotations

from dataclasses import dataclass

from data.errors import DataError


@dataclass
class DataConfig:
    corpus: str = "stdlib"  # "stdlib": the source of the running Python's standard library; else a folder or a .jsonl file
    tokenizer: str = "train"  # "train": a byte-level BPE of model.vocab_size trained on the corpus; else a tokenizer.json
    cache: str = "runs/data"  # prepared token files, keyed by what made them
    seq_length: int = 256  # tokens per sequence
    batch_size: int = 16  # sequences per optimizer step, over all data ranks
    micro_batch_size: int | None = None  # sequences per forward pass; null: all of a data rank's
    heldout_fraction: float = 0.05  # of the files
    heldout_tokens: int = 65536  # the fixed evaluation set, drawn across all held-out files
    seed: int = 0  # order of documents


def micro_batch(cfg: DataConfig, of: int = 1) -> int:
    """Sequences per forward pass, where `of` data ranks share a step."""
    return cfg.micro_batch_size if cfg.micro_batch_size is not None else max(1, cfg.batch_size // of)


def micro_batches(cfg: DataConfig, of: int = 1) -> int:
    """Forward passes of each data rank in a step."""
    return cfg.batch_size // (micro_batch(cfg, of) * of)


def validate(cfg: DataConfig, *, of: int = 1) -> None:
    """Checks the numbers, and that `of` data ranks can share a step. Raises DataError with every broken rule, one a line."""
    broken = []
    for name in ("seq_length", "batch_size", "micro_batch_size", "heldout_tokens"):
        if (value := getattr(cfg, name)) is not None and value < 1:
            broken.append(f"data.{name}={getattr(cfg, name)}: must be at least 1")
    if not 0 < cfg.heldout_fraction < 1:
        broken.append(f"data.heldout_fraction={cfg.heldout_fraction}: must lie between 0 and 1, both excluded; 0.05 is usual")
    if cfg.seed < 0:
        broken.append(f"data.seed={cfg.seed}: must be at least 0")
    if not broken and cfg.batch_size % (group := micro_batch(cfg, of) * of):
        broken.append(
            f"data.batch_size={cfg.batch_size}: must be a multiple of data.micro_batch_size x data ranks = "
            f"{micro_batch(cfg, of)} x {of} = {group}; give {-(-cfg.batch_size // group) * group}, or a smaller micro batch"
        )
    if broken:
        raise DataError("\n".join(broken))
