"""Frames are generated once and kept; somebody's own are checked, and refused in a sentence with its remedy."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from harness.records.task import FrameFile
from harness.workloads import temporal
from harness.workloads.data import frames
from harness.workloads.data.frames import DELAY, prepare
from harness.workloads.data.rows import frame_extent
from harness.workloads.data.sources import CorpusError

SIZES = {"frames": 50, "features": 7, "classes": 5, "seed": 3}


def made(folder: Path, corpus: str = "generated", **changes: int) -> FrameFile:
    return prepare(corpus, folder, **{**SIZES, **changes}, cache=folder / "cache")


def save(folder: Path, rows: np.ndarray, labels: np.ndarray | None = None) -> None:
    np.save(folder / "mine.npy", rows)
    if labels is None:
        labels = np.arange(len(rows)) % 5
    np.save(folder / "mine.labels.npy", labels)


def rows_like(shape: tuple[int, ...] = (50, 7)) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=1)).standard_normal(shape, np.float32)


def test_generated_frames_have_the_sizes_asked_for_and_labels_that_lie_in_the_past(tmp_path: Path) -> None:
    file = made(tmp_path)
    rows, labels = np.load(file.path), np.load(file.labels)
    assert rows.shape == (50, 7) and rows.dtype == np.float32 and labels.shape == (50,)
    assert np.array_equal(labels[DELAY:], rows[:-DELAY, :5].argmax(axis=1))
    assert abs(rows.mean()) < 0.2 and 0.8 < rows.std() < 1.2
    assert len(np.unique(labels)) == 5


def test_generated_frames_are_made_once_and_differ_by_seed(tmp_path: Path) -> None:
    first = made(tmp_path)
    stamp = first.path.stat().st_mtime_ns
    assert made(tmp_path) == first and first.path.stat().st_mtime_ns == stamp
    other = made(tmp_path, seed=4)
    assert other.digest != first.digest and other.path != first.path


def test_spoilt_generated_frames_are_made_anew(tmp_path: Path) -> None:
    first = made(tmp_path)
    data = first.path.read_bytes()
    first.path.write_bytes(data[:-4] + b"\0\0\0\0")
    assert made(tmp_path).digest == first.digest and first.path.read_bytes() == data


def test_more_frames_than_a_chunk_are_all_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = frames.drawn(50, 7, 5, 3)
    monkeypatch.setattr(frames, "CHUNK", 8)
    pieces, _ = frames.drawn(50, 7, 5, 3)
    assert np.array_equal(whole, pieces) and (whole != 0).all()


def test_own_frames_are_used_where_they_lie(tmp_path: Path) -> None:
    save(tmp_path, rows_like())
    file = made(tmp_path, "mine.npy")
    assert (file.path, file.labels) == (tmp_path / "mine.npy", tmp_path / "mine.labels.npy")
    assert (file.frames, file.features, file.dtype) == (50, 7, "float32")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_labels_count_with_the_bytes_they_have(tmp_path: Path, dtype: str) -> None:
    save(tmp_path, rows_like(), (np.arange(50) % 5).astype(dtype))
    shape = temporal.Shape(frames=50, features=7, classes=5, window=10, stride=10, batch=1)
    sizes = frame_extent(shape, made(tmp_path, "mine.npy"), 3)
    assert (sizes.input_bytes, sizes.target_bytes) == (7 * 4, np.dtype(dtype).itemsize)


def spoilt(value: float) -> np.ndarray:
    rows = rows_like()
    rows[41, 3] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "labels", "sentence"),
    [
        (spoilt(np.nan), None, r"shape \[50, 7\] has the value nan in frame 41, feature 3; replace or remove"),
        (spoilt(-np.inf), None, "value -inf in frame 41, feature 3"),
        (rows_like((49, 7)), None, r"shape \[49, 7\], and the suite asks for \[50, 7\]; set frames and features"),
        (rows_like((50, 8)), None, r"shape \[50, 8\]"),
        (rows_like((50,)), None, r"shape \[50\]"),
        (rows_like().astype(">f4"), None, "big-endian values .*astype"),
        (rows_like().astype(int), None, "holds int64; save floats"),
        (np.asfortranarray(rows_like()), None, "Fortran order; save it anew"),
        (rows_like(), np.arange(49) % 5, r"labels of shape \[49\] for 50 frames; save one label for each"),
        (rows_like(), np.arange(50) % 6, "holds the label 5, outside 0 to 4; set classes to 6"),
        (rows_like(), np.arange(50) % 5 - 1, "holds the label -1, outside 0 to 4; number the classes from 0"),
        (rows_like(), np.zeros(50), "labels of type float64; save integers"),
        (rows_like(), np.zeros(50, ">i4"), "big-endian"),
    ],
)  # fmt: skip
def test_bad_frames_are_refused_with_file_shape_and_remedy(tmp_path: Path, rows, labels, sentence) -> None:
    save(tmp_path, rows, labels)
    with pytest.raises(CorpusError, match=sentence) as refused:
        made(tmp_path, "mine.npy")
    assert "mine" in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    save(tmp_path, rows_like())
    whole = (tmp_path / "mine.npy").read_bytes()
    for length in (0, 5, 60, 200, len(whole) - 1):
        (tmp_path / "mine.npy").write_bytes(whole[:length])
        with pytest.raises(CorpusError, match=r"mine\.npy"):
            made(tmp_path, "mine.npy")


def test_labels_must_lie_beside_the_frames(tmp_path: Path) -> None:
    np.save(tmp_path / "mine.npy", rows_like())
    with pytest.raises(CorpusError, match=r"no mine.labels.npy beside it; save a label for each frame there"):
        made(tmp_path, "mine.npy")


@pytest.mark.parametrize("corpus", ["standard_library", "zipf", "../mine.npy", "no.npy"])
def test_what_are_no_frames_is_refused(tmp_path: Path, corpus: str) -> None:
    with pytest.raises(CorpusError, match=corpus.replace(".", r"\.")):
        made(tmp_path, corpus)


def test_a_process_of_its_own_prints_the_file_or_the_sentence(tmp_path: Path) -> None:
    spec = {"corpus": "generated", "root": str(tmp_path), "cache": str(tmp_path / "cache"), **SIZES}
    command = [sys.executable, "-m", "harness.workloads.data.frames", str(tmp_path / "spec.json")]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    done = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(asdict(made(tmp_path)), default=str))
    (tmp_path / "spec.json").write_text(json.dumps(spec | {"corpus": "no.npy"}))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "no such file" in json.loads(done.stdout)["error"] and not done.stderr
