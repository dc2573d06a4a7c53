"""Fine-tuning on conversations: rendered and tokenised once, packed best-fit, the assistant's own tokens as targets.

prepared = data.sft.prepare_chat(cfg.data, tokenizer)       # or from any Source of conversations
steps    = data.sft.chat_stream(cfg.data, prepared, rank=..., of=..., position=..., horizon=1 + cfg.model.mtp_layers)
fixed    = data.sft.chat_heldout(cfg.data, prepared, horizon=...)
"""

from data.sft.prepare import Conversations, PreparedChat, prepare_chat
from data.sft.source import Source, from_jsonl, made
from data.sft.stream import ChatStream, chat_heldout, chat_stream

__all__ = [
    "ChatStream",
    "Conversations",
    "PreparedChat",
    "Source",
    "chat_heldout",
    "chat_stream",
    "from_jsonl",
    "made",
    "prepare_chat",
]
