"""Rendering and parsing are exact inverses, whatever the text; structure and targets are where the template says."""

import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from data.chat import (
    Assistant,
    Call,
    ChatError,
    Conversation,
    DeclareTools,
    Effort,
    JsonBlock,
    Malformed,
    ResponseFormat,
    System,
    Tool,
    ToolChoice,
    ToolResult,
    User,
    normal,
    parse,
    parse_completion,
    parse_pieces,
    render,
)  # fmt: skip
from data.tokenizer import STRUCTURE
from tests.data.chat.conftest import INSTRUCT, THINKING, conversations

both = pytest.mark.parametrize("mode", [THINKING, INSTRUCT], ids=lambda m: m.value)
quick = hypothesis.settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)


def same(a, b) -> bool:
    """Equality that tells 1, 1.0 and True apart."""
    return repr(a) == repr(b)


@both
@hypothesis.given(data=st.data())
@quick
def test_what_is_rendered_is_parsed_exactly(mode, tokenizer, data):
    conversation = data.draw(conversations(mode))
    rendered = render(conversation, mode=mode)
    ids, targets = rendered.encode(tokenizer)
    assert same(parse(ids, tokenizer, mode=mode), normal(conversation, mode))
    assert same(parse_pieces(rendered.pieces, mode=mode), normal(conversation, mode))
    again, _ = render(parse(ids, tokenizer, mode=mode), mode=mode).encode(tokenizer)
    assert np.array_equal(again, ids) and tokenizer.decode(ids) == rendered.text and len(ids) == len(targets)
    structure = [p.text for p in rendered.pieces if p.structure]
    spellings = tokenizer.structure().spellings()
    assert [spellings[i] for i in ids.tolist() if i in spellings] == structure  # none came from text


@both
@hypothesis.given(data=st.data())
@quick
def test_a_context_for_generation_ends_in_its_prefix_and_is_parsed(mode, tokenizer, data):
    conversation = data.draw(conversations(mode))
    if conversation.messages and isinstance(conversation.messages[-1], Assistant):
        with pytest.raises(ChatError):
            render(conversation, mode=mode, generation=True)
        return
    rendered = render(conversation, mode=mode, generation=True)
    first = "think" if mode is THINKING else "response"
    assert rendered.text.endswith(f'[open]message role="assistant"[sep][open]{first}[sep]')
    ids, _ = rendered.encode(tokenizer)
    assert same(parse(ids, tokenizer, mode=mode, generation=True), normal(conversation, mode))
    with pytest.raises(Malformed):
        parse(ids, tokenizer, mode=mode)
    with pytest.raises(Malformed, match=r"generation prefix|the end"):
        parse(ids[: len(render(conversation, mode=mode).encode(tokenizer)[0])], tokenizer, mode=mode, generation=True)


@both
@hypothesis.given(data=st.data())
@quick
def test_targets_are_what_the_assistant_writes_after_the_prefix(mode, tokenizer, data):
    """A prompt's rendering for generation and the answer's targets are the whole, cut in two."""
    conversation = data.draw(conversations(mode))
    if not conversation.messages or not isinstance(conversation.messages[-1], Assistant):
        return
    answer = conversation.messages[-1]
    asked = Conversation(
        conversation.messages[:-1], *(getattr(conversation, n) for n in ("tools", "effort", "tool_choice", "response_format"))
    )
    try:
        prompt, seen = render(asked, mode=mode, generation=True).encode(tokenizer)
    except ChatError:  # an assistant's message before this one
        return
    ids, targets = render(conversation, mode=mode).encode(tokenizer)
    assert np.array_equal(ids[: len(prompt)], prompt) and np.array_equal(targets[: len(prompt)], seen)
    wrote = targets[len(prompt) :]
    if any(isinstance(c.arguments, JsonBlock) for c in answer.calls):
        assert not wrote.all() and wrote[-1]
        assert parse_completion(ids[len(prompt) :], tokenizer, mode=mode).error is not None
    else:
        assert wrote.all()
        read = parse_completion(ids[len(prompt) :], tokenizer, mode=mode)
        assert read.error is None and same(read.message, normal(conversation, mode).messages[-1])


TOOLS = (Tool("add", "Adds.", {"type": "object"}),)
FULL = Conversation(
    (
        System("Be brief."),
        User("12 + 30, and 1 + 1?"),
        Assistant("Two sums.", None, (Call("add", {"a": 12, "b": "30"}), Call("add", {"all": [1, 1]}))),
        ToolResult("add", 1, "42"),
        ToolResult("add", 2, "2"),
        DeclareTools((Tool("mul"),)),
        User("So?"),
        Assistant(None, "42 and 2."),
    ),
    TOOLS, Effort.low, ToolChoice("none"), ResponseFormat("text"),
)  # fmt: skip


