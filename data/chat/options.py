"""The wording of option messages, in this one place: short instructions in natural language, none with a syntax of its own.

The report discloses the kinds of options, not their words. Each writer has its exact inverse.
"""

from __future__ import annotations

from typing import Any

from data.chat.messages import DeclareTools, Effort, ResponseFormat, Tool, ToolChoice, dumps, loads

Option = DeclareTools | Effort | ToolChoice | ResponseFormat
KINDS = {DeclareTools: "tool-declare", Effort: "thinking-effort", ToolChoice: "tool-choice", ResponseFormat: "response-format"}

_TOOLS = "You can call these tools, described in JSON:"
_EFFORT = {
    Effort.low: "Think briefly: your thinking effort is low.",
    Effort.medium: "Think as far as the task needs: your thinking effort is medium.",
    Effort.high: "Think thoroughly: your thinking effort is high.",
    Effort.max: "Think as long as it helps: your thinking effort is max.",
}
_CHOICE = {
    ToolChoice("auto"): "Call tools where they help.",
    ToolChoice("none"): "Answer without calling a tool.",
    ToolChoice("required"): "Call at least one tool.",
}
_NAMED = "Call this tool: "
_FORMAT = {"text": "Respond in plain text.", "json": "Respond with one JSON object."}
_SCHEMA = "Respond with one JSON value that fits this schema: "


def write(option: Option) -> str:
    """The text of an option message."""
    if isinstance(option, DeclareTools):
        return "\n".join([_TOOLS, *map(_tool, option.tools)])
    if isinstance(option, Effort):
        return _EFFORT[option]
    if isinstance(option, ToolChoice):
        return _NAMED + option.tool if option.rule == "tool" else _CHOICE[option]
    return _SCHEMA + dumps(option.schema) if option.kind == "schema" else _FORMAT[option.kind]


def read(kind: str, text: str) -> Option:
    """The option that `write` gives `text` for. Raises ValueError, which says what was expected, for any other text."""
    option = _READERS[kind](text)
    if option is None or write(option) != text:
        raise ValueError(f"the wording of a {kind} message")
    return option


def _tool(tool: Tool) -> str:
    described: dict[str, Any] = {"name": tool.name}
    if tool.description:
        described["description"] = tool.description
    if tool.parameters is not None:
        described["parameters"] = tool.parameters
    return dumps(described)


def _read_tools(text: str) -> DeclareTools | None:
    tools = []
    for line in text.split("\n")[1:]:
        try:
            described = loads(line)
        except ValueError:
            return None
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            return None
        if not isinstance(described.get("description", ""), str) or not isinstance(described.get("parameters", {}), dict):
            return None
        tools.append(Tool(described["name"], described.get("description", ""), described.get("parameters")))
    return DeclareTools(tuple(tools)) if tools else None


def _read_effort(text: str) -> Effort | None:
    return next((effort for effort, words in _EFFORT.items() if words == text), None)


def _read_choice(text: str) -> ToolChoice | None:
    if text.startswith(_NAMED) and text != _NAMED:
        return ToolChoice("tool", text.removeprefix(_NAMED))
    return next((choice for choice, words in _CHOICE.items() if words == text), None)


def _read_format(text: str) -> ResponseFormat | None:
    if text == _FORMAT["text"]:
        return ResponseFormat("text")
    if text == _FORMAT["json"]:
        return ResponseFormat("json")
    if not text.startswith(_SCHEMA):
        return None
    try:
        schema = loads(text.removeprefix(_SCHEMA))
    except ValueError:
        return None
    return ResponseFormat("schema", schema) if isinstance(schema, dict) else None


_READERS: dict[str, Any] = {
    "tool-declare": _read_tools,
    "thinking-effort": _read_effort,
    "tool-choice": _read_choice,
    "response-format": _read_format,
}
