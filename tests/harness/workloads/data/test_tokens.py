"""Ids are what the tokenizer defines, the same in every process, checked before narrowing, and cached."""

import json
import os
import pickle
import random
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.records.task import TokenFile
from harness.workloads.data import tokens as module
from harness.workloads.data.sources import Corpus, CorpusError, resolve
from harness.workloads.data.tokens import byte_pair_encoding, open_tokens, prepare, word_list

ROOT = Path(module.__file__).parents[1]
TEXT = "the cat sat on the mat; the dog sat on the log. na\u00efve \u4e16\u754c  \n\ttabs\n" * 20


@pytest.fixture
def text(tmp_path: Path) -> Corpus:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8", newline="")
    return resolve("a.txt", tmp_path)


def npy(folder: Path, ids: object) -> Corpus:
    np.save(folder / "ids.npy", np.asarray(ids))
    return resolve("ids.npy", folder)


def ids_of(corpus: Corpus, tokenizer: str, vocabulary: int, cache: Path, needed: int = 1, seed: int = 0) -> list[int]:
    file = prepare(corpus, tokenizer, vocabulary, needed, seed, cache)
    ids = open_tokens(file)
    assert ids.dtype == file.dtype == ("uint16" if file.vocabulary <= 1 << 16 else "uint32")
    assert len(ids) == file.tokens
    assert ids.max() < file.vocabulary
    return ids.tolist()


def refusal(corpus: Corpus, tokenizer: str, vocabulary: int, cache: Path, needed: int = 1, seed: int = 0) -> str:
    with pytest.raises(CorpusError) as caught:
        prepare(corpus, tokenizer, vocabulary, needed, seed, cache)
    sentence = str(caught.value)
    assert repr(corpus.name) in sentence
    assert ";" in sentence, "says no remedy"
    return sentence


def run(spec: dict[str, object], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "harness.workloads.data.tokens", str(folder / "spec.json")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


def test_bytes_are_utf8(text: Corpus, tmp_path: Path) -> None:
    assert bytes(ids_of(text, "bytes", 256, tmp_path / "c")).decode() == TEXT
    assert prepare(text, "bytes", 0, 1, 0, tmp_path / "c").vocabulary == 256
    assert prepare(text, "bytes", 1000, 1, 0, tmp_path / "c").vocabulary == 1000
    assert "ask for 256" in refusal(text, "bytes", 255, tmp_path / "c")


def test_documents_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "c"}')
    assert bytes(ids_of(resolve("a.jsonl", tmp_path), "bytes", 256, tmp_path / "c")) == b"abc"


def test_words_are_ranked_by_count_then_spelling() -> None:
    documents = ["b a; Z", "c c b\u00e9 <unk>"]
    assert word_list(documents, 0) == ["<unk>", "c", ";", "<", ">", "Z", "a", "b", "b\u00e9", "unk"]
    assert word_list(documents, 3) == ["<unk>", "c", ";"]


def test_words_are_capped_to_the_most_frequent(text: Corpus, tmp_path: Path) -> None:
    split = re.findall(r"\w+|[^\w\s]", TEXT)
    words = word_list([TEXT], 0)
    assert [words[i] for i in ids_of(text, "words", 0, tmp_path / "c")] == split
    assert prepare(text, "words", 0, 1, 0, tmp_path / "c").vocabulary == len(set(split)) + 1
    frequent = {word for word, count in Counter(split).items() if count >= 40}
    capped = ids_of(text, "words", 1 + len(frequent), tmp_path / "c")
    assert [words[i] if i else None for i in capped] == [word if word in frequent else None for word in split]
    assert prepare(text, "words", 900, 1, 0, tmp_path / "c").vocabulary == 900


def test_bpe_has_the_vocabulary_asked_for_and_decodes_to_the_text(text: Corpus, tmp_path: Path) -> None:
    model = byte_pair_encoding([TEXT], 270)
    assert model.get_vocab_size() == 270
    ids = ids_of(text, "bpe", 270, tmp_path / "c")
    assert model.decode(ids) == TEXT
    assert len(ids) < len(TEXT)
    assert len(ids_of(text, "bpe", 256, tmp_path / "c")) == len(TEXT.encode())


