"""Conversations become files of ids and targets once; wrong lines are named, and no question is on both sides."""

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import DataError
from data.chat import Assistant, ChatMode, Conversation, User, normal, parse, render
from data.chat.openai import conversation
from data.config import ChatConfig
from data.sft import chat_heldout, chat_stream, from_jsonl, made, prepare_chat
from data.tokenizer import load_tokenizer
from tests.data.sft.conftest import rows, write


def test_the_files_hold_every_conversation_with_its_targets(cfg, prepared):
    read, tokenizer = [], prepared.tokenizer()
    for split in "train", "heldout":
        there = prepared.conversations(split)
        assert len(there) == prepared.manifest[split]["conversations"] > 0
        assert len(there.ids) == len(there.targets) == there.lengths.sum() == prepared.count(split)
        for i in range(len(there)):
            ids, targets = there.part(i, 10**9)
            one = parse(ids, tokenizer, mode=ChatMode.thinking)
            again, wanted = render(one, mode=ChatMode.thinking).encode(tokenizer)
            assert np.array_equal(ids, again) and np.array_equal(targets, wanted)
            read.append(one)
    meant = [normal(conversation(json.loads(line)), ChatMode.thinking) for line in Path(cfg.chat.path).read_text().splitlines()]
    assert sorted(map(repr, read)) == sorted(map(repr, meant))


def test_it_is_made_once_and_again_only_for_what_determines_it(cfg, prepared, tokenizer, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in prepared.folder.iterdir()}
    assert prepare_chat(replace(cfg, seq_length=7, seed=3), tokenizer) == prepared
    assert {p: p.stat().st_mtime_ns for p in prepared.folder.iterdir()} == before
    path = write(tmp_path / "a.jsonl", rows(20))
    mine = replace(cfg, cache=str(tmp_path / "cache"), chat=ChatConfig(path=path))
    first = prepare_chat(mine, tokenizer)
    keys = {first.key, prepare_chat(replace(mine, chat=ChatConfig(path=path, mode=ChatMode.instruct)), tokenizer).key}
    keys |= {prepare_chat(replace(mine, heldout_fraction=0.3), tokenizer).key}
    keys |= {prepare_chat(replace(mine, chat=ChatConfig(path=path, heldout=cfg.chat.path)), tokenizer).key}
    write(tmp_path / "a.jsonl", rows(21))
    keys |= {prepare_chat(mine, tokenizer).key}
    assert len(keys) == 5


def test_a_file_of_held_out_ones_is_named_and_what_it_shares_is_told(cfg, tokenizer, tmp_path, caplog):
    first, second = write(tmp_path / "a.jsonl", rows(9)), write(tmp_path / "b.jsonl", rows(4))
    mine = replace(cfg, cache=str(tmp_path / "cache"), chat=ChatConfig(path=first, heldout=second), seq_length=2)
    with caplog.at_level(logging.WARNING, "data"):
        prepared = prepare_chat(mine, tokenizer)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert f"data.chat.heldout={second}: 4 of its 4 conversations ask what one of data.chat.path={first} asks" in said
    with pytest.raises(DataError, match=re.escape(f"no heldout conversation of data.chat.heldout={second} fits 3 tokens")):
        chat_heldout(mine, prepared)
    with pytest.raises(DataError, match=re.escape(f"no train conversation of data.chat.path={first} fits 3 tokens")):
        next(chat_stream(mine, prepared, position=0, rank=0, of=1, horizon=1))


