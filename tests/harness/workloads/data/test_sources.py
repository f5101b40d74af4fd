"""A corpus is found where the suite says, nowhere else, and its digest follows its content."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from harness.workloads.data import sources as module
from harness.workloads.data.sources import PIECE, CorpusError, digest, resolve, texts

ROOT = Path(module.__file__).parents[1]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(corpus: str, root: Path, **options: bool) -> str:
    """Return the sentence that refuses `corpus`, whether it is found by name or by reading."""
    with pytest.raises(CorpusError) as caught:
        list(texts(resolve(corpus, root, **options)))
    sentence = str(caught.value)
    assert repr(corpus)[1:-1] in sentence
    assert ";" in sentence, "says no remedy"
    return sentence


def test_module_loads_no_array_library() -> None:
    heavy = "numpy tokenizers torch jax"
    modules = "harness.workloads.data.sources, harness.workloads.data.tokens"
    code = f"import sys, {modules}; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_standard_library_is_the_sorted_python_sources() -> None:
    actual = resolve("standard_library", Path("nowhere"))
    base = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(base).as_posix() for path in actual.files]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if {"site-packages", "__pycache__"} & set(name.split("/"))]
    assert next(texts(actual)) == actual.files[0].read_bytes().decode("utf-8", "replace")


def test_standard_library_replaces_stray_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "b.py", b"caf\xe9")
    write(tmp_path / "a.py", "first\r\n")
    for folder in ("site-packages", "dist-packages", "__pycache__"):
        write(tmp_path / folder / "no.py", "no")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(texts(resolve("standard_library", tmp_path))) == ["first\r\n", "caf\ufffd"]


def test_absent_standard_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "no .py files" in refusal("standard_library", tmp_path)


def test_text_keeps_every_character(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "\ufeffone\r\ntwo\n\n\u00e9\u4e16")
    actual = resolve("a.txt", tmp_path)
    assert actual.kind == "text"
    assert list(texts(actual)) == ["one\r\ntwo\n\n\u00e9\u4e16"]


def test_long_text_comes_in_pieces_cut_at_lines(tmp_path: Path) -> None:
    line = "a line of \u00e9\n"
    write(tmp_path / "a.txt", line * (3 * PIECE // len(line)))
    pieces = list(texts(resolve("a.txt", tmp_path)))
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces)
    assert "".join(pieces) == (tmp_path / "a.txt").read_text(encoding="utf-8")


def test_line_longer_than_a_piece_is_bounded(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x" * (5 * PIECE))
    pieces = list(texts(resolve("a.txt", tmp_path)))
    assert max(map(len, pieces)) <= 2 * PIECE
    assert sum(map(len, pieces)) == 5 * PIECE


def test_folder_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", ".hidden", ".git/config"):
        write(tmp_path / "texts" / name, name)
    write(tmp_path / "texts/empty.txt", "")
    assert list(texts(resolve("texts", tmp_path))) == ["a.txt", "a/z.md", "b.txt"]


def test_json_lines_give_their_text(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b"}, {"text": ""}, {"id": 1, "text": "c\n"}]
    write(
        tmp_path / "a.jsonl",
        "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + '\n{"text":\r"d"}\r\n',
    )
    actual = resolve("a.jsonl", tmp_path)
    assert actual.kind == "jsonl"
    assert list(texts(actual)) == ["a\u2028b", "c\n", "d"]


def test_folder_of_json_lines(tmp_path: Path) -> None:
    write(tmp_path / "d/2.jsonl", '{"text": "two"}')
    write(tmp_path / "d/1.jsonl", '{"text": "one"}')
    assert list(texts(resolve("d", tmp_path))) == ["one", "two"]


@pytest.mark.parametrize("line", ['{"text": 1}', '{"body": "x"}', "[]", "{", "3", '{"text": "\\ud800"}', "[" * 100_000])
def test_bad_json_line_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line)
    sentence = refusal("a.jsonl", tmp_path)
    assert "line 2" in sentence
    assert "a.jsonl" in sentence


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_other_encodings_are_refused_with_the_byte(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, "caf\u00e9".encode("latin-1"))
    assert "0xe9" in refusal(name, tmp_path)


def test_ids_taken_for_text_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "ids.dat", b"a\0b\0")
    assert "PATH.bin:uint16" in refusal("ids.dat", tmp_path)


def test_zipf_and_ids_hold_no_text(tmp_path: Path) -> None:
    assert "token ids" in refusal("zipf", tmp_path)


def test_raw_ids_declare_their_type(tmp_path: Path) -> None:
    path = write(tmp_path / "ids.bin", bytes(6))
    actual = resolve("ids.bin:uint16", tmp_path)
    assert (actual.kind, actual.dtype, actual.files) == ("raw", "uint16", (path,))
    assert "ids.bin:uint16" in refusal("ids.bin", tmp_path)
    assert "uint32, int32" in refusal("ids.bin:float32", tmp_path)
    assert "6 bytes, not a multiple of the 4 bytes" in refusal("ids.bin:uint32", tmp_path)


@pytest.mark.parametrize("name", ["", " ", "absent.txt", "a\0b", "x" * 5000, "absent.bin:uint16", "loop"])
def test_what_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "corpus" in refusal(name, tmp_path)


def test_empty_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "zeros/a.txt", "")
    (tmp_path / "none").mkdir()
    assert "0 bytes" in refusal("a.txt", tmp_path)
    assert "0 bytes" in refusal("zeros", tmp_path)
    assert "no files" in refusal("none", tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x").chmod(0)
    assert "Permission denied" in refusal("a.txt", tmp_path)


def test_file_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "x")
    actual = resolve("a.txt", tmp_path)

    def deny(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    assert "Permission denied" in refusal("a.txt", tmp_path)
    with pytest.raises(CorpusError, match="Permission denied"):
        digest(actual)


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal("pipe", tmp_path)


def test_suite_cannot_leave_its_folder(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.txt", "secret")
    root = tmp_path / "suite"
    write(root / "d/a.txt", "a")
    (root / "link.txt").symlink_to(secret)
    (root / "up").symlink_to(tmp_path)
    (root / "d/link.txt").symlink_to(secret)
    for name in (str(secret), "../secret.txt", "d/../../secret.txt", "d/../d/a.txt"):
        assert "are refused" in refusal(name, root)
    for name in ("link.txt", "up/secret.txt", "up", "d"):
        assert "leads out of" in refusal(name, root)


def test_person_may_name_any_path(tmp_path: Path) -> None:
    secret = write(tmp_path / "mine.txt", "mine")
    (tmp_path / "suite").mkdir()
    for name in (str(secret), "../mine.txt"):
        assert list(texts(resolve(name, tmp_path / "suite", outside=True))) == ["mine"]


def test_links_inside_are_followed_by_their_own_name(tmp_path: Path) -> None:
    write(tmp_path / "store/1a2b", '{"text": "x"}')
    (tmp_path / "a.jsonl").symlink_to("store/1a2b")
    assert list(texts(resolve("a.jsonl", tmp_path))) == ["x"]


def test_folders_that_cannot_be_one_corpus_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "mixed/a.txt", "a")
    write(tmp_path / "mixed/b.jsonl", "{}")
    write(tmp_path / "ids/a.npy", "a")
    write(tmp_path / "linked/a.txt", "a")
    (tmp_path / "linked/again").symlink_to(tmp_path / "linked")
    assert "mixes .jsonl" in refusal("mixed", tmp_path)
    assert "holds ids" in refusal("ids", tmp_path)
    assert "linked folder" in refusal("linked", tmp_path)


def test_reserved_names_win_over_files(tmp_path: Path) -> None:
    write(tmp_path / "zipf", "a text")
    assert resolve("zipf", tmp_path).kind == "zipf"
    assert resolve("./zipf", tmp_path).kind == "text"


def test_digest_follows_names_and_content_and_not_the_place(tmp_path: Path) -> None:
    def of(name: str, files: dict[str, str], corpus: str = "d") -> str:
        for file, content in files.items():
            write(tmp_path / name / file, content)
        return digest(resolve(corpus, tmp_path / name))

    first = of("1", {"d/a": "x", "d/b": "y"})
    assert first == of("2", {"d/b": "y", "d/a": "x"})
    others = [
        of("3", {"d/a": "x", "d/b": "z"}),
        of("4", {"d/a": "x", "d/c": "y"}),
        of("5", {"d/a": "xb", "d/by": ""}),
        of("6", {"d.bin": "abcd"}, "d.bin:uint16"),
        of("7", {"d.bin": "abcd"}, "d.bin:uint32"),
        digest(resolve("zipf", tmp_path)),
    ]
    assert len({first, *others}) == 7