@pytest.mark.parametrize("document", ["", " ", "  x", "x\r\n\r\n y", "\u00e9\U0001f600\u200d", "\x00\x7f", "unseen QZ"])
def test_bpe_encodes_what_it_never_saw(document: str) -> None:
    model = byte_pair_encoding([TEXT], 270)
    assert model.decode(model.encode(document).ids) == document


def test_bpe_says_how_many_tokens_a_small_corpus_gives(text: Corpus, tmp_path: Path) -> None:
    most = prepare(text, "bpe", 5000, 1, 0, tmp_path / "c").vocabulary
    assert 256 < most < 5000
    assert prepare(text, "bpe", most, 1, 0, tmp_path / "c").vocabulary == most
    assert max(ids_of(text, "bpe", 5000, tmp_path / "c")) < most


def test_bpe_trains_on_the_beginning_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRAINING_CHARACTERS", 30)
    documents = ["the cat and the dog ", "and the bird and the fish"]
    beginning = "".join(documents)[:30]
    assert (
        byte_pair_encoding(documents, 265).to_str() == byte_pair_encoding([documents[0], beginning[20:]], 265).to_str()
    )
    assert len(beginning) == 30
    never = (text for text in [*documents, None])  # a third document is not even read
    assert byte_pair_encoding(never, 265).get_vocab_size() == 265


@pytest.mark.parametrize("tokenizer", ["words", "bpe"])
def test_processes_agree(tmp_path: Path, tokenizer: str) -> None:
    draw = random.Random(0)
    (tmp_path / "a.txt").write_text(" ".join("".join(draw.choices("abcd", k=4)) for _ in range(3000)))
    spec = {
        "corpus": "a.txt",
        "root": str(tmp_path),
        "tokenizer": tokenizer,
        "vocabulary": 300,
        "needed": 9,
        "seed": 0,
    }
    digests = set()
    for seed, parallel in (("1", "true"), ("2", "false")):
        cache = str(tmp_path / seed)
        done = run(spec | {"cache": cache}, tmp_path, PYTHONHASHSEED=seed, TOKENIZERS_PARALLELISM=parallel)
        assert done.returncode == 0, done.stderr
        digests.add(json.loads(done.stdout)["digest"])
    assert len(digests) == 1


def test_zipf_follows_the_law_and_its_seed(tmp_path: Path) -> None:
    zipf, count, vocabulary = resolve("zipf", tmp_path), 200_000, 1000
    ids = np.array(ids_of(zipf, "bytes", vocabulary, tmp_path / "c", count, seed=3))
    assert len(ids) == count
    expected = count / np.arange(1, vocabulary + 1) / np.sum(1 / np.arange(1, vocabulary + 1))
    seen = np.bincount(ids, minlength=vocabulary)
    assert np.all(np.abs(seen - expected) < 6 * np.sqrt(expected))
    assert ids_of(zipf, "bytes", vocabulary, tmp_path / "d", count, seed=3) == ids.tolist()
    assert ids_of(zipf, "bytes", vocabulary, tmp_path / "c", count, seed=4) != ids.tolist()
    assert ids_of(zipf, "bytes", 1, tmp_path / "c", 0) == [0]
    assert max(ids_of(zipf, "bytes", 70_000, tmp_path / "c", count)) > 65_535


def test_too_few_tokens_are_refused_cached_or_not(text: Corpus, tmp_path: Path) -> None:
    have = len(TEXT.encode())
    for _ in range(2):
        sentence = refusal(text, "bytes", 256, tmp_path / "c", needed=have + 1)
        assert f"has {have} tokens and {have + 1} are needed" in sentence
    assert len(ids_of(text, "bytes", 256, tmp_path / "c", needed=have)) == have
    (tmp_path / "blank.txt").write_text(" \n")
    assert "has 0 tokens" in refusal(resolve("blank.txt", tmp_path), "words", 0, tmp_path / "c", needed=0)


