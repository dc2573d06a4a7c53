"""One line of chat data, as people have it (OpenAI's form of messages), to a Conversation.

Nothing is passed over: a field that is not known is an error that says what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.chat.messages import (
    Assistant,
    Call,
    ChatError,
    Conversation,
    DeclareTools,
    Effort,
    JsonBlock,
    Message,
    ResponseFormat,
    System,
    Tool,
    ToolChoice,
    ToolResult,
    User,
    loads,
)

_MESSAGE = {
    "system": ("content", "tools"),
    "user": ("content",),
    "assistant": ("content", "thinking", "reasoning_content", "tool_calls"),
    "tool": ("content", "tool_call_id", "name"),
}
_ROW = ("messages", "tools", "options", "metadata")
_OPTIONS = ("thinking_effort", "tool_choice", "response_format")


def conversation(row: Any) -> Conversation:
    """The conversation of {"messages": [...], "tools": [...], "options": {...}}; "metadata" may hold anything and is not read.

    Raises ChatError.
    """
    row = _object(row, "the line", _ROW, 'remove it, or move it into "metadata", which is not read')
    if not isinstance(row.get("messages"), list) or not row["messages"]:
        raise ChatError('has no "messages": give a list of {"role": ..., "content": ...}')
    options = _object(row.get("options") or {}, '"options"', _OPTIONS)
    messages = _Messages()
    for i, message in enumerate(row["messages"]):
        try:
            messages.add(message)
        except ChatError as problem:
            raise ChatError(str(problem), i) from None
    return Conversation(
        messages.done(),
        tuple(map(_tool, _list(row.get("tools"), '"tools"'))),
        _effort(options.get("thinking_effort")),
        _choice(options.get("tool_choice")),
        _format(options.get("response_format")),
    )


class _Messages:
    """Collects messages. Results may come in any order: they are put into that of the calls."""

    def __init__(self) -> None:
        self._out: list[Message] = []
        self._calls: list[tuple[str, str | None]] = []  # (tool, id) of the last assistant message
        self._results: dict[int, ToolResult] = {}

    def add(self, message: Any) -> None:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _MESSAGE:
            raise ChatError(f"role {role!r}: must be one of {', '.join(_MESSAGE)}")
        message = _object(message, f"this {role} message", ("role", *_MESSAGE[role]))
        if role == "tool":
            result = self._result(message)
            self._results[result.index] = result
            return
        self._flush()
        self._calls = []
        if role == "user":
            self._out.append(User(_text(message, "content")))
        elif role == "assistant":
            self._assistant(message)
        elif message.get("tools") is None:
            self._out.append(System(_text(message, "content")))
        elif message.get("content"):
            raise ChatError('has both "content" and "tools"; make two messages of it')
        else:
            self._out.append(DeclareTools(tuple(map(_tool, _list(message["tools"], '"tools"')))))

    def done(self) -> tuple[Message, ...]:
        self._flush()
        return tuple(self._out)

    def _flush(self) -> None:
        self._out += [self._results[i] for i in sorted(self._results)]
        self._results = {}

    def _assistant(self, message: Mapping[str, Any]) -> None:
        thoughts = [message[name] for name in ("thinking", "reasoning_content") if message.get(name) is not None]
        if len(thoughts) > 1:
            raise ChatError('has both "thinking" and "reasoning_content"; keep one')
        think = _string(thoughts[0], "the reasoning") if thoughts else None
        response = None if message.get("content") is None else _text(message, "content")
        made = [_call(call) for call in _list(message.get("tool_calls"), '"tool_calls"')]
        if response is None and not made:
            raise ChatError('has neither "content" nor "tool_calls"; give one, or leave the message out')
        self._calls = [(call.tool, name) for call, name in made]
        self._out.append(Assistant(think, response, tuple(call for call, _ in made)))

    def _result(self, message: Mapping[str, Any]) -> ToolResult:
        free = [i for i in range(1, len(self._calls) + 1) if i not in self._results]
        if not free:
            raise ChatError("no call waits for a result")
        index = free[0]
        if (wanted := message.get("tool_call_id")) is not None:
            index = next((i for i in free if self._calls[i - 1][1] == wanted), 0)
            if not index:
                raise ChatError(f"tool_call_id {wanted!r} is none of the calls that wait for a result")
        tool = self._calls[index - 1][0]
        if message.get("name") not in (None, tool):
            raise ChatError(f"name {message['name']!r}: the call was to {tool!r}")
        return ToolResult(tool, index, _text(message, "content"))


def _call(call: Any) -> tuple[Call, str | None]:
    call = _object(call, "a tool call", ("id", "type", "function", "name", "arguments"))
    _function_type(call)
    inner = call if "function" not in call else _object(call["function"], '"function"', ("name", "arguments"))
    arguments = inner.get("arguments")
    if not isinstance(arguments, str | dict):
        raise ChatError('"arguments" of a tool call must be an object, or JSON text as OpenAI gives it')
    split = _split(arguments) if isinstance(arguments, str) else arguments
    return Call(_string(inner.get("name"), "the name of a tool call"), split), call.get("id")


def _split(text: str) -> dict[str, Any] | JsonBlock:
    """Arguments by key where they can be; a list, a key that comes twice, or no JSON (rendering refuses it) stays a block."""
    try:
        value = loads(text)
    except ValueError:
        return JsonBlock(text)
    return value if isinstance(value, dict) else JsonBlock(text)


def _tool(tool: Any) -> Tool:
    tool = _object(tool, "a tool", ("type", "function", "name", "description", "parameters"))
    _function_type(tool)
    inner = tool if "function" not in tool else _object(tool["function"], '"function"', ("name", "description", "parameters"))
    parameters = inner.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ChatError('"parameters" of a tool must be a JSON schema, an object')
    return Tool(
        _string(inner.get("name"), "the name of a tool"), _string(inner.get("description") or "", "a description"), parameters
    )


def _function_type(value: Mapping[str, Any]) -> None:
    if value.get("type", "function") != "function":
        raise ChatError(f'type {value["type"]!r}: only "function" is known')


def _effort(value: Any) -> Effort | None:
    names = [effort.value for effort in Effort]
    if value is not None and value not in names:
        raise ChatError(f'"thinking_effort" {value!r}: must be one of {", ".join(names)}')
    return None if value is None else Effort(value)


def _choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if value in ("auto", "none", "required"):
        return ToolChoice(value)
    named = _object(value, '"tool_choice"', ("type", "function", "name"))
    _function_type(named)
    inner = named if "function" not in named else _object(named["function"], '"function"', ("name",))
    return ToolChoice("tool", _string(inner.get("name"), 'the name in "tool_choice"'))


def _format(value: Any) -> ResponseFormat | None:
    if value is None:
        return None
    value = _object(value, '"response_format"', ("type", "schema", "json_schema"))
    if value.get("type") in ("text", "json_object"):
        return ResponseFormat("text" if value["type"] == "text" else "json")
    if value.get("type") != "json_schema":
        raise ChatError(f'"response_format" of type {value.get("type")!r}: must be text, json_object or json_schema')
    inner = value if "json_schema" not in value else _object(value["json_schema"], '"json_schema"', ("name", "schema"))
    return ResponseFormat("schema", inner.get("schema"))


def _object(value: Any, what: str, known: tuple[str, ...], fix: str = "remove it") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ChatError(f"{what} must be an object, not {type(value).__name__}")
    for name in value:
        if name not in known:
            raise ChatError(f"{what} has a field {name!r} that is not known; {fix} (known: {', '.join(known)})")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ChatError(f"{what} must be a list")
    return value or []


def _text(message: Mapping[str, Any], name: str) -> str:
    if message.get(name) is None:
        raise ChatError(f'has no "{name}"')
    return _string(message[name], f'"{name}"')


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ChatError(f"{what} must be text, not {type(value).__name__}")
    return value
