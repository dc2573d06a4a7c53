"""The worked example of docs/chat.md is what the code does."""

import json
import re
from pathlib import Path

from data.chat import ChatMode, normal, parse, render
from data.chat.openai import conversation

PAGE = (Path(__file__).parents[3] / "docs" / "chat.md").read_text()


def block(name: str) -> str:
    return re.search(rf"<!-- example: {name}.*?-->\n```\w*\n(.*?)\n```", PAGE, re.DOTALL)[1]


def test_the_example_is_rendered_as_the_page_says(tokenizer):
    meant = conversation(json.loads(block("input")))
    rendered = render(meant, mode=ChatMode.thinking)
    written, target = "", False
    for piece in rendered.pieces:
        if piece.target != target:
            written += "‹" if piece.target else "›"
            target = piece.target
        written += piece.text
    written += "›" if target else ""
    assert written == re.sub(r"(\[end_of_msg\]›?)\n", r"\1", block("rendered"))
    ids, _ = rendered.encode(tokenizer)
    assert parse(ids, tokenizer, mode=ChatMode.thinking) == normal(meant, ChatMode.thinking)