def test_large_corpus_is_cut_at_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST_CAP", 64)
    content = bytes(range(33, 123)) * 10
    (tmp_path / "a.txt").write_bytes(content)
    np.save(tmp_path / "ids.npy", np.frombuffer(content, np.uint8))
    rows = [content[start : start + 50].decode() for start in range(0, len(content), 50)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    for name in ("a.txt", "a.jsonl", "ids.npy"):
        corpus = resolve(name, tmp_path)
        for needed, held in ((1, 64), (64, 64), (65, 128), (600, 900)):
            assert bytes(ids_of(corpus, "bytes", 256, tmp_path / "c", needed)) == content[:held]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"])
def test_ids_are_read_as_written(tmp_path: Path, dtype: str) -> None:
    ids = np.array([3, 0, 127, 5], np.dtype(dtype).newbyteorder("<"))
    ids.tofile(tmp_path / "ids.bin")
    assert ids_of(resolve(f"ids.bin:{dtype}", tmp_path), "", 128, tmp_path / "c") == [3, 0, 127, 5]
    assert ids_of(npy(tmp_path, ids), "", 0, tmp_path / "c") == [3, 0, 127, 5]
    assert prepare(npy(tmp_path, ids), "", 0, 1, 0, tmp_path / "c").vocabulary == 128


@pytest.mark.parametrize(("highest", "dtype"), [(65_535, "uint16"), (65_536, "uint32"), (2**32 - 1, "uint32")])
def test_storage_is_wide_enough(tmp_path: Path, highest: int, dtype: str) -> None:
    file = prepare(npy(tmp_path, np.array([1, highest])), "", 0, 1, 0, tmp_path / "c")
    assert (file.dtype, file.vocabulary) == (dtype, highest + 1)
    assert open_tokens(file).tolist() == [1, highest]


@pytest.mark.parametrize("far", [0, module.CHUNK + 5])
@pytest.mark.parametrize(
    ("value", "vocabulary", "remedy"),
    [
        (50, 50, "vocabulary of 51"),
        (65_536, 65_536, "vocabulary of 65537"),
        (-1, 0, "from 0 up"),
        (2**32, 0, "32 bits"),
        (2**63 - 1, 100, "32 bits"),
    ],
)
def test_ids_outside_are_named_before_narrowing(
    tmp_path: Path, value: int, vocabulary: int, remedy: str, far: int
) -> None:
    ids = np.zeros(far + 2, np.int64)
    ids[far + 1] = value
    ids.astype("<i8").tofile(tmp_path / "ids.bin")
    for corpus in (npy(tmp_path, ids), resolve("ids.bin:int64", tmp_path)):
        sentence = refusal(corpus, "", vocabulary, tmp_path / "c")
        assert str(corpus.files[0]) in sentence
        assert f"the id {value} at position {far + 1}" in sentence
        assert remedy in sentence


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.arange(4, dtype=">u2"), "big-endian"),
        (np.zeros((2, 2), int), "(2, 2)"),
        (np.array(5), "()"),
        (np.zeros(4), "float64"),
        (np.zeros(4, bool), "bool"),
        (np.array(["a"]), "<U1"),
        (np.zeros(0, int), "no ids"),
        (np.array([{}], object), "object"),
    ],
)
def test_unfit_arrays_are_refused(tmp_path: Path, array: np.ndarray, found: str) -> None:
    sentence = refusal(npy(tmp_path, array), "", 0, tmp_path / "c")
    assert found in sentence
    assert str(tmp_path / "ids.npy") in sentence
    assert "numpy.save" in sentence


def test_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.npy").write_bytes(pickle.dumps(Bomb()))
    refusal(resolve("ids.npy", tmp_path), "", 0, tmp_path / "c")
    refusal(npy(tmp_path, np.array([Bomb()], object)), "", 0, tmp_path / "c")
    with pytest.raises(CorpusError):
        open_tokens(TokenFile(tmp_path / "ids.npy", 1, 1, "uint16", ""))
    assert not (tmp_path / "exploded").exists()