def test_the_order_of_a_context():
    text = render(FULL, mode=THINKING).text
    parts = [
        "tool-declare",
        "thinking-effort",
        "Be brief.",
        "12 + 30",
        "Two sums.",
        '"tool" tool="add" index="1"',
        '"2"[sep]2[close]',
    ]
    parts += ['"name":"mul"', "So?", "tool-choice", "response-format", 'role="assistant"[sep][open]think[sep][close]think']
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    unanswered = Conversation(FULL.messages[:-1], FULL.tools, FULL.effort, FULL.tool_choice, FULL.response_format)
    prompt = render(unanswered, mode=THINKING, generation=True).text
    assert text.startswith(prompt)


def test_targets_written_out():
    rendered = render(FULL, mode=THINKING)
    wrote = "".join(p.text if p.target else "|" for p in rendered.pieces)
    first, second = [part for part in re.sub(r"\|+", "|", wrote).split("|") if part]
    assert second == "[close]think[sep][open]response[sep]42 and 2.[close]response[sep][close]message[sep][end_of_msg]"
    assert first == (
        'Two sums.[close]think[sep][open]tools[sep][open]call tool="add" index="1"[sep]'
        '[open]argument key="a" type="number"[sep]12'
        '[close]argument[sep][open]argument key="b" type="string"[sep]30[close]argument[sep][close]call[sep]'
        '[open]call tool="add" index="2"[sep][open]argument key="all" type="array"[sep][1,1][close]argument[sep][close]call[sep]'
        "[close]tools[sep][close]message[sep][end_of_msg]"
    )


def test_instruct_drops_reasoning_and_always_responds():
    conversation = Conversation((User("q"), Assistant("hidden", None, (Call("f", {}),)), ToolResult("f", 1, "r")))
    text = render(conversation, mode=INSTRUCT).text
    assert "hidden" not in text and "[open]response[sep][close]response[sep][open]tools" in text


def test_a_json_block_is_masked_with_its_tags():
    pieces = render(Conversation((User("q"), Assistant("", "", (Call("f", JsonBlock("[1]")),)))), mode=THINKING).pieces
    hidden = "".join(p.text for p in pieces if not p.target)
    assert hidden.endswith("[open]json[sep][1][close]json[sep]")


@pytest.mark.parametrize(
    ("conversation", "says"),
    [
        (Conversation((User("a"), ToolResult("f", 1, ""))), r"messages\[1\].*no call waits"),
        (Conversation((Assistant(calls=(Call("f", {}), Call("g", {}))), ToolResult("g", 2, ""))),
         r"messages\[1\].*the result of f with index 1"),
        (Conversation((Assistant(calls=(Call("f", {}),)), ToolResult("f", 2, ""))), r"messages\[1\]"),
        (Conversation((Assistant(calls=(Call("f", {}),)), User("x"))), r"messages\[1\].*before the result of f"),
        (Conversation((User("\ud800"),)), r"messages\[0\].*surrogate"),
        (Conversation((User(""), Assistant(calls=(Call("f", {"\udc00": 1}),)))), r"messages\[1\].*surrogate"),
        (Conversation((Assistant(calls=(Call("f", {"a": float("inf")}),)),)), "not JSON"),
        (Conversation((Assistant(calls=(Call("f", {"a": (1,)}),)),)), "not JSON"),
        (Conversation((Assistant(calls=(Call("f", {"a": {1: 1}}),)),)), "not JSON"),
        (Conversation((Assistant(calls=(Call("f", JsonBlock("{")),)),)), r"messages\[0\].*not JSON"),
        (Conversation((DeclareTools(TOOLS),)), r"messages\[0\].*`tools`"),
        (Conversation((User(""), DeclareTools(()))), r"messages\[1\].*no tool"),
    ],
)  # fmt: skip
def test_conversations_against_the_rules_are_refused(conversation, says):
    with pytest.raises(ChatError, match=says):
        render(conversation, mode=THINKING)


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ChatError, match=r"effort=low.*instruct"):
        render(Conversation((User(""),), effort=Effort.low), mode=INSTRUCT)
    for make in lambda: ToolChoice("tool"), lambda: ToolChoice("auto", "f"), lambda: ResponseFormat("schema"):
        with pytest.raises(ChatError):
            make()
    waiting = Conversation((Assistant(calls=(Call("f", {}),)),))
    with pytest.raises(ChatError, match="before the result of f"):
        render(waiting, mode=THINKING, generation=True)


def ids_of(tokenizer, text):
    """Ids of a text in which structure is spelt."""
    spellings = {s: i for i, s in tokenizer.structure().spellings().items()}
    parts = re.split("(" + "|".join(map(re.escape, STRUCTURE)) + ")", text)
    return [i for part in parts for i in ([spellings[part]] if part in spellings else tokenizer.encode(part))]


