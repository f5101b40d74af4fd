"""What text a suite trains on and where it comes from.

A corpus is named by one string: `standard_library` (the sources of the running Python, real text on every
machine), `zipf` (ids drawn by rank, no text, any size), or a path inside the suite's folder: a text file, a
folder of text files, `.jsonl` with a `text` field, `.npy` of integer ids, or raw little-endian ids with
their type, `ids.bin:uint16`. This file imports nothing but the standard library: suites are checked where
numpy is not loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

ITEM_BYTES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
}  # fmt: skip
ZIPF_EXPONENT = 1.0
PIECE = 1 << 18  # characters of a text file held at once


class CorpusError(ValueError):
    """Refuse a corpus in one sentence: which one, what is wrong, what to do."""


@dataclass(frozen=True)
class Corpus:
    """One resolved corpus: `kind` is standard_library, zipf, text, jsonl, npy or raw.

    `name` is the string that was resolved, `files` are absolute and sorted by their name relative to `base`,
    and `dtype` is the declared type of raw ids.
    """

    kind: str
    name: str
    files: tuple[Path, ...]
    dtype: str | None
    base: Path | None = None


def resolve(corpus: str, root: Path, *, outside: bool = False) -> Corpus:
    """Find the files of `corpus`, a path being relative to `root`; read none of them.

    A suite is data that may come from a stranger, so its paths stay below `root`, links included. `outside`
    lifts that for a path that a person typed. Raises CorpusError for what is missing, empty, unreadable or
    outside.
    """
    if corpus == "standard_library":
        return _standard_library()
    if corpus == "zipf":
        return Corpus("zipf", corpus, (), None)
    named, colon, dtype = corpus.rpartition(":")
    raw = bool(colon) and named.endswith(".bin")
    where = _locate(corpus, named if raw else corpus, root, outside)
    fence = None if outside else root.resolve()
    if where.is_dir():
        files = _regular_files(corpus, where, fence)
        kind = _kind_of_folder(corpus, files)
        return Corpus(kind, corpus, files, None, where)
    _check_readable(corpus, [where])
    if raw:
        return _raw(corpus, where, dtype)
    if where.suffix == ".bin":
        raise CorpusError(f"corpus {corpus!r}: raw ids need their type; write {corpus + ':uint16'!r} or another type")
    kind = {".jsonl": "jsonl", ".npy": "npy"}.get(where.suffix, "text")
    return Corpus(kind, corpus, (where,), None, where.parent)


def digest(corpus: Corpus) -> str:
    """Return the sha256 of the corpus: its kind, and each file's relative name and content, in order.

    Reads every byte (the standard library takes a fraction of a second). Where the files lie does not matter.
    """
    total = hashlib.sha256(f"{corpus.kind}\0{corpus.dtype}\0".encode())
    if corpus.kind == "zipf":
        total.update(f"exponent {ZIPF_EXPONENT}".encode())
    for path in corpus.files:
        name = os.fsencode(_relative(path, corpus.base))
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise _unreadable(corpus.name, path, error) from error
        total.update(len(name).to_bytes(8, "big") + name + content)  # lengths keep name and content apart
    return total.hexdigest()


def texts(corpus: Corpus, whole: bool = False) -> Iterator[str]:
    """Yield the documents in order, none of them empty.

    A text file longer than `PIECE` characters comes in several pieces, cut at the end of a line unless a
    line alone is longer than `PIECE`, so that no file is ever held at once; with `whole` it comes in one. Raises
    CorpusError where a file is not UTF-8 text (in the standard library a stray byte becomes U+FFFD), where a line of
    JSON has no `text`, and for ids.
    """
    of_text = partial(_pieces, size=None) if whole else _pieces
    read = {"standard_library": _source_text, "text": of_text, "jsonl": _json_lines}.get(corpus.kind)
    if read is None:
        raise CorpusError(
            f"corpus {corpus.name!r}: holds token ids, not text; read them with harness.workloads.data.tokens.prepare"
        )
    for path in corpus.files:
        try:
            yield from filter(None, read(corpus.name, path))
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"corpus {corpus.name!r}: {path} is not UTF-8 text (it holds the byte "
                f"0x{error.object[error.start]:02x}); convert it to UTF-8 or leave it out"
            ) from error
        except OSError as error:
            raise _unreadable(corpus.name, path, error) from error


def _standard_library() -> Corpus:
    base = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "__pycache__"}
    paths = []
    for folder, below, names in os.walk(base):
        below[:] = [name for name in below if name not in left_out]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    files = _sorted((path for path in paths if path.is_file()), base)
    if not files:
        raise CorpusError(
            f"corpus 'standard_library': no .py files under {base}; use a Python whose library is not "
            "zipped, or the corpus zipf"
        )
    return Corpus("standard_library", "standard_library", files, None, base)


def _locate(corpus: str, path: str, root: Path, outside: bool) -> Path:
    """Return the absolute path, links and their names kept, or raise why it may not be used."""
    if not path.strip():
        raise CorpusError("corpus '': is empty; write standard_library, zipf or a path")
    inside = "name a path inside the suite's folder"
    if not outside and (PurePath(path).is_absolute() or ".." in PurePath(path).parts):
        raise CorpusError(f"corpus {corpus!r}: absolute paths and '..' are refused in a suite; {inside}")
    try:
        target = (root / path).resolve(strict=True)
        home = root.resolve(strict=True)
    except FileNotFoundError as error:
        raise CorpusError(
            f"corpus {corpus!r}: there is no such file or folder in {root}; write standard_library, zipf or "
            "a path that exists"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # no permission, a loop of links, a NUL in the name
        raise CorpusError(f"corpus {corpus!r}: cannot be reached ({error}); {inside}") from error
    if not outside and not target.is_relative_to(home):
        raise CorpusError(f"corpus {corpus!r}: a link leads out of {root}; {inside}")
    return (root / path).absolute()


def _regular_files(corpus: str, folder: Path, fence: Path | None) -> tuple[Path, ...]:
    """Return the files below `folder` without hidden ones; linked folders could loop and are refused."""

    def stop(error: OSError) -> None:
        raise _unreadable(corpus, Path(error.filename), error) from error

    paths = []
    for here, below, names in os.walk(folder, onerror=stop):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in below:
            if Path(here, name).is_symlink():
                raise CorpusError(f"corpus {corpus!r}: {Path(here, name)} is a linked folder; copy it or remove it")
        paths += [Path(here, name) for name in names if not name.startswith(".")]
    for path in paths:
        if fence is not None and not path.resolve().is_relative_to(fence):
            raise CorpusError(f"corpus {corpus!r}: the link {path} leads out of {fence}; copy the file or remove it")
    files = _sorted(paths, folder)
    if not files:
        raise CorpusError(f"corpus {corpus!r}: the folder holds no files; add text files or name another corpus")
    _check_readable(corpus, files)
    return files


def _kind_of_folder(corpus: str, files: tuple[Path, ...]) -> str:
    if ids := [path for path in files if path.suffix in (".npy", ".bin")]:
        raise CorpusError(f"corpus {corpus!r}: {ids[0]} holds ids, not text; name that one file, or remove it")
    kinds = {"jsonl" if path.suffix == ".jsonl" else "text" for path in files}
    if len(kinds) > 1:
        raise CorpusError(f"corpus {corpus!r}: the folder mixes .jsonl with other files; keep one sort in it")
    return kinds.pop()


def _check_readable(corpus: str, files: Iterable[Path]) -> None:
    """Open each file once, and refuse a corpus without a single byte."""
    total = 0
    for path in files:
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
                raise CorpusError(f"corpus {corpus!r}: {path} is not a regular file; name a file or a folder of files")
            with path.open("rb") as file:
                total += os.fstat(file.fileno()).st_size
        except OSError as error:
            raise _unreadable(corpus, path, error) from error
    if total == 0:
        raise CorpusError(f"corpus {corpus!r}: is empty (0 bytes); fill it or name another corpus")


def _raw(corpus: str, path: Path, dtype: str) -> Corpus:
    if dtype not in ITEM_BYTES:
        raise CorpusError(f"corpus {corpus!r}: {dtype!r} is not a type of ids; write one of {', '.join(ITEM_BYTES)}")
    size = path.stat().st_size
    if size % ITEM_BYTES[dtype]:
        raise CorpusError(
            f"corpus {corpus!r}: {path} has {size} bytes, not a multiple of the {ITEM_BYTES[dtype]} bytes of "
            f"{dtype}; copy it again if it was cut short, or declare its true type"
        )
    return Corpus("raw", corpus, (path,), dtype, path.parent)


def _source_text(_corpus: str, path: Path) -> Iterator[str]:
    yield path.read_bytes().decode("utf-8", errors="replace")


def _pieces(corpus: str, path: Path, size: int | None = PIECE) -> Iterator[str]:
    # newline="" keeps every byte as it is; utf-8-sig drops the mark that some editors put first.
    with path.open(encoding="utf-8-sig", newline="") as file:
        while piece := file.read(size):
            piece += file.readline(PIECE)
            if "\0" in piece:
                raise CorpusError(
                    f"corpus {corpus!r}: {path} holds NUL characters, so it is not text; name raw ids as "
                    "PATH.bin:uint16"
                )
            yield piece


def _json_lines(corpus: str, path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()  # an escaped half of a surrogate pair is valid JSON, but no text
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise CorpusError(
                    f"corpus {corpus!r}: line {number} of {path} is not a JSON object with a string of valid "
                    "Unicode in its 'text' field; correct or remove the line"
                ) from error
            yield text


def _relative(path: Path, base: Path | None) -> str:
    return path.relative_to(base).as_posix() if base else path.name


def _sorted(files: Iterable[Path], base: Path) -> tuple[Path, ...]:
    return tuple(sorted(files, key=lambda path: _relative(path, base)))


def _unreadable(corpus: str, path: Path, error: OSError) -> CorpusError:
    reason = error.strerror or error
    return CorpusError(f"corpus {corpus!r}: cannot read {path} ({reason}); give it read permission or leave it out")