def test_spoilt_arrays_are_refused(tmp_path: Path) -> None:
    corpus = npy(tmp_path, np.arange(100))
    whole = (tmp_path / "ids.npy").read_bytes()
    spoilt = [whole[:-1], whole[:130], whole[:60], whole[:3], b"PK\x03\x04" + whole, b"hello"]
    for old, new in (
        (b"(100,)", b"(101,)"),
        (b"(100,)", b"(10**9"),
        (b"100", b"-10"),
        (b"'descr'", b"'d'scr'"),
    ):
        spoilt.append(whole.replace(old, new))
    for content in spoilt:
        assert content != whole
        (tmp_path / "ids.npy").write_bytes(content)
        assert "numpy.save" in refusal(corpus, "", 0, tmp_path / "c")


def test_impossible_requests_are_refused_first(text: Corpus, tmp_path: Path) -> None:
    zipf, cache = resolve("zipf", tmp_path), tmp_path / "c"
    assert "bytes, words, bpe" in refusal(text, "byte", 256, cache)
    assert "ask for 2 to" in refusal(text, "words", 1, cache)
    assert "ask for 256 to" in refusal(text, "bpe", 255, cache)
    assert "ask for 256 to" in refusal(text, "bpe", 0, cache)
    assert "ask for 256 to" in refusal(text, "bpe", 1 << 32, cache)
    assert "cannot be stored" in refusal(text, "bytes", -1, cache)
    assert "cannot be stored" in refusal(text, "bytes", (1 << 32) + 1, cache)
    assert "no vocabulary of its own" in refusal(zipf, "bytes", 0, cache)
    assert "seed -1 is negative" in refusal(zipf, "bytes", 9, cache, seed=-1)
    assert not cache.exists()


