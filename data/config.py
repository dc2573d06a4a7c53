"""What to read and how to batch it, as the user types it (`data.corpus=/path/to/text`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import gcd

from data.errors import DataError

SHORTEST_RECALL = 128  # tokens of a row that holds a fact and its question, whatever the tokenizer


@dataclass
class RampConfig:
    """A batch size that grows to data.batch_size in equal steps: as megatron-core's start, increment and samples."""

    start: int | None = None  # sequences of the first step; null: data.batch_size from the beginning
    increment: int | None = None  # sequences by which the batch grows at a time; null: data.ramp.start
    samples: int = 0  # sequences over which it grows; each size gets an equal share of them


class ChatMode(Enum):
    thinking = "thinking"  # each assistant message begins with its reasoning, kept in the history even where it is empty
    instruct = "instruct"  # no reasoning


class TooLong(Enum):
    drop = "drop"  # leave the conversation out
    truncate = "truncate"  # keep its beginning
    refuse = "refuse"  # stop


@dataclass
class ChatConfig:
    """Conversations to fine-tune on (docs/chat.md); read by the phases after pretraining."""

    path: str | None = None  # a .jsonl of conversations or a folder of them
    heldout: str | None = None  # conversations to evaluate on; null: data.heldout_fraction of data.chat.path, by their questions
    mode: ChatMode = ChatMode.thinking
    too_long: TooLong = TooLong.drop  # what happens to a conversation of more than data.seq_length + 1 tokens


@dataclass
class LongConfig:
    """Rows for long context, as shares of all rows; the others are packed as ever. Both 0: the ordinary stream."""

    documents: float = 0.0  # filled by one long document, or by neighbours in the corpus where none is long enough
    recall: float = 0.0  # text of several documents in one, with facts told early and asked late
    facts: int = 16  # in such a row at most
    questions: int = 2  # times that each is asked


@dataclass
class DataConfig:
    corpus: str = "stdlib"  # "stdlib": the source of the running Python's standard library; else a folder or a .jsonl file
    tokenizer: str = "train"  # "train": a byte-level BPE of model.vocab_size trained on the corpus; else a tokenizer.json
    cache: str = "runs/data"  # prepared token files, keyed by what made them
    seq_length: int = 256  # tokens per sequence
    batch_size: int = 16  # sequences per optimizer step, over all data ranks
    ramp: RampConfig = field(default_factory=RampConfig)
    micro_batch_size: int | None = (
        None  # sequences per forward pass; null: all of a data rank's, as far as every size of a ramp divides
    )
    long: LongConfig = field(default_factory=LongConfig)
    heldout_fraction: float = 0.05  # of the files
    heldout_tokens: int = 65536  # the fixed evaluation set, drawn across all held-out files
    seed: int = 0  # order of documents
    chat: ChatConfig = field(default_factory=ChatConfig)


def batch_sizes(cfg: DataConfig) -> list[int]:
    """The sizes that steps have, from the first to data.batch_size."""
    if cfg.ramp.start is None:
        return [cfg.batch_size]
    return list(range(cfg.ramp.start, cfg.batch_size + 1, cfg.ramp.increment or cfg.ramp.start))


def samples_of(cfg: DataConfig, step: int) -> range:
    """The global samples that step number `step` (from 0) reads: a pure function, so that a step is all a resume must know.

    A step has the size that belongs to the samples read before it; each size holds for an equal share of data.ramp.samples.
    """
    sizes = batch_sizes(cfg)
    read = 0
    for number, size in enumerate(sizes[:-1], 1):
        until = -(-number * cfg.ramp.samples // (len(sizes) - 1))  # rounded up
        steps = max(0, -(-(until - read) // size))
        if step < steps:
            return range(read + step * size, read + (step + 1) * size)
        read, step = read + steps * size, step - steps
    return range(read + step * sizes[-1], read + (step + 1) * sizes[-1])


def micro_batch(cfg: DataConfig, of: int = 1) -> int:
    """Sequences per forward pass, where `of` data ranks share a step."""
    return cfg.micro_batch_size if cfg.micro_batch_size is not None else max(1, gcd(*batch_sizes(cfg)) // of)


def micro_batches(cfg: DataConfig, of: int = 1) -> int:
    """Forward passes of each data rank in a step, of the largest where the batch grows."""
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
    broken += [*_broken_ramp(cfg), *_broken_long(cfg)]
    if not broken and cfg.batch_size % (group := micro_batch(cfg, of) * of):
        broken.append(
            f"data.batch_size={cfg.batch_size}: must be a multiple of data.micro_batch_size x data ranks = "
            f"{micro_batch(cfg, of)} x {of} = {group}; give {-(-cfg.batch_size // group) * group}, or a smaller micro batch"
        )
    if not broken and cfg.ramp.start is not None:
        group = micro_batch(cfg, of) * of
        for name, value in (("start", cfg.ramp.start), ("increment", cfg.ramp.increment)):
            if value is not None and value % group:
                broken.append(
                    f"data.ramp.{name}={value}: must be a multiple of data.micro_batch_size x data ranks = "
                    f"{micro_batch(cfg, of)} x {of} = {group}, as every size of the batch is"
                )
    if broken:
        raise DataError("\n".join(broken))


def _broken_long(cfg: DataConfig) -> list[str]:
    long, broken = cfg.long, []
    for name in ("documents", "recall"):
        if not 0 <= (share := getattr(long, name)) <= 1:
            broken.append(f"data.long.{name}={share}: a share of the rows; must lie between 0 and 1")
    if not broken and long.documents + long.recall > 1:
        broken.append(f"data.long.recall={long.recall}: with data.long.documents={long.documents} more than all rows; lower one")
    if long.facts < 1:
        broken.append(f"data.long.facts={long.facts}: must be at least 1; data.long.recall=0 plants none")
    if long.questions < 1:
        broken.append(f"data.long.questions={long.questions}: must be at least 1; data.long.recall=0 asks none")
    if long.recall and cfg.seq_length < SHORTEST_RECALL:
        broken.append(
            f"data.long.recall={long.recall}: needs rows with room for facts, and data.seq_length={cfg.seq_length}; give "
            f"{SHORTEST_RECALL} tokens or more"
        )
    return broken


def _broken_ramp(cfg: DataConfig) -> list[str]:
    start, increment, samples = cfg.ramp.start, cfg.ramp.increment, cfg.ramp.samples
    if start is None:
        return []
    if not 1 <= start < cfg.batch_size:
        return [f"data.ramp.start={start}: must lie in 1..{cfg.batch_size - 1}, below data.batch_size; null grows nothing"]
    broken = []
    step = start if increment is None else increment
    if step < 1:
        broken.append(f"data.ramp.increment={step}: must be at least 1; null is data.ramp.start")
    elif (cfg.batch_size - start) % step:
        broken.append(
            f"data.ramp.increment={step}: {start} + n x {step} never is data.batch_size={cfg.batch_size}; give a divisor of "
            f"{cfg.batch_size - start}"
        )
    if samples < 1:
        broken.append(f"data.ramp.samples={samples}: must be at least 1: the sequences over which the batch grows")
    return broken
