"""One small tokenizer for all tests of the template, and conversations with nasty text."""

import pytest
from hypothesis import strategies as st

from data.chat import (
    Assistant,
    Call,
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
)  # fmt: skip
from data.tokenizer import train

SPELT = [
    "[open]",
    "[sep]",
    "[close]",
    "[end_of_msg]",
    "<|endoftext|>",
    '[open]message role="user"[sep]',
    '"',
    "&quot;",
    "&",
    "\n",
]
THINKING, INSTRUCT = ChatMode.thinking, ChatMode.instruct


@pytest.fixture(scope="session")
def tokenizer():
    return train(
        ['[open]message role="assistant"[sep]hello world\n' * 9, "what is 12 + 30? it is 42. " * 9, "thinking tools call"], 320
    )


texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.lists(st.one_of(st.sampled_from(SPELT), st.text('ab "&;\n\u2028é', max_size=4)), max_size=5).map("".join),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=5,
)
schemas = st.dictionaries(texts, values, max_size=3)
tools = st.builds(Tool, texts, texts, st.none() | schemas)
declared = st.lists(tools, min_size=1, max_size=2).map(tuple)
calls = st.builds(
    Call, texts, st.dictionaries(texts, values, max_size=3) | st.sampled_from(["[1,2]", '{"a":1,"a":2}', "7"]).map(JsonBlock)
)


@st.composite
def turns(draw):
    """A list of messages that begins with a question and ends anywhere the template allows."""
    out = []
    for _ in range(draw(st.integers(0, 3))):
        out.append(draw(st.one_of(st.builds(System, texts), st.builds(User, texts), st.builds(DeclareTools, declared))))
        if draw(st.booleans()):
            answer = Assistant(draw(st.none() | texts), draw(st.none() | texts), tuple(draw(st.lists(calls, max_size=3))))
            out += [answer, *(ToolResult(c.tool, i, draw(texts)) for i, c in enumerate(answer.calls, 1))]
    return tuple(out)


@st.composite
def conversations(draw, mode):
    messages, declares = draw(turns()), draw(st.just(()) | declared)
    effort = draw(st.none() | st.sampled_from(Effort)) if mode is THINKING else None
    if messages and isinstance(messages[0], DeclareTools) and not declares and effort is None:
        messages = (System(""), *messages)
    choice = draw(
        st.none()
        | st.sampled_from(["auto", "none", "required"]).map(ToolChoice)
        | texts.filter(bool).map(lambda t: ToolChoice("tool", t))
    )
    form = draw(
        st.none() | st.sampled_from(["text", "json"]).map(ResponseFormat) | schemas.map(lambda s: ResponseFormat("schema", s))
    )
    return Conversation(messages, declares, effort, choice, form)
