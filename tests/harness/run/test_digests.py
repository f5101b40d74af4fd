"""What stands for the code of plugins and the files of a corpus: another digest where they are others, and no other."""

import os
from pathlib import Path

import numpy as np
import pytest

from harness.contract import plugins
from harness.run import digests

PLUGIN = """
from harness import hookimpl


@hookimpl
def harness_measure(task):
    return None
"""


def test_of_several_plugins_the_order_does_not_matter(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(PLUGIN)
    names = [str(tmp_path / "one.py"), str(tmp_path / "two.py")]
    before = digests.of_plugins(plugins.load(names))
    assert digests.of_plugins(plugins.load(names[::-1])) == before
    (tmp_path / "two.py").write_text(PLUGIN + "# another")
    after = digests.of_plugins(plugins.load(names))
    assert len(set(before) - set(after)) == 1, "an instrument alone is a plugin as well"


def test_of_two_files_of_one_name_each_counts(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "mine.py" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(PLUGIN)
    before = digests.of_plugins(plugins.load([str(path) for path in paths]))
    paths[0].write_text(PLUGIN + "# another")
    assert digests.of_plugins(plugins.load([str(path) for path in paths])) != before


@pytest.mark.parametrize("name", ["zipf", "standard_library", "generated", "drawn"])
def test_what_is_generated_or_comes_with_python_has_none(tmp_path: Path, name: str) -> None:
    assert digests.of_corpus(name, tmp_path) == ""


@pytest.mark.parametrize("at", [0, -1])
def test_both_ends_of_a_corpus_and_its_times_count(tmp_path: Path, at: int) -> None:
    path = tmp_path / "words.txt"
    text = bytearray(b"a" * (3 * digests.END_BYTES))
    path.write_bytes(text)
    os.utime(path, ns=(1, 1))
    before = digests.of_corpus("words.txt", tmp_path)
    assert before and digests.of_corpus("words.txt", tmp_path) == before
    text[at] = ord("b")
    path.write_bytes(text)
    os.utime(path, ns=(1, 1))
    edited = digests.of_corpus("words.txt", tmp_path)
    assert edited != before
    os.utime(path, ns=(1, 2))
    assert digests.of_corpus("words.txt", tmp_path) not in (before, edited)


def test_every_file_of_a_folder_and_the_labels_of_frames_count(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(name)
    np.save(tmp_path / "recording.npy", np.zeros((4, 2), np.float32))
    np.save(tmp_path / "recording.labels.npy", np.zeros(4, np.int32))
    before = [digests.of_corpus(name, tmp_path) for name in ("texts", "recording.npy")]
    (folder / "two.txt").write_text("2")
    np.save(tmp_path / "recording.labels.npy", np.ones(4, np.int32))
    after = [digests.of_corpus(name, tmp_path) for name in ("texts", "recording.npy")]
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_a_file_whose_name_is_of_an_older_encoding_counts_like_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    path = folder / os.fsdecode(b"caf\xe9.txt")
    path.write_text("one")
    before = digests.of_corpus("texts", tmp_path), digests.of_files([path])
    path.write_text("other")
    assert {digests.of_corpus("texts", tmp_path), digests.of_files([path])}.isdisjoint(before)
