"""Token files say what the text said; a preparation is reused exactly when nothing changed, and is never half there."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import data
from data import DataError, prepare
from data.corpus import documents
from data.prepare import token_array
from data.tokenizer import Tokenizer
from tests.data.conftest import VOCABULARY, write_corpus

ROOT = Path(__file__).parents[2]
FORK = multiprocessing.get_context("fork")


def test_the_token_files_hold_every_document(cfg, prepared):
    tokenizer, seen = prepared.tokenizer(), []
    for split in "train", "heldout":
        dataset = prepared.dataset(split)
        assert dataset.index.dtype == np.uint16 and len(dataset) == prepared.manifest[split]["documents"] > 0
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
        tokens, lengths = token_array(prepared, split)
        assert len(tokens) == lengths.sum() == prepared.count(split)
        for i in range(len(dataset)):
            ids = dataset[i].tolist()
            assert ids[-1] == prepared.eos and prepared.eos not in ids[:-1]
            seen.append(tokenizer.decode(ids[:-1]))
    assert sorted(seen) == sorted(d.text for d in documents(cfg)) and len(seen) == 60


def test_a_second_run_reuses_it(cfg, prepared):
    before = {p: p.stat().st_mtime_ns for p in prepared.folder.iterdir()}
    again = prepare(replace(cfg, seq_length=7, batch_size=2, seed=9, heldout_tokens=5), VOCABULARY)
    assert again == prepared and {p: p.stat().st_mtime_ns for p in again.folder.iterdir()} == before


def change_nothing(cfg):
    return cfg, VOCABULARY


def change_vocabulary(cfg):
    return cfg, VOCABULARY + 1


def change_fraction(cfg):
    return replace(cfg, heldout_fraction=0.21), VOCABULARY


def add_file(cfg):
    Path(cfg.corpus, "new.txt").write_text("new text")
    return cfg, VOCABULARY


def drop_file(cfg):
    Path(cfg.corpus, "part0/doc0.txt").unlink()
    return cfg, VOCABULARY


def edit_file(cfg):
    path = Path(cfg.corpus, "part0/doc0.txt")
    path.write_text(path.read_text()[::-1])  # the same size
    return cfg, VOCABULARY


def rename_file(cfg):
    Path(cfg.corpus, "part0/doc0.txt").rename(Path(cfg.corpus, "part0/doc00.txt"))
    return cfg, VOCABULARY


@pytest.mark.parametrize(
    "change",
    [change_nothing, change_vocabulary, change_fraction, add_file, drop_file, edit_file, rename_file],
    ids=lambda f: f.__name__,
)
def test_whatever_determines_it_makes_another(change, cfg, tmp_path):
    mine = replace(cfg, corpus=str(write_corpus(tmp_path / "corpus", 8)), cache=str(tmp_path / "cache"))
    first = prepare(mine, VOCABULARY)
    second = prepare(*change(mine))
    assert (second.key == first.key) == (change is change_nothing)
    assert first.folder.exists() and second.folder.exists()


def test_two_preparations_of_one_corpus_are_the_same_bytes(cfg, prepared, tmp_path):
    other = prepare(replace(cfg, cache=str(tmp_path)), VOCABULARY)
    assert other.folder != prepared.folder and other.key == prepared.key
    for name in ("train.bin", "train.idx", "heldout.bin", "heldout.idx", "tokenizer.json", "manifest.json"):
        assert (other.folder / name).read_bytes() == (prepared.folder / name).read_bytes()


@pytest.mark.parametrize("harm", ["truncate", "delete", "manifest"])
def test_a_damaged_one_is_made_again(harm, cfg, prepared, tmp_path):
    mine = replace(cfg, cache=str(tmp_path))
    folder = tmp_path / prepared.folder.name
    shutil.copytree(prepared.folder, folder)
    if harm == "truncate":
        os.truncate(folder / "train.bin", 100)
    else:
        (folder / ("heldout.idx" if harm == "delete" else "manifest.json")).unlink()
    again = prepare(mine, VOCABULARY)
    assert again.folder == folder and (folder / "train.bin").read_bytes() == (prepared.folder / "train.bin").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".{folder.name}.lock", folder.name]


def start(corpus: Path, cache: Path, pause: float):
    """A process that prepares `corpus`, `pause` seconds a document: (process, the end of a pipe where it speaks).

    Forked, so that it does not import megatron-core again.
    """
    listen, speak = FORK.Pipe(duplex=False)

    def work():
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not come along
        quick = Tokenizer.encode_documents

        def encode_documents(self, texts):
            for ids in quick(self, texts):
                speak.send("document")
                time.sleep(pause)
                yield ids

        Tokenizer.encode_documents = encode_documents
        speak.send(prepare(data.DataConfig(corpus=str(corpus), cache=str(cache)), 300).folder)

    process = FORK.Process(target=work)
    process.start()
    speak.close()
    return process, listen


def test_a_killed_preparation_leaves_nothing_that_looks_finished(tmp_path, prepared):
    corpus, cache = write_corpus(tmp_path / "corpus", 40), tmp_path / "cache"
    process, listen = start(corpus, cache, pause=1)
    assert listen.recv() == "document"
    process.kill()
    process.join()
    (left,) = cache.glob(".*.tmp")  # the work of a killed process stays, under a name nobody opens
    assert (left / "train.bin").exists() and all(p.name.startswith(".") for p in cache.iterdir())
    manifest = prepare(data.DataConfig(corpus=str(corpus), cache=str(cache)), 300).manifest
    assert manifest["train"]["documents"] + manifest["heldout"]["documents"] == 40
    assert not left.exists()


def test_two_processes_at_once_share_one_preparation(tmp_path, prepared):
    corpus, cache = write_corpus(tmp_path / "corpus", 20), tmp_path / "cache"
    both = [start(corpus, cache, pause=0.05) for _ in range(2)]
    said = [[] for _ in both]
    for lines, (process, listen) in zip(said, both):
        while listen.poll(60) and not isinstance(lines[-1] if lines else "", Path):
            lines.append(listen.recv())
        process.join(60)
        assert process.exitcode == 0
    assert said[0][-1] == said[1][-1] and isinstance(said[0][-1], Path)
    assert sorted(map(len, said)) == [1, 21]  # one did the work, the other waited and found it done
    assert [p for p in cache.iterdir() if p.suffix != ".lock"] == [said[0][-1]]


def test_without_locks_the_first_to_rename_wins(cfg, prepared, tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    build = sys.modules["data.prepare"]._build

    def overtaken(here, *rest):
        out = build(here, *rest)
        shutil.copytree(prepared.folder, tmp_path / prepared.folder.name)
        return out

    monkeypatch.setattr(sys.modules["data.prepare"], "_build", overtaken)
    mine = prepare(replace(cfg, cache=str(tmp_path)), VOCABULARY)
    assert mine.key == prepared.key and not list(tmp_path.glob(".*.tmp"))


def test_wrong_numbers_are_refused_before_reading(cfg, tmp_path):
    for change, words in [
        ({"heldout_fraction": 0.0}, "data.heldout_fraction=0.0"),
        ({"heldout_fraction": 1.0}, "data.heldout_fraction=1.0"),
        ({"seq_length": 0}, "data.seq_length=0"),
        ({"heldout_tokens": 0}, "data.heldout_tokens=0"),
        ({"batch_size": 12, "micro_batch_size": 5}, r"data.batch_size=12: .*multiple.*5 x 1 = 5; give 15"),
        ({"seed": -1}, "data.seed=-1"),
    ]:
        with pytest.raises(DataError, match=words):
            prepare(replace(cfg, corpus=str(tmp_path / "absent"), **change), VOCABULARY)


def test_a_cache_that_cannot_be_made_is_named(cfg, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache=.*file/cache"):
        prepare(replace(cfg, cache=str(tmp_path / "file" / "cache")), VOCABULARY)


def test_importing_data_loads_neither_torch_nor_megatron():
    code = "import sys, data, data.sft, data.chat; print(sorted({'torch', 'megatron', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.slow
def test_the_standard_library_is_prepared_in_time(tmp_path):
    cfg = data.DataConfig(cache=str(tmp_path))
    began = time.monotonic()
    prepared = prepare(cfg, 1024)
    first = time.monotonic() - began
    prepare(cfg, 1024)
    again = time.monotonic() - began - first
    assert prepared.count("train") > 1_000_000 and again < first / 5 and first < 300
    fixed = data.heldout(cfg, prepared)
    lines = data.baselines(prepared, fixed)
    assert lines.targets == 65536 and 5.0 < lines.unigram < 6.5 and 3.0 < lines.bigram < 4.5