USER = '[open]message role="user"[sep]hi[close]message[sep][end_of_msg]'
BEGIN = '[open]message role="assistant"[sep][open]think[sep]'
END = "[close]message[sep][end_of_msg]"
CALLED = '[open]call tool="f" index="1"[sep]'
CALL = BEGIN + "[close]think[sep][open]tools[sep]"
ARGUMENT = CALL + CALLED + '[open]argument key="a"'


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        ("", "hello", r"\[open\]"),
        (USER, "hello" + USER, r"\[open\]"),
        ("[open]", 'message  role="user"[sep]', "tag key"),
        ("[open]", 'message role="us&er"[sep]', "&amp;"),
        ("[open]", 'message role="user" role="user"[sep]', "distinct"),
        ("", '[open]message role="owner"[sep]hi' + END, "header"),
        ("", '[open]message role="user" type="tool-choice"[sep]hi' + END, "header"),
        ('[open]message role="system" type="thinking-effort"[sep]', "Think!" + END, "wording of a thinking-effort"),
        ("[open]message role=\"user\"[sep]hi[close]", "messages[sep][end_of_msg]", "message to be closed"),
        ('[open]message role="user"[sep]hi[close]message[sep]', USER, r"\[end_of_msg\]"),
        ('[open]message role="user"[sep]hi', "", r"\[close\], found the end"),
        ('[open]message role="assistant"[sep]', "[open]response[sep]", "think"),
        (BEGIN + "[close]think[sep][open]response[sep]b[close]response[sep]", "[open]response[sep]",
         r"\[open\]tools or \[close\]message"),
        (BEGIN + "a[close]think[sep]", "[open]think[sep]", r"\[open\]response or"),
        (CALL, "[close]tools[sep]", r"\[open\]"),
        (CALL, '[open]call tool="f" index="2"[sep]', 'index="1"'),
        (CALL + '[open]call tool="f" index="1"[sep]', '[open]argument key="a" type="integer"[sep]', "an argument"),
        (ARGUMENT + ' type="number"[sep]', '"x"[close]argument[sep]', "JSON of type number"),
        (ARGUMENT + ' type="array"[sep]', "[1, 2][close]argument[sep]", "compact"),
        (ARGUMENT + ' type="object"[sep]', '{"a":1,"a":2}[close]argument[sep]', "twice"),
        (ARGUMENT + ' type="number"[sep]', "NaN[close]argument[sep]", "not JSON"),
        (ARGUMENT + ' type="array"[sep]', "[" * 100000 + "[close]argument[sep]", "JSON"),
        (USER, '[open]message role="tool" tool="f" index="1"[sep]' + END, "no call waits"),
        ("", '[open]message role="tool" tool="f" index="01"[sep]' + END, "an index from 1"),
        (USER, '[open]message role="system" type="thinking-effort"[sep]Think briefly: your thinking effort is low.' + END,
         "no thinking-effort"),
        ("", '[open]message role="system" type="tool-choice"[sep]Call at least one tool.' + END + USER, "no tool-choice"),
    ],
)  # fmt: skip
def test_malformed_input_is_refused_where_it_goes_wrong(tokenizer, good, bad, expected):
    with pytest.raises(Malformed, match=expected) as caught:
        parse(ids_of(tokenizer, good + bad), tokenizer, mode=THINKING)
    at = len(ids_of(tokenizer, good))
    assert at <= caught.value.position <= at + 1 and f"token {caught.value.position}: expected" in str(caught.value)


def test_ids_that_are_no_text_are_refused_at_their_place(tokenizer):
    ids = ids_of(tokenizer, USER)
    with pytest.raises(Malformed, match=r"token 2: .*<\|endoftext\|>"):
        parse([*ids[:2], tokenizer.eos, *ids[2:]], tokenizer, mode=THINKING)
    with pytest.raises(Malformed, match=r"token 3: .*id 999, which"):
        parse([*ids[:3], 999, *ids[3:]], tokenizer, mode=THINKING)


def test_pieces_give_the_place_in_characters():
    pieces = render(Conversation((User("hi"),)), mode=THINKING).pieces
    with pytest.raises(
        Malformed, match=f"character {len('[open]message role=.user.[sep]hi[close]message[sep]')}: expected .end_of_msg."
    ):
        parse_pieces(pieces[:-1], mode=THINKING)


@hypothesis.given(ids=st.lists(st.integers(0, 340) | st.integers(0, 4), max_size=40))
@quick
def test_any_completion_is_read_or_refused_without_a_crash(tokenizer, ids):
    read = parse_completion(ids, tokenizer, mode=THINKING)
    assert (read.message is None) == (read.error is not None) and (read.error is None or 0 <= read.error.position <= len(ids))


def test_a_completion_keeps_the_channels_that_were_whole(tokenizer):
    text = "so[close]think[sep][open]response[sep]42[close]response[sep]"
    whole = parse_completion(ids_of(tokenizer, text + END), tokenizer, mode=THINKING)
    assert whole.message == Assistant("so", "42")
    cut = parse_completion(ids_of(tokenizer, text), tokenizer, mode=THINKING)
    assert (cut.think, cut.response, cut.message) == ("so", "42", None) and cut.error.position == len(ids_of(tokenizer, text))
    more = parse_completion(ids_of(tokenizer, text + END + "x"), tokenizer, mode=THINKING)
    assert "nothing after" in str(more.error)
    spaced = "[close]think[sep][open]tools[sep]" + CALLED + '[open]argument key="a" type="array"[sep][1, 2][close]argument[sep]'
    spaced += "[close]call[sep][close]tools[sep]" + END
    assert parse_completion(ids_of(tokenizer, spaced), tokenizer, mode=THINKING).calls == [Call("f", {"a": [1, 2]})]
