"""The exact inverse of `render`, and the reading of what a model generated. What does not follow the template is refused where it
first departs from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from data.chat import options
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
    check,
    dumps,
    loads,
)
from data.chat.reader import Reader, from_ids, from_pieces
from data.chat.render import Piece, first_channel, json_type
from data.config import ChatMode
from data.tokenizer import CLOSE, END_OF_MESSAGE, OPEN, Tokenizer

_TYPES = ("string", "number", "boolean", "object", "array", "null")
_PREFIX = "the generation prefix"


@dataclass
class Completion:
    """A generated answer: the channels that were read whole and, where it broke the template, the error."""

    think: str | None = None
    response: str | None = None
    calls: list[Call] = field(default_factory=list)
    error: Malformed | None = None

    @property
    def message(self) -> Assistant | None:
        """The answer as a message of the history; None where it is malformed."""
        return Assistant(self.think, self.response, tuple(self.calls)) if self.error is None else None


def parse(ids: Sequence[int], tokenizer: Tokenizer, *, mode: ChatMode, generation: bool = False) -> Conversation:
    """The conversation whose rendering has these ids; `generation`: they end in the generation prefix.

    `parse(render(c, mode=m).encode(tokenizer)[0], tokenizer, mode=m) == normal(c, m)`. Raises Malformed, its position a token's
    index.
    """
    return _conversation(from_ids(ids, tokenizer), mode, generation)


def parse_pieces(pieces: Iterable[Piece], *, mode: ChatMode, generation: bool = False) -> Conversation:
    """As `parse`, from pieces; the position of Malformed is a character's index in `Rendered.text`."""
    return _conversation(from_pieces(pieces), mode, generation)


def parse_completion(ids: Sequence[int], tokenizer: Tokenizer, *, mode: ChatMode) -> Completion:
    """Reads what was generated after the generation prefix, [end_of_msg] included. Never raises for any ids.

    JSON arguments may have any spacing here; a JSON block in place of arguments is malformed.
    """
    out = Completion()
    reader = from_ids(ids, tokenizer)
    try:
        _channels(reader, mode, out, generated=True)
        if not reader.ended:
            reader.fail(f"nothing after {END_OF_MESSAGE}")
    except Malformed as error:
        out.error = error
    return out


def _conversation(reader: Reader, mode: ChatMode, generation: bool) -> Conversation:
    found: list[tuple[int, Message | options.Option]] = []
    prefix = None
    while not reader.ended and prefix is None:
        at = reader.position
        one = _message(reader, mode, generation)
        if one is None:
            prefix = at
        else:
            found.append((at, one))
    if generation and prefix is None:
        reader.fail(_PREFIX)
    tools: tuple[Tool, ...] = ()
    effort = None
    if found and isinstance(found[0][1], DeclareTools):
        tools = found.pop(0)[1].tools  # type: ignore[union-attr]
    if found and isinstance(found[0][1], Effort):
        effort = found.pop(0)[1]
    choice, form = _one_shot(reader, found, answered=not generation)
    for at, one in found:
        if isinstance(one, Effort | ToolChoice | ResponseFormat):
            where = (
                "at the beginning, after the tools" if isinstance(one, Effort) else "before the answer it is for, once, in order"
            )
            reader.fail(f"no {options.KINDS[type(one)]} message here (its place is {where})", at, "one")
    out = Conversation(tuple(one for _, one in found), tools, effort, choice, form)  # type: ignore[arg-type, misc]
    try:
        check(out, mode, generation=generation)
    except ChatError as problem:
        at = reader.position if problem.message is None else found[problem.message][0]
        reader.fail("a conversation that the template allows", at, str(problem))
    return out


def _one_shot(
    reader: Reader, found: list[tuple[int, Message | options.Option]], answered: bool
) -> tuple[ToolChoice | None, ResponseFormat | None]:
    """Takes the one-shot options out of their place: the end, or before an answer that is the end."""
    stop = len(found)
    if answered and found and isinstance(found[-1][1], Assistant):
        stop -= 1
    choice, form = None, None
    if stop and isinstance(one := found[stop - 1][1], ResponseFormat):
        form = one
        del found[stop - 1]
        stop -= 1
    if stop and isinstance(one := found[stop - 1][1], ToolChoice):
        choice = one
        del found[stop - 1]
    return choice, form


