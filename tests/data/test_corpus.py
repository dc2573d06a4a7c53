"""What counts as a corpus, and what the user reads when something is not one."""

import json
import os
import sysconfig
from pathlib import Path

import pytest

from data import DataConfig, DataError, prepare
from data.corpus import Corpus, Split, documents, name_hash


def read(path: Path) -> dict[str, str]:
    return {d.name: d.text for d in documents(DataConfig(corpus=str(path)))}


def test_a_folder_gives_its_visible_text_files_by_relative_name(tmp_path):
    for name, content in {
        "b.txt": b"two\r\n", "a/c.weird": "drei \u00fc".encode(), "a/noending": b"four", ".hidden.txt": b"x", ".git/y.txt": b"x",
        "__pycache__/z.txt": b"x", "empty.txt": b"", "blank.txt": b" \n", "image.png": b"\x89PNG\0\xff", "nul.bin": b"ab\0",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = read(tmp_path)
    assert list(found.items()) == [("a/c.weird", "drei \u00fc"), ("a/noending", "four"), ("b.txt", "two\r\n")]
    assert Corpus.open(str(tmp_path)).ignored == 2


def test_links_are_followed_but_loops_end(tmp_path):
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    corpus.mkdir()
    elsewhere.mkdir()
    (elsewhere / "a.txt").write_text("linked")
    (corpus / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(corpus)
    (corpus / "dangling.txt").symlink_to(tmp_path / "nowhere")
    assert read(corpus) == {"link/a.txt": "linked"}


def test_jsonl_files_and_folders_of_them(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": "zw\\u00f6lf"}\n{"text": ""}')
    (tmp_path / "y.txt").write_text("plain")
    assert read(tmp_path / "x.jsonl") == {"x.jsonl:1": "one", "x.jsonl:3": "zw\u00f6lf"}
    assert read(tmp_path) == {"x.jsonl:1": "one", "x.jsonl:3": "zw\u00f6lf", "y.txt": "plain"}


def test_the_standard_library_is_its_python_source():
    corpus = Corpus.open("stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {s.name for s in corpus.sources}
    assert {"json/decoder.py", "argparse.py"} <= names
    assert all(n.endswith(".py") and "site-packages" not in n and "__pycache__" not in n for n in names)
    first = next(d for d in corpus.documents() if d.name == "argparse.py")
    assert first.text.encode() == (root / "argparse.py").read_bytes()


def bad_line(content: bytes):
    def make(folder: Path) -> Path:
        (folder / "x.jsonl").write_bytes(b'{"text": "fine"}\n' + content + b"\n")
        return folder / "x.jsonl"

    return make


def bad_files(**files: bytes):
    def make(folder: Path) -> Path:
        for name, content in files.items():
            (folder / name.replace("_", ".")).write_bytes(content)
        return folder

    return make


BAD = {
    "missing": (lambda folder: folder / "nowhere", ["nowhere", "no such file", "stdlib"]),
    "empty folder": (bad_files(), ["no text in it", "utf-8"]),
    "nothing but binaries": (bad_files(a_gz=b"\x1f\x8b\xff\0"), ["no text in it", "compressed"]),
    "empty files": (bad_files(a_txt=b"", b_txt=b""), ["no text in it"]),
    "blank files": (bad_files(a_txt=b"\n\n", b_txt=b" "), ["holds 0 document(s)", "at least"]),
    "one document": (bad_files(a_txt=b"alone"), ["holds 1 document(s)", "at least", ".jsonl"]),
    "not utf-8": (bad_files(a_txt=b"fine", b_txt="\u00fcber".encode("latin-1")), ["b.txt", "not utf-8", "byte 0", "iconv"]),
    "no text field": (bad_line(b'{"content": "x"}'), ["line 2", "x.jsonl", '"text"', "content"]),
    "text is a number": (bad_line(b'{"text": 3}'), ["line 2", '"text"']),
    "a list": (bad_line(b"[1]"), ["line 2", "list"]),
    "not JSON": (bad_line(b"{text"), ["line 2", "not JSON"]),
    "line not utf-8": (bad_line(b'{"text": "\xfc"}'), ["line 2", "not utf-8"]),
    "half a surrogate pair": (bad_line(rb'{"text": "\ud800"}'), ["line 2", "surrogate"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_corpus_is_one_error_that_names_it_and_leaves_nothing(case, tmp_path):
    make, words = BAD[case]
    (tmp_path / "corpus").mkdir()
    corpus = make(tmp_path / "corpus")
    with pytest.raises(DataError) as caught:
        prepare(DataConfig(corpus=str(corpus), cache=str(tmp_path / "cache")), 300)
    message = str(caught.value)
    assert "\n" not in message and f"data.corpus={corpus}" in message
    for word in words:
        assert word in message
    assert all(p.suffix == ".lock" for p in tmp_path.glob("cache/*"))  # glob shows hidden ones too


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "b.txt").chmod(0)
    with pytest.raises(DataError, match=r"b\.txt"):
        read(tmp_path)


@pytest.mark.parametrize("fraction", [1e-6, 0.05, 0.5, 1 - 1e-6])
def test_the_split_is_by_name_and_never_empty(fraction):
    names = [f"f{i}.py" for i in range(400)]
    split = Split(fraction, iter(names), "x")
    held = [n for n in names if split.is_heldout(n)]
    assert 1 <= len(held) <= 399
    assert abs(len(held) / 400 - fraction) < 0.05
    assert held == [n for n in names if Split(fraction, iter(names[::-1]), "x").is_heldout(n)]


def test_name_hashes_stay_what_they_are():
    """Were they to change, every cached split would too, and held-out text would have been trained on."""
    assert [round(name_hash(n), 6) for n in ("argparse.py", "json/decoder.py", "x.jsonl:17")] == [0.339318, 0.11394, 0.039729]


def test_a_jsonl_line_is_a_document_to_the_split(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {i} of the file"}) + "\n" for i in range(100)))
    manifest = prepare(DataConfig(corpus=str(path), cache=str(tmp_path / "cache"), heldout_fraction=0.3), 300).manifest
    assert manifest["train"]["documents"] + manifest["heldout"]["documents"] == 100
    assert 15 <= manifest["heldout"]["documents"] <= 45
