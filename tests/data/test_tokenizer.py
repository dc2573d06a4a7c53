"""Exact round trips, and a user's own tokenizer."""

import json
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from data import DataConfig, DataError, load_tokenizer, prepare
from data.tokenizer import SMALLEST, SPECIAL, Structure, _pieces, train

TEXTS = ["def f(x):\n    return x + 1\n\n\n# \u00fcber 1234\n" * 20, "class A:\n\tpass\n" * 9, Path(__file__).read_text()]


@pytest.fixture(scope="module")
def tokenizer():
    return train(TEXTS, 300)


@hypothesis.given(st.text())
@hypothesis.example("<|endoftext|>")
@hypothesis.example("[open]message[sep][close] [end_of_msg][open]")
@hypothesis.example("\ufeff\0\r\n \u2028 \U0010ffff a\u0301 <|endoftext|>x")
@hypothesis.settings(deadline=None)
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids() & set(ids)  # also where the text spells them
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("vocab_size", [SMALLEST, 256, 300])
def test_every_byte_of_utf8_fits_in_the_smallest_vocabulary(vocab_size):
    small = train(["ab"], vocab_size)
    text = "".join(map(chr, [*range(0x800), *range(0xE000, 0x110000, 97)]))
    assert small.vocab_size <= vocab_size and small.decode(small.encode(text)) == text


def test_training_is_deterministic_and_reaches_its_size(tokenizer):
    assert tokenizer.vocab_size == 300
    again = train(iter(TEXTS), 300)
    assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0]) and len(tokenizer.encode(TEXTS[0])) < 0.55 * len(TEXTS[0])


def test_documents_end_in_eos_and_long_ones_are_cut_without_a_trace(tokenizer, monkeypatch):
    text = TEXTS[0] * 40 + "x  \n\n y\n" + TEXTS[1] * 30
    monkeypatch.setattr("data.tokenizer._PIECE", 100)
    assert len(list(_pieces(text))) > 50 and "".join(_pieces(text)) == text
    whole, empty, last = tokenizer.encode_documents([text, "", TEXTS[1]])
    assert last.tolist() == [*tokenizer.encode(TEXTS[1]), tokenizer.eos]
    assert whole.tolist() == [*tokenizer.encode(text), tokenizer.eos] and empty.tolist() == [tokenizer.eos]


def test_structure_tokens_have_the_first_ids(tokenizer):
    structure = tokenizer.structure()
    assert tokenizer.eos == 0 and structure == Structure(1, 2, 3, 4) and tokenizer.special_ids() == {0, 1, 2, 3, 4}
    assert tokenizer.decode([0, 1, 2, 3, 4]) == "".join(SPECIAL)


def edited(tokenizer, tmp_path, edit):
    tokenizer.save(tmp_path / "tokenizer.json")
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    edit(saved)
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    return load_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_without_structure_is_refused_only_for_chat(tokenizer, tmp_path):
    def without(saved):
        saved["added_tokens"] = [t for t in saved["added_tokens"] if t["content"] not in ("[sep]", "[close]")]
        for token in "[sep]", "[close]":
            del saved["model"]["vocab"][token]

    other = edited(tokenizer, tmp_path, without)
    assert other.decode(other.encode("[sep]")) == "[sep]"
    with pytest.raises(DataError, match=r"data\.tokenizer=.*tokenizer\.json: has no \[sep\], \[close\]"):
        other.structure()


def test_structure_that_text_can_spell_is_refused(tokenizer, tmp_path):
    def ordinary(saved):
        (token,) = (t for t in saved["added_tokens"] if t["content"] == "[open]")
        token["special"] = False

    with pytest.raises(DataError, match=r"spells \[open\] as that structure token"):
        edited(tokenizer, tmp_path, ordinary).structure()


def test_text_that_does_not_come_back_is_refused(tokenizer, tmp_path):
    def lossy(saved):
        saved["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}

    with pytest.raises(DataError, match="does not give text back"):
        edited(tokenizer, tmp_path, lossy).structure()


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(DataError, match=r"model.vocab_size=200.*248"):
        train(["a"], 200)


def test_a_users_tokenizer_is_used_and_checked(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    assert load_tokenizer(path).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    with pytest.raises(DataError, match=r"300 entries.*model.vocab_size=256"):
        load_tokenizer(path, 256)
    (tmp_path / "corpus").mkdir()
    for i in range(4):
        (tmp_path / "corpus" / f"{i}.txt").write_text(TEXTS[0])
    cfg = DataConfig(corpus=str(tmp_path / "corpus"), cache=str(tmp_path / "cache"), tokenizer=str(path))
    with pytest.raises(DataError, match=r"300 entries.*model.vocab_size=256"):
        prepare(cfg, 256)
    prepared = prepare(cfg, 4096)
    assert prepared.vocab_size == 300 and prepared.eos == tokenizer.eos
    dataset = prepared.dataset("train")
    assert dataset[0].tolist() == [*tokenizer.encode(TEXTS[0]), tokenizer.eos]


def test_what_is_no_tokenizer_is_refused(tmp_path):
    import tokenizers as hf

    with pytest.raises(DataError, match="no such file"):
        load_tokenizer(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"broken\.json.*not a tokenizer"):
        load_tokenizer(tmp_path / "broken.json")
    hf.Tokenizer(hf.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "endless.json"))
    with pytest.raises(DataError, match=r"endless\.json.*no end-of-text"):
        load_tokenizer(tmp_path / "endless.json")