def test_blank_lines_are_no_conversations(cfg, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n \n")
    with pytest.raises(DataError, match=r"a\.jsonl: holds no conversation, only blank lines"):
        prepare_chat(replace(cfg, cache=str(tmp_path), chat=ChatConfig(path=str(tmp_path / "a.jsonl"))), tokenizer)


def test_a_damaged_one_is_made_again(cfg, tokenizer, tmp_path):
    mine = replace(cfg, cache=str(tmp_path))
    first = prepare_chat(mine, tokenizer)
    whole = (first.folder / "train.targets").read_bytes()
    os.truncate(first.folder / "train.targets", 3)
    again = prepare_chat(mine, tokenizer)
    assert again == first and (again.folder / "train.targets").read_bytes() == whole


def test_a_question_is_on_one_side_only(cfg, tokenizer, tmp_path):
    pairs = [Conversation((User(f"q{i % 30}"), Assistant("", f"answer {i}"))) for i in range(90)]
    mine = replace(cfg, cache=str(tmp_path))
    prepared = prepare_chat(mine, tokenizer, made("tasks", "1", lambda: pairs))
    asked = {}
    for split in "train", "heldout":
        there = prepared.conversations(split)
        asked[split] = {parse(there.part(i, 999)[0], tokenizer, mode=ChatMode.thinking).messages[0] for i in range(len(there))}
        assert len(there) == 3 * len(asked[split])
    assert not asked["train"] & asked["heldout"] and len(asked["train"] | asked["heldout"]) == 30
    with pytest.raises(DataError, match=r"tasks: its 5 conversation\(s\) ask one question"):
        prepare_chat(mine, tokenizer, made("tasks", "2", lambda: [Conversation((User("q"), Assistant("", "a")))] * 5))


def test_held_out_files_of_their_own_are_all_held_out(cfg, tokenizer, tmp_path):
    chat = ChatConfig(path=write(tmp_path / "t" / "b.jsonl", rows(9)), heldout=write(tmp_path / "h.jsonl", rows(4, seed=1)))
    write(tmp_path / "t" / "a" / "c.jsonl", rows(3, seed=2))
    write(tmp_path / "t" / ".hidden" / "d.jsonl", rows(3, seed=2))
    prepared = prepare_chat(replace(cfg, cache=str(tmp_path / "cache"), chat=replace(chat, path=str(tmp_path / "t"))), tokenizer)
    assert [prepared.manifest[s]["conversations"] for s in ("train", "heldout")] == [12, 4]


def test_wrong_lines_are_named(cfg, tokenizer, tmp_path):
    def refused(line, says):
        path = tmp_path / "bad.jsonl"
        path.write_text(json.dumps(rows(1)[0]) + "\n\n" + line + "\n")
        with pytest.raises(DataError, match=rf"data\.chat\.path=.*line 3 of .*bad\.jsonl: {says}"):
            prepare_chat(replace(cfg, cache=str(tmp_path), chat=ChatConfig(path=str(path))), tokenizer)

    refused("{", "is not JSON")
    refused('{"messages": [], "messages": []}', "is not JSON .a key comes twice")
    refused('{"messages": [{"role": "user", "content": "x"}], "note": 1}', "the line has a field 'note'")
    refused('{"messages": [{"role": "user", "content": "x"}]}', "has no assistant message")
    refused('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', r"messages\[0\]: holds half a surrogate")
    bad_call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}
    refused(json.dumps({"messages": [bad_call]}), r"messages\[0\]: the arguments of f are not JSON")


def test_what_cannot_be_read_is_refused(cfg, tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"data\.chat\.path=null"):
        prepare_chat(replace(cfg, chat=ChatConfig()), tokenizer)
    with pytest.raises(DataError, match=r"data\.chat\.path=.*absent: no such file"):
        from_jsonl(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="holds no conversation"):
        from_jsonl(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache="):
        prepare_chat(replace(cfg, cache=str(tmp_path / "file" / "cache")), tokenizer)
    tokenizer.save(tmp_path / "t.json")
    saved = json.loads((tmp_path / "t.json").read_text())
    saved["added_tokens"] = saved["added_tokens"][:1]
    del saved["model"]["vocab"]["[open]"]
    (tmp_path / "t.json").write_text(json.dumps(saved))
    with pytest.raises(DataError, match=r"t\.json: has no \[open\]"):
        prepare_chat(cfg, load_tokenizer(tmp_path / "t.json"))


def test_thinking_without_any_reasoning_is_said(cfg, tokenizer, tmp_path, caplog):
    plain = [Conversation((User(f"q{i}"), Assistant(None, "a"))) for i in range(9)]
    with caplog.at_level(logging.WARNING):
        prepare_chat(replace(cfg, cache=str(tmp_path)), tokenizer, made("tasks", "1", lambda: plain))
    assert "no conversation of tasks has reasoning" in caplog.text
