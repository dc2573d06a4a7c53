"""A conversation as structure tokens and text.

Structure never comes from text: the pieces between two structure tokens are encoded each by itself, so no merge of the tokenizer
crosses structure, and text that spells a structure token stays text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.chat import options
from data.chat.messages import (
    Assistant,
    Call,
    Conversation,
    DeclareTools,
    JsonBlock,
    Message,
    System,
    ToolResult,
    User,
    check,
    dumps,
    normal,
)
from data.config import ChatMode
from data.tokenizer import CLOSE, END_OF_MESSAGE, OPEN, SEP, Tokenizer, grouped

_AT_ONCE = 1 << 22  # characters that are encoded at once


@dataclass(frozen=True)
class Piece:
    """A structure token, spelt out, or a text that is not empty. `target`: the assistant is trained to write it."""

    text: str
    structure: bool
    target: bool


@dataclass(frozen=True)
class Rendered:
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """For the eye: structure tokens spelt out."""
        return "".join(piece.text for piece in self.pieces)

    def encode(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """(ids [T] int64, targets [T] bool). Raises DataError where the tokenizer has no structure tokens."""
        return next(encode([self], tokenizer))


def render(conversation: Conversation, *, mode: ChatMode, generation: bool = False) -> Rendered:
    """The whole context: global options, messages, one-shot options and, for `generation`, the generation prefix.

    The one-shot options stand before the last message where that is the assistant's: the answer they were meant for.
    Targets are what the assistant writes itself: not its message's and first channel's opening, which the prefix gives.
    Raises ChatError for a conversation that breaks the template's rules.
    """
    check(conversation, mode, generation=generation)
    conversation = normal(conversation, mode)
    out = _Writer()
    if conversation.tools:
        _option(out, DeclareTools(conversation.tools))
    if conversation.effort is not None:
        _option(out, conversation.effort)
    answered = bool(conversation.messages) and isinstance(conversation.messages[-1], Assistant)
    history = conversation.messages[:-1] if answered else conversation.messages
    for message in history:
        _message(out, message, mode)
    for option in conversation.tool_choice, conversation.response_format:
        if option is not None:
            _option(out, option)
    if answered:
        _message(out, conversation.messages[-1], mode)
    if generation:
        _prefix(out, mode)
    return Rendered(tuple(out.pieces))


def encode(rendered: Iterable[Rendered], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids [T] int64, targets [T] bool) of each; all processors work on them at once."""
    structure = {text: np.array([i]) for i, text in tokenizer.structure().spellings().items()}
    for group in grouped(rendered, lambda r: sum(len(p.text) for p in r.pieces), _AT_ONCE):
        texts = list(dict.fromkeys(p.text for r in group for p in r.pieces if not p.structure))  # headers come again and again
        ids = dict(zip(texts, tokenizer.encode_texts(texts)))
        for r in group:
            parts = [structure[p.text] if p.structure else ids[p.text] for p in r.pieces]
            lengths = [len(part) for part in parts]
            whole = np.concatenate([np.zeros(0, np.int64), *parts])
            yield whole, np.repeat(np.array([p.target for p in r.pieces], dtype=bool), lengths)


def header(tag: str, attributes: Mapping[str, str]) -> str:
    """`tag key="value"`; inside a value & and " are written &amp; and &quot;, everything else as it is."""
    return tag + "".join(f' {k}="{v.replace("&", "&amp;").replace(chr(34), "&quot;")}"' for k, v in attributes.items())


def json_type(value: Any) -> str:
    """The type that an argument's header names."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number" if isinstance(value, int | float) else _nested(value)


def _nested(value: Any) -> str:
    return "array" if isinstance(value, list) else "object"


class _Writer:
    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def structure(self, token: str, target: bool) -> None:
        self.pieces.append(Piece(token, True, target))

    def text(self, text: str, target: bool) -> None:
        if text:
            self.pieces.append(Piece(text, False, target))

    def open(self, tag: str, target: bool, **attributes: str) -> None:
        self.structure(OPEN, target)
        self.text(header(tag, attributes), target)
        self.structure(SEP, target)

    def close(self, tag: str, target: bool) -> None:
        self.structure(CLOSE, target)
        self.text(tag, target)
        self.structure(SEP, target)


def _option(out: _Writer, option: options.Option) -> None:
    _plain(out, options.write(option), role="system", type=options.KINDS[type(option)])


def _message(out: _Writer, message: Message, mode: ChatMode) -> None:
    if isinstance(message, DeclareTools):
        _option(out, message)
    elif isinstance(message, System):
        _plain(out, message.text, role="system")
    elif isinstance(message, User):
        _plain(out, message.text, role="user")
    elif isinstance(message, ToolResult):
        _plain(out, message.text, role="tool", tool=message.tool, index=str(message.index))
    else:
        _assistant(out, message, mode)


def _plain(out: _Writer, text: str, **attributes: str) -> None:
    out.open("message", False, **attributes)
    out.text(text, False)
    out.close("message", False)
    out.structure(END_OF_MESSAGE, False)


def first_channel(mode: ChatMode) -> str:
    """The channel that the generation prefix opens."""
    return "think" if mode is ChatMode.thinking else "response"


def _prefix(out: _Writer, mode: ChatMode) -> None:
    out.open("message", False, role="assistant")
    out.open(first_channel(mode), False)


def _assistant(out: _Writer, message: Assistant, mode: ChatMode) -> None:
    _prefix(out, mode)
    first = message.think if mode is ChatMode.thinking else message.response
    out.text(first or "", True)
    out.close(first_channel(mode), True)
    if mode is ChatMode.thinking and message.response is not None:
        out.open("response", True)
        out.text(message.response, True)
        out.close("response", True)
    if message.calls:
        out.open("tools", True)
        for index, call in enumerate(message.calls, 1):
            _call(out, call, index)
        out.close("tools", True)
    out.close("message", True)
    out.structure(END_OF_MESSAGE, True)


def _call(out: _Writer, call: Call, index: int) -> None:
    out.open("call", True, tool=call.tool, index=str(index))
    if isinstance(call.arguments, JsonBlock):
        out.open("json", False)
        out.text(call.arguments.text, False)
        out.close("json", False)
    else:
        for key, value in call.arguments.items():
            out.open("argument", True, key=key, type=json_type(value))
            out.text(value if isinstance(value, str) else dumps(value), True)
            out.close("argument", True)
    out.close("call", True)
