"""Files of records: one JSON line an attempt, appended and synced, never rewritten."""

import codecs
import errno
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.records.case import Claim
from harness.records.garbage import uncollected
from harness.records.record import SCHEMA_VERSION, Record, upgraded
from harness.refusal import Refusal

STAMP = "%Y%m%dT%H%M%SZ"
"""How the time is written in the name of a file."""
TAIL = 1 << 20
"""Bytes at the end of a file in which its last record lies."""
NEIGHBOURS = 8
"""Earlier files of a folder in which the whole of a suite is looked for: a history may have hundreds."""
WRITTEN = re.compile(rb'"utc": "([^"]{1,40})"')
"""When a record was written, in its line."""
NAME = re.compile(r"[\w.-]+")
ROW = re.compile(rf"(=\s*['\"]?)?({NAME.pattern}+)(?!\s*=(?!=))")
"""A name in the expression of a claim, whole, that is no keyword; after `=` it is a value, and no row."""
CURRENT = f'{{"schema_version": {SCHEMA_VERSION}, '.encode()
"""How a line of this format begins, as `encoded` writes it."""
EXTREME = re.compile(rb"[\[:,]\s*-?(?:NaN|Infinity|\d+(?:\.\d+)?[eE]\+?\d{3})")
"""A number that is not finite, or may be too large to be one; a text may look so as well."""


class StoreError(Refusal):
    """A results file or folder that cannot be used, in one sentence."""


def encoded(record: Record) -> bytes:
    """Write a record as one line of JSON; raise ValueError for a figure that is not finite."""
    fields = {"schema_version": SCHEMA_VERSION, **record.model_dump(mode="json", exclude_defaults=True)}
    return (json.dumps(fields, allow_nan=False) + "\n").encode()


def append(path: Path, record: Record) -> None:
    """Write one record as one line, whole and synced; call it only under `locks.measuring`.

    A torn last line of an earlier run is closed first, so that it cannot swallow this one.
    """
    data = encoded(record)
    try:
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")
            written = os.write(descriptor, data)
            if written != len(data):
                raise StoreError(f"only {written} of {len(data)} bytes of a record fit into '{path}': make room")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            _sync_folder(path.parent)
    except OSError as error:
        raise StoreError(
            f"a record cannot be written to '{path}' ({error.strerror}): make room or give rights"
        ) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that are shared with a virtual machine sync no folder
            raise
    finally:
        os.close(descriptor)


def read(path: Path, aliases: Mapping[str, str] | None = None) -> tuple[list[Record], list[str]]:
    """Read the records of a file, and one sentence for each line that is not one.

    Strategies that `aliases` knows under a former name appear under the one that it means.
    """
    records: list[Record] = []
    problems: list[str] = []
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")  # an editor may have left it
    except OSError as error:
        raise StoreError(f"results cannot be read from '{path}' ({error.strerror})") from None
    with uncollected():
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = parse(line)
            except ValueError as error:
                problems.append(f"{path}:{number}: {error}")
            else:
                records.append(renamed(record, aliases or {}))
    return records, problems


def renamed(record: Record, aliases: Mapping[str, str]) -> Record:
    """Replace former names of strategies, in the case and in the expressions of claims."""
    if record.case is not None and any(applied.name in aliases for applied in record.case.strategies):
        strategies = tuple(
            applied.model_copy(update={"name": aliases.get(applied.name, applied.name)})
            for applied in record.case.strategies
        )
        record = record.model_copy(update={"case": record.case.model_copy(update={"strategies": strategies})})
    if aliases and record.heading.claims:
        claims = tuple(renamed_claim(claim, aliases) for claim in record.heading.claims)
        record = record.model_copy(update={"heading": record.heading.model_copy(update={"claims": claims})})
    return record


def renamed_claim(claim: Claim, aliases: Mapping[str, str]) -> Claim:
    """Replace former names of strategies in an expression; a size or a word in it may be called alike, and stays."""

    def name(word: re.Match[str]) -> str:
        return word[0] if word[1] else aliases.get(word[2], word[2])

    return claim.model_copy(update={"that": ROW.sub(name, claim.that)})


