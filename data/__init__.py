"""Text to token files to packed, resumable batches. Knows ranks only as two integers; importing it loads no torch.

prepared = data.prepare(cfg.data, cfg.model.vocab_size)
steps    = data.stream(cfg.data, prepared, rank=..., of=..., position=..., horizon=1 + cfg.model.mtp_layers)
fixed    = data.heldout(cfg.data, prepared, horizon=...)
lines    = data.baselines(prepared, fixed)
asked    = data.recall(cfg.data, prepared, [256, 1024, 4096])   # answers to be found far back, by length
same     = data.contexts(cfg.data, prepared, [256, 1024, 4096])  # the same targets in rows of each length

Conversations: the template is data.chat, fine-tuning on them data.sft.
"""

from data import chat, sft
from data.batch import Batch, StepBatch
from data.config import ChatConfig, ChatMode, DataConfig, LongConfig, TooLong, validate
from data.contexts import contexts
from data.errors import DataError
from data.heldout import heldout
from data.ngram import Baselines, baselines
from data.prepare import Prepared, prepare
from data.recall import recall
from data.stream import Stream, stream
from data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Baselines",
    "Batch",
    "ChatConfig",
    "ChatMode",
    "DataConfig",
    "DataError",
    "LongConfig",
    "Prepared",
    "StepBatch",
    "Stream",
    "Tokenizer",
    "TooLong",
    "baselines",
    "chat",
    "contexts",
    "heldout",
    "load_tokenizer",
    "prepare",
    "recall",
    "sft",
    "stream",
    "validate",
]