def _message(reader: Reader, mode: ChatMode, generation: bool) -> Message | options.Option | None:
    """The next message; None where it is the generation prefix."""
    at = reader.position
    attributes = reader.open("message")
    names = tuple(attributes)
    role = attributes.get("role")
    if role == "assistant" and names == ("role",):
        out = Completion()
        reader.open(first_channel(mode))
        if generation and reader.ended:
            return None
        _channels(reader, mode, out, generated=False)
        return Assistant(out.think, out.response, tuple(out.calls))
    begin = reader.position
    text = reader.text()
    reader.close("message")
    reader.structure(END_OF_MESSAGE)
    if names == ("role",) and role in ("system", "user"):
        return System(text) if role == "system" else User(text)
    if names == ("role", "type") and role == "system" and attributes["type"] in options.KINDS.values():
        try:
            return options.read(attributes["type"], text)
        except ValueError as problem:
            reader.fail(str(problem), begin, repr(text[:80]))
    if names == ("role", "tool", "index") and role == "tool":
        return ToolResult(attributes["tool"], _number(reader, attributes["index"], at), text)
    reader.fail("the header of a system, user, assistant, tool or option message", at, reader.shown("message", attributes))


def _number(reader: Reader, text: str, at: int) -> int:
    if not (text.isascii() and text.isdigit() and text[0] != "0" and len(text) < 10):
        reader.fail("an index from 1", at, repr(text))
    return int(text)


def _channels(reader: Reader, mode: ChatMode, out: Completion, *, generated: bool) -> None:
    """The rest of an assistant message after the opening of its first channel, into `out`."""
    first = first_channel(mode)
    text = reader.text()
    reader.close(first)
    if first == "think":
        out.think, following = text, ["response", "tools"]
    else:
        out.response, following = text, ["tools"]
    while reader.at(OPEN):
        begin = reader.position
        tag, attributes = reader.element()
        if tag not in following or attributes:
            allowed = [f"{OPEN}{t}" for t in following]
            reader.fail(" or ".join([*allowed, f"{CLOSE}message"]), begin, OPEN + reader.shown(tag, attributes))
        following = following[following.index(tag) + 1 :]
        if tag == "response":
            text = reader.text()
            reader.close("response")
            out.response = text
        else:
            calls = [_call(reader, 1, generated)]
            while reader.at(OPEN):
                calls.append(_call(reader, len(calls) + 1, generated))
            reader.close("tools")
            out.calls = calls
    reader.close("message")
    reader.structure(END_OF_MESSAGE)


def _call(reader: Reader, index: int, generated: bool) -> Call:
    at = reader.position
    attributes = reader.open("call", ("tool", "index"))
    if attributes["index"] != str(index):
        reader.fail(f'index="{index}"', at, f'index="{attributes["index"]}"')
    arguments: dict[str, object] = {}
    block = None
    while reader.at(OPEN) and block is None:
        begin = reader.position
        tag, header = reader.element()
        if tag == "json" and not header and not arguments and not generated:
            block = JsonBlock(reader.text())
            reader.close("json")
            continue
        if tag != "argument" or tuple(header) != ("key", "type") or header["type"] not in _TYPES or header["key"] in arguments:
            reader.fail(f"an argument with a new key and a type of {', '.join(_TYPES)}", begin, OPEN + reader.shown(tag, header))
        value = reader.position
        text = reader.text()
        reader.close("argument")
        arguments[header["key"]] = text if header["type"] == "string" else _value(reader, header["type"], text, value, generated)
    reader.close("call")
    return Call(attributes["tool"], arguments if block is None else block)


def _value(reader: Reader, kind: str, text: str, at: int, generated: bool) -> object:
    try:
        value = loads(text)
        written = dumps(value)
    except (ValueError, RecursionError) as problem:
        reader.fail(f"JSON of type {kind}", at, f"{text[:40]!r} ({problem})")
    if json_type(value) != kind:
        reader.fail(f"JSON of type {kind}", at, json_type(value))
    if written != text and not generated:
        reader.fail("compact JSON", at, repr(text[:40]))
    return value