def test_cache_is_used_and_told_apart_by_what_decides_the_ids(
    text: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, zipf = tmp_path / "c", resolve("zipf", tmp_path)
    first = prepare(text, "words", 300, 1, 0, cache)
    different = [
        prepare(text, "bytes", 300, 1, 0, cache),
        prepare(text, "words", 301, 1, 0, cache),
        prepare(text, "bpe", 260, 1, 0, cache),
        prepare(zipf, "words", 300, 1, 0, cache),
        prepare(zipf, "words", 300, 1, 1, cache),
        prepare(zipf, "words", 300, 2, 0, cache),
    ]
    assert len({file.path for file in [first, *different]}) == 7
    assert sorted(path.suffix for path in cache.iterdir()) == [".json"] * 7 + [".npy"] * 7
    monkeypatch.setattr(module, "encode", None)  # from here on nothing can be encoded
    assert prepare(text, "words", 300, 5, 9, cache) == first
    (tmp_path / "a.txt").write_text("other")
    with pytest.raises(TypeError):
        prepare(text, "words", 300, 1, 0, cache)


def cut_npy(npy: Path, sidecar: Path) -> None:
    npy.write_bytes(npy.read_bytes()[:-2])


def empty_npy(npy: Path, sidecar: Path) -> None:
    npy.write_bytes(b"")


def change_ids(npy: Path, sidecar: Path) -> None:
    np.save(npy, np.load(npy)[::-1])


def change_type(npy: Path, sidecar: Path) -> None:
    np.save(npy, np.load(npy).astype(np.int64))


def archive(npy: Path, sidecar: Path) -> None:
    with npy.open("wb") as file:
        np.savez(file, ids=np.arange(3))


def remove_npy(npy: Path, sidecar: Path) -> None:
    npy.unlink()


def remove_sidecar(npy: Path, sidecar: Path) -> None:
    sidecar.unlink()


def cut_sidecar(npy: Path, sidecar: Path) -> None:
    sidecar.write_text(sidecar.read_text()[:-4])


def list_sidecar(npy: Path, sidecar: Path) -> None:
    sidecar.write_text("[]")


def old_sidecar(npy: Path, sidecar: Path) -> None:
    sidecar.write_text("{}")


def foreign_pair(npy: Path, sidecar: Path) -> None:
    other = prepare(resolve("zipf", npy.parent), "", 256, len(TEXT.encode()), 0, npy.parent / "other")
    npy.write_bytes(other.path.read_bytes())
    sidecar.write_bytes(other.path.with_suffix(".json").read_bytes())


DAMAGES = [
    cut_npy,
    empty_npy,
    change_ids,
    change_type,
    archive,
    remove_npy,
    remove_sidecar,
    cut_sidecar,
    list_sidecar,
    old_sidecar,
    foreign_pair,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_spoilt_cache_is_rebuilt(text: Corpus, tmp_path: Path, damage: Callable[[Path, Path], None]) -> None:
    file = prepare(text, "bytes", 256, 1, 0, tmp_path / "c")
    damage(file.path, file.path.with_suffix(".json"))
    assert prepare(text, "bytes", 256, 1, 0, tmp_path / "c") == file
    assert bytes(open_tokens(file).tolist()).decode() == TEXT


def test_failed_write_leaves_nothing(text: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", full)
    assert "No space left" in refusal(text, "bytes", 256, tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []
    (tmp_path / "file").touch()
    assert "name a writable folder" in refusal(text, "bytes", 256, tmp_path / "file")


def test_open_refuses_a_file_that_is_not_as_described(text: Corpus, tmp_path: Path) -> None:
    file = prepare(text, "bytes", 256, 1, 0, tmp_path / "c")
    wrong = [
        replace(file, tokens=3),
        replace(file, dtype="uint32"),
        replace(file, path=tmp_path / "absent.npy"),
    ]
    for description in wrong:
        with pytest.raises(CorpusError, match=r"tokens .*; delete the file"):
            open_tokens(description)


def test_two_processes_at_once_are_harmless(text: Corpus, tmp_path: Path) -> None:
    spec = {
        "corpus": "a.txt",
        "root": str(tmp_path),
        "tokenizer": "words",
        "vocabulary": 0,
        "needed": 1,
        "seed": 0,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec | {"cache": str(tmp_path / "c")}))
    command = [sys.executable, "-m", "harness.workloads.data.tokens", str(tmp_path / "spec.json")]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = {process.communicate()[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(lines) == 1
    (line,) = lines
    printed = json.loads(line)
    assert TokenFile(**printed | {"path": Path(printed["path"])}) == prepare(text, "words", 0, 1, 0, tmp_path / "c")
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".json", ".npy"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"corpus": "absent.txt"}, "no such file"),
        ({"corpus": "../x"}, "are refused"),
        ({"corpus": "../x", "outside": True}, "no such file"),
        ({"needed": 10**9}, "are needed"),
        ({"vocabulary": "256"}, "write a value of type int"),
        ({"extra": 1}, "write exactly corpus"),
    ],
)
def test_command_prints_one_error(
    text: Corpus,
    tmp_path: Path,
    change: dict[str, object],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # main sets it where it is not
    spec = {
        "corpus": "a.txt",
        "root": str(tmp_path),
        "tokenizer": "bytes",
        "vocabulary": 256,
        "needed": 1,
        "seed": 0,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec | {"cache": str(tmp_path / "c")} | change))
    assert module.main([str(tmp_path / "spec.json")]) == 2
    printed = capsys.readouterr()
    (line,) = printed.out.splitlines()
    assert says in json.loads(line)["error"]
    assert printed.err == ""


def test_a_process_ends_with_that_error(tmp_path: Path) -> None:
    done = run({"corpus": "a.txt"}, tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    (line,) = done.stdout.splitlines()
    assert "write exactly corpus" in json.loads(line)["error"]


def test_command_needs_one_readable_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # main sets it where it is not
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "cut.json").write_text("{")
    for arguments in (
        [],
        [str(tmp_path / "absent.json")],
        [str(tmp_path / "list.json")],
        [str(tmp_path / "cut.json")],
    ):
        assert module.main(arguments) == 2
        assert json.loads(capsys.readouterr().out)["error"]


def test_a_corpus_is_prepared_and_found_again_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 1 << 14)
    ids = np.random.default_rng(0).integers(0, 60_000, 1 << 21).astype(np.uint16)
    corpus = npy(tmp_path, ids)
    for _ in range(2):  # written, then taken from the cache
        tracemalloc.start()
        try:
            file = prepare(corpus, "bytes", 0, len(ids), 0, tmp_path / "cache", exact=True)
            assert tracemalloc.get_traced_memory()[1] < ids.nbytes / 4
        finally:
            tracemalloc.stop()
    assert np.array_equal(open_tokens(file), ids)
