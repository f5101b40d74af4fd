"""Suites and results that were damaged or made up, by the thousand: read or refused in words, at once, never obeyed."""

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.contract import plugins
from harness.records import store
from harness.records.store import StoreError
from harness.report import results
from harness.report.report import Report
from harness.suite import reader
from harness.suite.bounds import SuiteError
from harness.verbs import compare
from harness.verdicts import documents, judge
from harness.verdicts.expressions import ClaimError

ROOT = Path(__file__).resolve().parents[2]
LOADED = plugins.load()
MUTATIONS = int(os.environ.get("HARNESS_MUTATIONS", "300"))
"""How many files of each kind are tried; `HARNESS_MUTATIONS=10000` for the whole proof."""
SECONDS = 1.0
SUITES = sorted(path for path in (ROOT / "suites").glob("*.yaml") if path.name != "claims.yaml")
RESULTS = sorted((ROOT / "results").rglob("*.jsonl"))
POISON = [
    b"\x00", b"\xff\xfe", b"\x1b[2J", b"&a [*a]", b"<<: {a: 1}", b"!!python/object/apply:os.system [x]", b"- " * 40,
    b"{" * 30, b"9" * 200, b"-1", b"1e308", b"NaN", b"Infinity", b"null", b"true", b'"', b"\n", b": ", b"[]", b"0",
    b"../../etc/passwd", b"<script>alert(1)</script>", b"`x`|[a](b)", b"=cmd|' /C calc'!A0", b"$(touch /tmp/x)",
    "\u202e\u2028".encode(),
]  # fmt: skip


def damaged(text: bytes, chance: random.Random) -> bytes:
    """Damage a text in a few places: cut, doubled, moved, poisoned, or with bits turned."""
    for _ in range(chance.randint(1, 4)):
        a, b = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + chance.choice((1, 8, 60, 400)))
        way = chance.randrange(6)
        if way == 0:
            text = text[:a] + text[b:]
        elif way == 1:
            text = text[:b] + text[a:b] + text[b:]
        elif way == 2:
            text = text[:a] + chance.choice(POISON) + text[a:]
        elif way == 3:
            text = text[:a] + chance.choice(POISON) + text[b:]
        elif way == 4 and a < len(text):
            text = text[:a] + bytes([text[a] ^ 1 << chance.randrange(8)]) + text[a + 1 :]
        else:
            text = text[:b]
    return text


VALUES = [
    None, True, 0, -1, 1, 3.5, -0.0, 1e308, 10**30, "", "x", "<script>alert(1)</script>", "a|b`c`\x1b[2J", "=1+1", [],
    {}, [1], {"a": 1}, "torch/cpu", "baseline", "ok", "oom_budget", "../..",
]  # fmt: skip


def edited(text: bytes, chance: random.Random) -> bytes:
    """Change a few values of some records as a hand would: valid JSON that may say anything."""
    lines = [json.loads(line) for line in text.splitlines()]
    for _ in range(chance.randint(1, 4)):
        held = chance.choice(lines)
        while True:
            keys = list(held) if isinstance(held, dict) else list(range(len(held)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(held[key], dict | list) and held[key] and chance.random() < 0.8:
                held = held[key]
                continue
            held[key] = chance.choice(VALUES)
            break
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def numbers(kind: str) -> Iterator[random.Random]:
    for number in range(MUTATIONS):
        yield random.Random(f"{kind}-{number}")


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.long
def test_a_damaged_suite_is_a_plan_or_refused_in_one_line(tmp_path: Path, slowness: float) -> None:
    texts = [path.read_bytes() for path in SUITES]
    path = tmp_path / "mine.yaml"
    plans = 0
    for chance in numbers("suite"):
        path.write_bytes(damaged(chance.choice(texts), chance))
        started = time.process_time()
        try:
            plans += bool(reader.read(path, LOADED).cases)
        except SuiteError as refusal:
            assert str(refusal).isprintable() and len(str(refusal)) < 2000
        assert time.process_time() - started < SECONDS * slowness, path.read_bytes()
    assert 0 < plans < MUTATIONS
    assert everything(tmp_path) == {"mine.yaml"}


def few_lines(path: Path, chance: random.Random) -> bytes:
    """Some neighbouring records of a file, and its beginning."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = chance.randrange(len(lines))
    return b"".join([lines[0], *lines[at : at + 12]])


@pytest.mark.long
def test_damaged_results_are_reported_as_far_as_they_go_and_write_nothing(tmp_path: Path, slowness: float) -> None:
    known = documents.read(ROOT / "suites" / "claims.yaml")
    folder = tmp_path / "results" / "suite" / "machine"
    folder.mkdir(parents=True)
    path = folder / "20260101T000000Z-x.jsonl"
    told = 0
    for chance in numbers("results"):
        way = chance.choice((damaged, edited))
        path.write_bytes(way(few_lines(chance.choice(RESULTS), chance), chance))
        started = time.process_time()
        problems: list[str] = []
        try:
            read = results.read([path], problems.append)
            whole = Report(tuple(read), LOADED)
            text = whole.markdown() + whole.csv() + whole.json()
            text += Report(tuple(read), LOADED, known).markdown()
            tables = judge.judge(read[0].records)
            compare.compare(tables, tables)
            told += len(text) > 500
            assert "<script" not in whole.markdown() and "\x1b" not in text
        except (StoreError, ClaimError) as refusal:
            assert "\n" not in str(refusal)
        assert all(problem.isprintable() for problem in problems)
        assert time.process_time() - started < SECONDS * slowness, path.read_bytes()
    assert told > MUTATIONS / 4
    assert everything(tmp_path / "results") == {"suite", "suite/machine", "suite/machine/20260101T000000Z-x.jsonl"}


@pytest.mark.parametrize("size", [0, 1, 100 << 20])
def test_a_suite_of_any_size_is_refused_at_once(size: int, tmp_path: Path, slowness: float) -> None:
    path = tmp_path / "mine.yaml"
    with open(path, "wb") as file:
        file.write(b"title: x\n" * bool(size))
        file.truncate(max(size, file.tell() if size else 0))
    started = time.process_time()
    with pytest.raises(SuiteError):
        reader.read(path, LOADED)
    assert time.process_time() - started < SECONDS * slowness


def test_results_that_were_cut_at_any_byte_lose_one_record_at_most(tmp_path: Path) -> None:
    lines = RESULTS[0].read_bytes().splitlines(keepends=True)[:3]
    text = b"".join(lines)
    path = tmp_path / "cut.jsonl"
    for at in range(0, len(text), max(1, len(text) // 400)):
        path.write_bytes(text[:at])
        found, problems = store.read(path)
        whole = text[:at].count(b"\n")
        assert whole <= len(found) <= whole + 1 and len(problems) <= 1


def test_records_of_a_newer_format_and_with_foreign_keys_are_left_out_with_a_sentence(tmp_path: Path) -> None:
    line = RESULTS[0].read_bytes().splitlines()[1].decode()
    path = tmp_path / "new.jsonl"
    newer, foreign = ({**json.loads(line), **more} for more in ({"schema_version": 99}, {"owner": "me"}))
    path.write_text("\n".join((json.dumps(newer), json.dumps(foreign), line)))
    found, problems = store.read(path)
    assert len(found) == 1
    assert "format 99, newer than 2: update the harness" in problems[0] and "wrong 'owner'" in problems[1]