def next_file(folder: Path, commit: str) -> Path:
    """Name the results of a run that begins now: by the time and the commit, and after all that are there.

    So the newest file is the last one begun, until an earlier one is resumed, even where the clock was set back.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    for file in folder.glob("*.jsonl"):
        with suppress(OverflowError):
            now = max(now, _written(file) + timedelta(seconds=1))
    return folder / f"{now:{STAMP}}-{commit}.jsonl"


def below(folder: Path) -> list[Path]:
    """Return all results files below a folder, also behind links, in order; a circle of links is followed once."""
    entered: set[str] = set()
    files: list[Path] = []
    for root, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(root)) in entered:
            folders.clear()
            continue
        entered.add(real)
        files += (Path(root, name) for name in names if name.endswith(".jsonl"))
    return sorted(files)


def newest(path: Path) -> list[Path]:
    """Find the results below a path: the file itself, or of each folder that of each suite and machine written last.

    That need not be the last one begun: a run that was interrupted goes on in its own file.
    """
    if not path.exists():
        raise StoreError(f"there is no '{path}': name a results file or folder")
    if path.is_file():
        return [path]
    by_folder: dict[Path, list[Path]] = {}
    for file in below(path):
        by_folder.setdefault(file.parent, []).append(file)
    chosen: list[Path] = []
    for files in by_folder.values():
        of_each: dict[Any, list[Path]] = {}
        for file in files:
            of_each.setdefault(_subject(file) if len(files) > 1 else None, []).append(file)
        chosen += (max(its, key=_age) for its in of_each.values())
    return sorted(chosen, key=lambda file: (file.parent, file))


def _age(file: Path) -> tuple[datetime, Path]:
    """Return what orders the files of a folder: when each was written to, and where that is equal its name."""
    return _written(file), file


def _subject(file: Path) -> tuple[str, str]:
    """Return the suite and the machine of a file, by its first line; empty texts where that cannot be read."""
    with suppress(OSError, ValueError, AttributeError, RecursionError), file.open("rb") as opened:
        record = json.loads(opened.readline(TAIL))
        origin = record.get("origin", record)  # format 1 has no rooms
        return str(origin.get("suite", "")), str((origin.get("machine") or {}).get("name", ""))
    return "", ""


def larger_before(file: Path) -> Path | None:
    """Return the newest of the last few files before this one in its folder that has all of its rows, and more.

    So the run of a whole suite lies before those of its parts. A file that cannot be read is passed over.
    """
    its_age = _age(file)
    before = sorted((each for each in file.parent.glob("*.jsonl") if _age(each) < its_age), key=_age, reverse=True)
    rows = _measured(file) if before else set()
    for each in before[:NEIGHBOURS]:
        with suppress(StoreError):
            if rows < _measured(each):
                return each
    return None


def notes_of_parts(path: Path) -> list[str]:
    """Say of each newest file below a folder that one beside it has more rows of its suite; of a file nothing."""
    wholes = {file: larger_before(file) for file in newest(path)} if path.is_dir() else {}
    return [
        f"{file} has only a part of the rows of '{whole.name}' beside it: name that file to see them all"
        for file, whole in wholes.items()
        if whole is not None
    ]


def _measured(file: Path) -> set[str]:
    """Return the cases, by their digests, of which a file has a memory measurement, however that ended, or a limit."""
    records = (record for record in read(file)[0] if record.case is not None)
    return {record.case.digest() for record in records if record.case is not None and _is_row(record)}


def _is_row(record: Record) -> bool:
    return record.limits is not None or (record.slot is not None and record.slot.kind == "memory")


def _written(file: Path) -> datetime:
    """Return when a file was written to: when its last record was, or where that is earlier, when its name says."""
    times = [datetime.min.replace(tzinfo=UTC)]
    with suppress(ValueError):
        times.append(datetime.strptime(file.name.split("-")[0], STAMP).replace(tzinfo=UTC))
    with suppress(OSError, ValueError, OverflowError), file.open("rb") as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - TAIL))
        times += [datetime.fromisoformat(text.decode()).astimezone(UTC) for text in WRITTEN.findall(opened.read())[-1:]]
    return max(times)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def parse(line: bytes | str) -> Record:
    """Read one record, of this format or of an older one; raise ValueError with one sentence for anything else."""
    if isinstance(line, bytes) and line.startswith(CURRENT) and not EXTREME.search(line):
        with suppress(ValidationError):  # what is wrong is said below
            return Record.model_validate_json(line)
    try:
        fields = json.loads(line, parse_constant=_finite, parse_float=_finite)
        version = fields.get("schema_version", 1)
    except (ValueError, AttributeError, RecursionError):
        raise ValueError("this line is not a record (torn or edited); it is left out") from None
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise ValueError(f"this record has format {version!r}, newer than {SCHEMA_VERSION}: update the harness")
    try:
        if version == SCHEMA_VERSION:
            return Record.model_validate_json(line)
        return Record.model_validate_json(json.dumps(upgraded(fields)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        shown = where.encode("unicode_escape").decode()[:100]
        what = f"has a wrong '{shown}'" if shown else "is wrong"
        raise ValueError(f"this record {what} ({first['msg'].removeprefix('Value error, ')}); it is left out") from None
