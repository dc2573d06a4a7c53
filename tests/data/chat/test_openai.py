"""Messages as people have them become conversations; what is not understood is refused by name."""

import pytest

from data.chat import (
    Assistant,
    Call,
    ChatError,
    ChatMode,
    Conversation,
    DeclareTools,
    Effort,
    JsonBlock,
    ResponseFormat,
    System,
    Tool,
    ToolChoice,
    ToolResult,
    User,
    render,
)  # fmt: skip
from data.chat.openai import conversation


def call(name, arguments, id=None):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_everything_is_taken():
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "reasoning_content": "r",
             "tool_calls": [call("f", '{"a": 1.5, "b": [1]}', "x"), {"name": "g", "arguments": {"c": "d"}}, call("h", "[1, 2]")]},
            {"role": "tool", "content": "second", "tool_call_id": None, "name": "f"},
            {"role": "tool", "content": "third", "name": "g"},
            {"role": "tool", "content": "fourth"},
            {"role": "system", "tools": [{"name": "late"}]},
            {"role": "assistant", "content": "a", "thinking": "t"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}],
        "options": {"thinking_effort": "max", "tool_choice": {"type": "function", "function": {"name": "f"}},
                    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array"}}}},
        "metadata": {"anything": 1},
    }  # fmt: skip
    assert conversation(row) == Conversation(
        (
            System("Be brief."),
            User("q"),
            Assistant("r", None, (Call("f", {"a": 1.5, "b": [1]}), Call("g", {"c": "d"}), Call("h", JsonBlock("[1, 2]")))),
            ToolResult("f", 1, "second"),
            ToolResult("g", 2, "third"),
            ToolResult("h", 3, "fourth"),
            DeclareTools((Tool("late"),)),
            Assistant("t", "a"),
        ),
        (Tool("f", "F.", {"type": "object"}),),
        Effort.max,
        ToolChoice("tool", "f"),
        ResponseFormat("schema", {"type": "array"}),
    )
    render(conversation(row), mode=ChatMode.thinking)


def test_results_are_put_into_the_order_of_the_calls():
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call("f", "{}", "1"), call("g", "{}", "2")]},
        {"role": "tool", "content": "of g", "tool_call_id": "2"},
        {"role": "tool", "content": "of f", "tool_call_id": "1"},
    ]
    assert conversation({"messages": messages}).messages[1:] == (ToolResult("f", 1, "of f"), ToolResult("g", 2, "of g"))


ASKED = {"role": "assistant", "content": "", "tool_calls": [call("f", "{}", "1")]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([], "must be an object, not list"),
        ({}, 'no "messages"'),
        ({"messages": []}, 'no "messages"'),
        ({"messages": [{"role": "user", "content": "a"}], "id": 3},
         r"field 'id' that is not known; remove it, or move it into \"metadata\""),
        ({"messages": [{"role": "developer", "content": "a"}]}, r"messages\[0\]: role 'developer'.*system, user"),
        ({"messages": ["hello"]}, r"messages\[0\]: role None"),
        ({"messages": [{"role": "user", "content": "a", "weight": 0}]}, r"messages\[0\]: this user message has a field 'weight'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\[0\]: \"content\" must be text, not list"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"messages\[0\]: has neither"),
        ({"messages": [{"role": "assistant", "content": "", "thinking": "", "reasoning_content": ""}]}, "keep one"),
        ({"messages": [{"role": "tool", "content": ""}]}, r"messages\[0\]: no call waits"),
        ({"messages": [ASKED, {"role": "tool", "content": "", "tool_call_id": "9"}]}, r"messages\[1\]: tool_call_id '9'"),
        ({"messages": [ASKED, {"role": "tool", "content": "", "name": "g"}]}, r"messages\[1\]: name 'g': the call was to 'f'"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [call("f", 3)]}]}, '"arguments"'),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"type": "retrieval"}]}]}, 'only "function"'),
        ({"messages": [ASKED], "options": {"effort": "low"}}, "field 'effort'.*known: thinking_effort"),
        ({"messages": [ASKED], "options": {"thinking_effort": "huge"}}, "'huge': must be one of low, medium, high, max"),
        ({"messages": [ASKED], "options": {"response_format": {"type": "yaml"}}}, "'yaml'"),
        ({"messages": [ASKED], "tools": [{"name": "f", "strict": True}]}, "field 'strict'"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(row, says):
    with pytest.raises(ChatError, match=says):
        conversation(row)
