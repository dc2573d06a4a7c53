"""Byte-level BPE by `tokenizers`: trained on the corpus, or the user's tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.errors import DataError

if TYPE_CHECKING:
    import tokenizers

END = "<|endoftext|>"
# The chat template's structure (data/chat). Text that spells one of them is ordinary text: only `data.chat` writes their ids.
OPEN, SEP, CLOSE, END_OF_MESSAGE = STRUCTURE = ("[open]", "[sep]", "[close]", "[end_of_msg]")
SPECIAL = (END, *STRUCTURE)  # ids 0 .. 4 of a tokenizer trained here
_OTHER_ENDS = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "<｜end▁of▁sentence｜>")
# Bytes that valid utf-8 never contains are left out of the alphabet: 243 remain, so even 256 entries leave room for merges.
_NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}
SMALLEST = 256 - len(_NEVER) + len(SPECIAL)
_PROBE = " a  b\n\t\u00e9\u4e2d \r\n "  # text that a tokenizer for chat must give back as it was
_PIECE = 1 << 20  # characters that are encoded at once


@dataclass(frozen=True)
class Structure:
    """The ids of the chat template's structure tokens."""

    open: int
    sep: int
    close: int
    end_of_message: int  # also where generation stops

    def spellings(self) -> dict[int, str]:
        return dict(zip((self.open, self.sep, self.close, self.end_of_message), STRUCTURE))


class Tokenizer:
    """Text to ids and back. Text that spells a special token is encoded as ordinary text, never as that token.

    `name` says in messages which tokenizer it is.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, eos: int, divisible: bool = False, name: str = "the tokenizer"):
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.eos = eos
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self._divisible = divisible
        self._name = name

    def structure(self) -> Structure:
        """The structure tokens of the chat template. Raises DataError where this tokenizer cannot be used for chat."""
        found = {token: i for token in STRUCTURE if (i := self._inner.token_to_id(token)) is not None}
        if missing := [token for token in STRUCTURE if token not in found]:
            raise DataError(
                f"{self._name}: has no {', '.join(missing)}, which the chat template needs; add them to its added_tokens as "
                '"special": true, or use a tokenizer trained here (data.tokenizer=train)'
            )
        if spelt := [token for token, i in found.items() if i in self.encode(token)]:
            raise DataError(
                f"{self._name}: encodes text that spells {', '.join(spelt)} as that structure token, so that text could forge a "
                'message; mark it "special": true in its added_tokens'
            )
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise DataError(f"{self._name}: does not give text back exactly, which chat needs; use a byte-level tokenizer")
        return Structure(*found.values())

    def special_ids(self) -> frozenset[int]:
        """Ids that no text is encoded to: the special tokens, the end of text among them."""
        return frozenset(i for i, t in self._inner.get_added_tokens_decoder().items() if t.special) | {self.eos}

    def digest(self) -> str:
        """Equal for tokenizers that encode alike."""
        return blake2b(self._inner.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without the end of text."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens spelt out. Exact for what `encode` gave; cut characters become U+FFFD."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_documents(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """One int64 array a text, ending in `eos`; all processors work on them at once."""
        for ids in self.encode_texts(texts):
            yield np.append(ids, self.eos)

    def encode_texts(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """One int64 array a text, as `encode`; all processors work on them at once."""
        pieces = [list(_pieces(text)) if self._divisible else [text] for text in texts]
        encoded = self._encoded(piece for parts in pieces for piece in parts)
        for parts in pieces:
            yield np.concatenate([*islice(encoded, len(parts))])

    def _encoded(self, pieces: Iterator[str]) -> Iterator[np.ndarray]:
        """Ids of each piece, a few million characters at a time: its results are many times the size of the text."""
        for group in grouped(pieces, len, 4 * _PIECE):
            for encoding in self._inner.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int64)

    def save(self, path: Path) -> None:
        self._inner.save(str(path))


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE with `vocab_size` entries at most: first <|endoftext|> (id 0) and the chat template's structure.

    Every valid text round-trips, whatever the training text; the same text gives the same tokenizer. Raises DataError where the
    vocabulary is too small for the bytes.
    """
    import tokenizers as hf

    if vocab_size < SMALLEST:
        raise DataError(
            f"model.vocab_size={vocab_size}: a byte-level tokenizer needs at least {SMALLEST} "
            f"(the bytes and {', '.join(SPECIAL)})"
        )
    inner = hf.Tokenizer(hf.models.BPE())
    inner.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=sorted(_byte_alphabet()), show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner, eos=inner.get_vocab()[END], divisible=True)


def load_tokenizer(path: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Opens a tokenizer.json, as trained here or as published with a model.

    Raises DataError if it is missing or unreadable, if it has no end-of-text token, or if it has ids at or beyond `vocab_size`.
    """
    import tokenizers as hf

    where = f"data.tokenizer={path}"
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{where}: no such file; give the path of a tokenizer.json, or train")
    try:
        inner = hf.Tokenizer.from_file(str(file))
    except Exception as problem:  # the library raises a bare Exception
        raise DataError(f"{where}: not a tokenizer.json that `tokenizers` {hf.__version__} reads ({problem})") from None
    ends = [i for i in (inner.token_to_id(end) for end in (END, *_OTHER_ENDS)) if i is not None]
    if not ends:
        raise DataError(f"{where}: has no end-of-text token; add one of {', '.join((END, *_OTHER_ENDS))}")
    out = Tokenizer(inner, eos=ends[0], name=where)
    if vocab_size is not None and out.vocab_size > vocab_size:
        raise DataError(
            f"{where}: has {out.vocab_size} entries, but model.vocab_size={vocab_size}; "
            f"set model.vocab_size={out.vocab_size} or more"
        )
    return out


def grouped[T](items: Iterable[T], size: Callable[[T], int], enough: int) -> Iterator[list[T]]:
    """Consecutive items in lists, each closed as soon as its sizes sum to `enough`."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= enough:
            yield group
            group, total = [], 0
    if group:
        yield group


def _byte_alphabet() -> Iterator[str]:
    """The characters that stand for bytes in a byte-level vocabulary: printable ones for themselves, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = 0
    for byte in range(256):
        if byte not in _NEVER:
            yield chr(byte) if byte in printable else chr(0x100 + shifted)
        shifted += byte not in printable


def _pieces(text: str) -> Iterator[str]:
    """Cuts a long text where the pre-tokenizer cuts anyway: after a line break between two visible characters."""
    first = 0
    while len(text) - first > _PIECE:
        cut = re.compile(r"(?<=\S\n)(?=\S)").search(text, first + _PIECE)
        if cut is None:
            break
        yield text[first : cut.start()]
        first = cut.start()
    yield text[first:]
