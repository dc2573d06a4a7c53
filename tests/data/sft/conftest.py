"""Conversations of many lengths as people have them, prepared once a session."""

import json
from pathlib import Path

import numpy as np
import pytest

from data import DataConfig
from data.config import ChatConfig
from data.sft import PreparedChat, prepare_chat
from data.tokenizer import Tokenizer, train


def rows(count: int, seed: int = 0, most: int = 4) -> list[dict]:
    """Questions that all differ, one to three turns, some with reasoning and tools; lengths are skewed as real ones are."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        messages: list[dict] = [{"role": "system", "content": "Be brief."}] if i % 3 == 0 else []
        for turn in range(int(rng.integers(1, 4))):
            words = min(most, int(rng.lognormal(1.5, 1.0)) + 1)
            messages.append({"role": "user", "content": f"question {i} {turn} " + "why " * int(rng.integers(1, 9))})
            answer: dict = {"role": "assistant", "content": "because it is so " * words}
            if i % 2:
                answer["thinking"] = "hm " * words
            if i % 5 == 0 and turn == 0:
                calls = [
                    {"id": f"c{k}", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}} for k in range(2)
                ]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                messages += [{"role": "tool", "tool_call_id": f"c{k}", "content": str(k)} for k in (1, 0)]
            messages.append(answer)
        out.append({"messages": messages})
    return out


def write(path: Path, lines: list) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    text = 'message role="assistant" role="user" think response tools because it is so why question hm Be brief. ' * 9
    return train([text], 320)


@pytest.fixture(scope="session")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    root = tmp_path_factory.mktemp("chat")
    return DataConfig(
        cache=str(root / "cache"), seq_length=511, batch_size=12, micro_batch_size=2, heldout_fraction=0.2, heldout_tokens=1000,
        chat=ChatConfig(path=write(root / "chats.jsonl", rows(240))),
    )  # fmt: skip


@pytest.fixture(scope="session")
def prepared(cfg: DataConfig, tokenizer: Tokenizer) -> PreparedChat:
    return prepare_chat(cfg, tokenizer)
