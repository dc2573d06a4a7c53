"""Exact round trips, and a user's own tokenizer."""

from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from data import DataConfig, DataError, load_tokenizer, prepare
from data.tokenizer import SMALLEST, _pieces, train

TEXTS = ["def f(x):\n    return x + 1\n\n\n# \u00fcber 1234\n" * 20, "class A:\n\tpass\n" * 9, Path(__file__).read_text()]


@pytest.fixture(scope="module")
def tokenizer():
    return train(TEXTS, 300)


@hypothesis.given(st.text())
@hypothesis.example("<|endoftext|>")
@hypothesis.example("\ufeff\0\r\n \u2028 \U0010ffff a\u0301 <|endoftext|>x")
@hypothesis.settings(deadline=None)
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos not in ids  # also where the text spells it
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("vocab_size", [SMALLEST, 256, 300])
def test_every_byte_of_utf8_fits_in_the_smallest_vocabulary(vocab_size):
    small = train(["ab"], vocab_size)
    text = "".join(map(chr, [*range(0x800), *range(0xE000, 0x110000, 97)]))
    assert small.vocab_size <= vocab_size and small.decode(small.encode(text)) == text


def test_training_is_deterministic_and_reaches_its_size(tokenizer):
    assert tokenizer.vocab_size == 300
    again = train(iter(TEXTS), 300)
    assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0]) and len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_documents_end_in_eos_and_long_ones_are_cut_without_a_trace(tokenizer, monkeypatch):
    text = TEXTS[0] * 40 + "x  \n\n y\n" + TEXTS[1] * 30
    monkeypatch.setattr("data.tokenizer._PIECE", 100)
    assert len(list(_pieces(text))) > 50 and "".join(_pieces(text)) == text
    whole, empty, last = tokenizer.encode_documents([text, "", TEXTS[1]])
    assert last.tolist() == [*tokenizer.encode(TEXTS[1]), tokenizer.eos]
    assert whole.tolist() == [*tokenizer.encode(text), tokenizer.eos] and empty.tolist() == [tokenizer.eos]


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(DataError, match=r"model.vocab_size=200.*244"):
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
