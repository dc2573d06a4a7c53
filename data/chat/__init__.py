"""The K3 chat template (report appendix F, docs/chat.md): conversations to ids and back, and what of them is a target.

rendered     = chat.render(conversation, mode=ChatMode.thinking, generation=True)
ids, targets = rendered.encode(tokenizer)
conversation = chat.parse(ids, tokenizer, mode=ChatMode.thinking, generation=True)
answer       = chat.parse_completion(generated_ids, tokenizer, mode=ChatMode.thinking)
"""

from data.chat.messages import (
    Assistant,
    Call,
    ChatError,
    Conversation,
    DeclareTools,
    Effort,
    JsonBlock,
    Malformed,
    Message,
    ResponseFormat,
    System,
    Tool,
    ToolChoice,
    ToolResult,
    User,
    normal,
)
from data.chat.parse import Completion, parse, parse_completion, parse_pieces
from data.chat.render import Piece, Rendered, encode, render
from data.config import ChatMode

__all__ = [
    "Assistant",
    "Call",
    "ChatError",
    "ChatMode",
    "Completion",
    "Conversation",
    "DeclareTools",
    "Effort",
    "JsonBlock",
    "Malformed",
    "Message",
    "Piece",
    "Rendered",
    "ResponseFormat",
    "System",
    "Tool",
    "ToolChoice",
    "ToolResult",
    "User",
    "encode",
    "normal",
    "parse",
    "parse_completion",
    "parse_pieces",
    "render",
]
