"""Conversations as typed values, and what the template asks of them (report appendix F, docs/chat.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

from data.config import ChatMode
from data.errors import DataError


class ChatError(DataError):
    """A conversation that the template cannot hold. `message` is the index of the message at fault, if one is."""

    def __init__(self, text: str, message: int | None = None):
        super().__init__(text if message is None else f"messages[{message}]: {text}")
        self.message = message


class Malformed(ChatError):
    """Rendered input that does not follow the template: what was `expected` at `position`, a token's or character's index."""

    def __init__(self, position: int, unit: str, expected: str, found: str):
        super().__init__(f"{unit} {position}: expected {expected}, found {found}")
        self.position, self.expected = position, expected


class Effort(Enum):
    low = "low"
    medium = "medium"
    high = "high"
    max = "max"


@dataclass(frozen=True)
class Tool:
    """A tool as the model is told of it; `parameters` is its JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class JsonBlock:
    """Arguments that are not one JSON object with distinct keys, as JSON text.

    In a history only: never generated, never a target.
    """

    text: str


@dataclass(frozen=True)
class Call:
    """A call; its index is its place among the message's calls, from 1. `arguments`: JSON values by key."""

    tool: str
    arguments: Mapping[str, Any] | JsonBlock


@dataclass(frozen=True)
class System:
    text: str


@dataclass(frozen=True)
class User:
    text: str


@dataclass(frozen=True)
class Assistant:
    """`think` is the reasoning, `response` what the user sees; None: the channel is not there."""

    think: str | None = None
    response: str | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class ToolResult:
    """What call number `index` (from 1) of the last assistant message, to `tool`, gave."""

    tool: str
    index: int
    text: str


@dataclass(frozen=True)
class DeclareTools:
    """Tools declared in mid-conversation."""

    tools: tuple[Tool, ...]


@dataclass(frozen=True)
class ToolChoice:
    """Whether the next message shall call tools; `tool` names the one to call where the rule is "tool"."""

    rule: Literal["auto", "none", "required", "tool"]
    tool: str = ""

    def __post_init__(self) -> None:
        if self.rule not in ("auto", "none", "required", "tool") or (self.rule == "tool") != bool(self.tool):
            raise ChatError(f'tool_choice={self.rule} {self.tool}: must be auto, none, required, or "tool" with a name')


@dataclass(frozen=True)
class ResponseFormat:
    """The form of the next response; `schema` is the JSON schema where the kind is "schema"."""

    kind: Literal["text", "json", "schema"]
    schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("text", "json", "schema") or (self.kind == "schema") != isinstance(self.schema, dict):
            raise ChatError(f'response_format={self.kind}: must be text, json, or "schema" with a JSON schema')


Message = System | User | Assistant | ToolResult | DeclareTools


@dataclass(frozen=True)
class Conversation:
    """Global options, messages, and the one-shot options of the last message where that is the assistant's, else of the next."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    effort: Effort | None = None
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None


def normal(conversation: Conversation, mode: ChatMode) -> Conversation:
    """The conversation as its rendering holds it: with reasoning in every assistant message, or with none but with a response."""

    def one(message: Message) -> Message:
        if not isinstance(message, Assistant):
            return message
        if mode is ChatMode.thinking:
            return replace(message, think=message.think or "")
        return replace(message, think=None, response=message.response or "")

    return replace(conversation, messages=tuple(map(one, conversation.messages)))


def dumps(value: Any) -> str:
    """Compact JSON, characters beyond ASCII as they are. Raises ChatError for what is not JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        same = _plain(value) and json.loads(text) == value
    except (TypeError, ValueError, RecursionError) as problem:
        raise ChatError(f"a value is not JSON ({problem})") from None
    if not same:
        raise ChatError("a value is not JSON: keys must be text, sequences lists")
    return text


def loads(text: str) -> Any:
    """The value of JSON text. Raises ValueError, also for what Python accepts beyond JSON and for a key that comes twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(out := dict(items)) < len(items):
            raise ValueError("a key comes twice")
        return out

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ValueError(f"{digits} is too large")
        return value

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check(conversation: Conversation, mode: ChatMode, *, generation: bool) -> None:
    """Raises ChatError for the first rule that the conversation breaks."""
    messages = conversation.messages
    if conversation.effort is not None and mode is not ChatMode.thinking:
        raise ChatError(f"effort={conversation.effort.value}: there is no thinking in mode={mode.value}; leave it out")
    if messages and isinstance(messages[0], DeclareTools) and not conversation.tools and conversation.effort is None:
        raise ChatError("tools declared before everything else are the conversation's own `tools`", 0)
    waiting: list[tuple[str, int]] = []
    for i, message in enumerate(messages):
        _check_texts(message, i)
        if isinstance(message, ToolResult):
            if (message.tool, message.index) not in waiting[:1]:
                due = (
                    f"the result of {waiting[0][0]} with index {waiting[0][1]} comes next" if waiting else "no call waits for one"
                )
                raise ChatError(f"a result of {message.tool} with index {message.index}, but {due}", i)
            waiting.pop(0)
        elif not isinstance(message, DeclareTools):
            if waiting:
                raise ChatError(f"comes before the result of {waiting[0][0]} with index {waiting[0][1]}", i)
            if isinstance(message, Assistant):
                waiting = [(call.tool, number) for number, call in enumerate(message.calls, 1)]
    for option in conversation.tools, conversation.tool_choice, conversation.response_format:
        _check_text("".join(_texts(option)), None)
    if generation and waiting:
        raise ChatError(f"nothing can be generated before the result of {waiting[0][0]} with index {waiting[0][1]}")
    if generation and messages and isinstance(messages[-1], Assistant):
        raise ChatError("the last message is the assistant's, so there is nothing to answer", len(messages) - 1)


def _check_texts(message: Message, index: int) -> None:
    if isinstance(message, DeclareTools) and not message.tools:
        raise ChatError("declares no tool", index)
    _check_text("".join(_texts(message)), index)
    for call in message.calls if isinstance(message, Assistant) else ():
        if isinstance(call.arguments, JsonBlock):
            try:
                json.loads(call.arguments.text)  # a key may come twice here
            except (ValueError, RecursionError) as problem:
                raise ChatError(f"the arguments of {call.tool} are not JSON ({problem})", index) from None


def _check_text(text: str, index: int | None) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise ChatError(f"holds half a surrogate pair ({text[problem.start]!a}), which is not a character", index) from None


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a message or option."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _texts(getattr(value, name))


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(k) is str and _plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or type(value) in (str, int, float, bool)
