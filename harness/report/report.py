"""All results as one report: its tables, figures, pictures and pages, and the answers to what documents say."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from harness.contract.plugins import Plugins
from harness.records import Case, Record
from harness.records.record import heading_of
from harness.records.store import StoreError
from harness.report import (
    advise,
    charts,
    counterparts,
    documents,
    first,
    fit,
    formats,
    frame,
    insert,
    limits,
    page,
    table,
    trust,
)
from harness.report.answer import sentence
from harness.report.export import Figures, as_csv, as_json, of_tables
from harness.report.provenance import line
from harness.report.results import Results
from harness.report.text import escaped, plain
from harness.report.words import Key, key_of, short, titles
from harness.verdicts.claims import Answer
from harness.verdicts.documents import Documents, Judgement, SuiteResults, answered
from harness.verdicts.judge import Comparison
from harness.verdicts.observed import machine_of
from harness.verdicts.remedies import Remedy, remedies, sets

if TYPE_CHECKING:
    from pandas import DataFrame

TITLE = "Memory strategies, measured"
RESULTS = "results/"
GIB = 1 << 30
MEMORIES = {"cpu": (16 * GIB, 24 * GIB), "cuda": (24 * GIB, 48 * GIB, 80 * GIB, 141 * GIB)}
"""The machines that the first page advises: boxes without a GPU, and GPUs."""
LINKED = re.compile(r"pictures/([\w.-]+)\.svg\)")


@dataclass(frozen=True)
class Report:
    """Results in the order of the report, and what documents say of them, if that is asked."""

    results: tuple[Results, ...]
    plugins: Plugins
    documents: Documents | None = None

    @cached_property
    def measured(self) -> tuple[Results, ...]:
        """All results but the predictions that advice was given from."""
        return tuple(each for each in self.results if not each.advice)

    @cached_property
    def judgements(self) -> list[Judgement]:
        """What documents say, answered. Raises ClaimError where an expression cannot be read."""
        if self.documents is None:
            return []
        results = [SuiteResults(each.folder, each.tables, each.answers) for each in self.measured]
        return answered(self.documents, results, self.plugins.aliases)

    @cached_property
    def figures(self) -> list[Figures]:
        """Every row as plain values; limits that `fit` found, and those that were tried, have none."""
        rows = []
        for each, title_of in zip(self.measured, self.titles, strict=True):
            tables = _judged(each)
            rows += of_tables(each.suite, tables, table.tokens_per_step(tables, self.plugins), title_of)
        return rows

    @cached_property
    def titles(self) -> list[dict[Key, str]]:
        """The titles of the comparisons of each of `measured`, in its order: no two of a suite are equal.

        Of several runs of one machine they say when each began, and at which commit.
        """
        runs = Counter((each.suite, key_of(compared)) for each in self.measured for compared in _judged(each))
        cases: dict[str, dict[Key, Case]] = {}
        unique: list[dict[Key, Key]] = []
        for each in self.measured:
            own: dict[Key, Key] = {}
            for compared in _judged(each):
                key = key_of(compared)
                own[key] = (key[0], _of_run(key[1], each)) if runs[each.suite, key] > 1 else key
                cases.setdefault(each.suite, {})[own[key]] = compared.case
            unique.append(own)
        title_of = {suite: titles(members) for suite, members in cases.items()}
        return [
            {key: title_of[each.suite][other] for key, other in own.items()}
            for each, own in zip(self.measured, unique, strict=True)
        ]

    @cached_property
    def machines(self) -> dict[str, set[str]]:
        """The machines of each suite, joined where one of its results has several."""
        names: dict[str, set[str]] = {}
        for each in self.measured:
            names.setdefault(each.suite, set()).add(_machines(each))
        return names

    @cached_property
    def runs(self) -> Counter[tuple[str, str]]:
        """How many results there are of each suite, by its folder, and its machines."""
        return Counter((each.folder, _machines(each)) for each in self.measured)

    @cached_property
    def remedies(self) -> list[Remedy]:
        """What to use for each thing that sets a peak."""
        judged = [(each.folder, each.tables) for each in self.measured if not each.searched]
        return remedies(judged, self.plugins.strategies)

    def markdown(self, title: str = "") -> str:
        """Write the answers to documents where they were asked for, else all tables, each under its suite's name.

        Below them is the advice that was kept, and alone where there are none.
        """
        if self.documents is not None:
            return documents.text(self.documents, self.judgements)
        if not self.measured:
            return f"{self.advice()}\n"
        pieces = [self._tables(each, True, title) for each in self.measured]
        if any(each.advice for each in self.results):
            pieces.append(f"# What to use in which memory\n\n{self.advice()}\n")
        return "\n".join(pieces)

    def csv(self) -> str:
        """Write a line for each row."""
        return as_csv(self.figures)

    def json(self) -> str:
        """Write an object for each row."""
        return as_json(self.figures)

    def frame(self) -> "DataFrame":
        """Return a pandas data frame with one row a strategy: every figure of the tables as a number."""
        return frame.of_rows(self.figures)

    def records(self) -> "DataFrame":
        """Return a pandas data frame with one row a record: what each process measured."""
        return frame.of_records(*(each.records for each in self.results))

    def bencher(self) -> str:
        """Write Bencher's metric format."""
        return formats.bencher(self.figures)

    def benchmark_action(self) -> str:
        """Write what github-action-benchmark reads."""
        return formats.benchmark_action(self.figures)

    def write_parquet(self, path: str | Path) -> None:
        """Write one row a strategy as parquet."""
        frame.write_parquet(self.figures, Path(path))

    def put_into(self, path: Path) -> list[str]:
        """Insert what a document has marks for: the tables of a folder of results, or one of the `places`.

        Returns the names of other marks, which stay as they are. Raises InsertError where it cannot be read, or where a
        mark chooses what is not there or what two things are.
        """
        texts: dict[str, insert.Text] = {name: partial(self._chosen, each) for name, each in self.by_folder.items()}
        for name, text in self._places().items():
            texts[name] = partial(_ambiguous, name) if name in texts else partial(_whole, text)
        return insert.insert_into(path, texts)

    def _places(self) -> dict[str, Callable[[], str]]:
        """Return what writes the text of each other mark; its links lead from the root of the project."""
        places = {
            "use": self.use,
            "advice": self.advice,
            "trust": self.trust,
            "counterparts": lambda: counterparts.table(self.plugins.strategies),
            "suites": lambda: first.index(self.by_folder, self.changes, RESULTS),
        }
        if (letter := self.documents) is not None:
            places |= {
                "documents": lambda: documents.text(letter, self.judgements),
                "sentences": self.sentences,
            }
        return places

    @cached_property
    def by_folder(self) -> dict[str, list[Results]]:
        """The results of each suite, by its folder."""
        by_folder: dict[str, list[Results]] = {}
        for each in self.measured:
            by_folder.setdefault(each.folder, []).append(each)
        return by_folder

    @cached_property
    def changes(self) -> dict[str, str]:
        """What does something else now than when a suite was measured, by the suite's folder."""
        return {folder: first.since(members, self.plugins.strategies) for folder, members in self.by_folder.items()}

    def use(self) -> str:
        """Write what to use for each thing that sets a peak, and where these figures are from."""
        folders = {remedy.best.folder for remedy in self.remedies}
        records = [record for each in self.measured if each.folder in folders for record in each.records]
        stale = [folder for folder, change in self.changes.items() if change.startswith(first.STALE)]
        return f"{line(records, of_suites=True)}\n\n{first.use(self.remedies, RESULTS, stale)}"

    def sentences(self) -> str:
        """Write what the documents say, and where the figures that decide it are from."""
        folders = {folder for judgement in self.judgements for _, folder in judgement.answers}
        records = [record for each in self.measured if each.folder in folders for record in each.records]
        return f"{line(records, of_suites=True)}\n\n{first.sentences(self.judgements)}"

    def trust(self) -> str:
        """Write how far the figures of all suites can be trusted, and where they are from."""
        records = [record for each in self.measured for record in each.records]
        searched = [record.limits for record in records if record.limits is not None]
        tables = [table for each in self.measured for table in each.tables]
        return f"{line(records, of_suites=True)}\n\n{trust.table(tables, searched)}"

    def advice(self) -> str:
        """Write what to use for each model and memory, from the predictions that `harness advise --save` kept."""
        origin, grid = self._advice()
        if not origin:
            return "No advice is stored among these results: `harness advise SUITE --predict-only --save` stores it."
        table = tabulate(grid.rows, grid.headers, tablefmt="pipe", disable_numparse=True) if grid.rows else ""
        return f"{origin}\n\n{table}"

    def _advice(self) -> tuple[str, advise.Grid]:
        """Return where stored advice is from, an empty text where there is none, and what to use in which memory."""
        stored = [each for each in self.results if each.advice]
        records = [record for each in stored for record in each.records]
        since = first.since(stored, self.plugins.strategies) if records else "the same"
        origin = line(records) if records else ""
        grid = advise.for_memories(records, MEMORIES, self.plugins.workloads)
        return f"{origin}{_since([since])}", grid

    def pictures(self, folder: str | Path, only: str = "", linked: Sequence[Path] = ()) -> Iterator[Path]:
        """Draw the charts of each suite, or those whose name contains `only`, or that documents link to; yield files.

        Raises InsertError where a document cannot be read, or links to a picture that no results have; with `only`,
        other links are not looked for. Raises PicturesError where no name contains `only`.
        """
        wanted = {name for document in linked for name in LINKED.findall(insert.text_of(document))}
        known: set[str] = set()
        drawn = False
        for suite in dict.fromkeys(row["suite"] for row in self.figures):
            rows = [row for row in self.figures if row["suite"] == suite]
            if linked and not any(name.startswith(f"{suite}-") for name in wanted):
                continue
            of_suite = dict(charts.drawings(rows))
            chosen = {
                name: draw()
                for name, draw in of_suite.items()
                if only in name and (not linked or f"{suite}-{name}" in wanted)
            }
            known |= {f"{suite}-{name}" for name in of_suite}
            drawn = drawn or bool(chosen)
            yield from charts.save(chosen, Path(folder), suite)
        if absent := sorted(name for name in wanted - known if only in name):
            raise insert.InsertError(f"there is no picture '{absent[0]}': mend the link in the document")
        if only and not (drawn or linked):
            raise charts.PicturesError(f"no picture's name contains '{only}': leave it out to draw all of them")

    def write_page(self, path: str | Path) -> None:
        """Write everything as one offline page; raise StoreError where it has no room or cannot be written."""
        if all(each.tried for each in self.measured):
            raise StoreError("a page has no room for advice and tried limits: print these results as markdown")
        answers: dict[str, list[Answer]] = {}
        longest: dict[str, list[fit.Limits]] = {}
        for each in self.measured:
            where = f", on {machine}" if (machine := self._origin(each)) else ""
            answers.setdefault(each.suite, []).extend(_located(answer, where) for answer in each.answers)
            of_each = (replace(every, title=every.title + where) for every in fit.limits(each.records))
            longest.setdefault(each.suite, []).extend(of_each)
        text = page.html(TITLE, self.figures, answers, longest, self.documents, self.judgements, self._about())
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"the page cannot be written to '{path}' ({error.strerror}): name another file") from None

    def _about(self) -> page.About:
        """Collect what the page says around its rows; what to use leads to suites by their names, as rows do."""
        to_use = remedies([(each.suite, _judged(each)) for each in self.measured], self.plugins.strategies)
        answers = {
            (each.suite, title_of[key_of(compared)]): plain(_said(compared, self.plugins))
            for each, title_of in zip(self.measured, self.titles, strict=True)
            for compared in _judged(each)
        }
        asked = {
            (each.suite, title): words
            for each, title_of in zip(self.measured, self.titles, strict=True)
            if (words := heading_of(each.records).asked)
            for title in title_of.values()
        }
        against = {name: what for name, each in self.plugins.strategies.items() if (what := sets(each)) is not None}
        titles = {each.suite: heading_of(each.records).title for each in self.measured}
        by_suite: dict[str, list[Record]] = {}
        changed: dict[str, dict[str, None]] = {}
        for each in self.measured:
            by_suite.setdefault(each.suite, []).extend(each.records)
            changed.setdefault(each.suite, {})[self.changes[each.folder]] = None
        origins = {suite: plain(f"{line(each)}{_since(changed[suite])}") for suite, each in by_suite.items()}
        everything = [record for each in self.measured for record in each.records]
        origin, grid = self._advice()
        judged = [each for each in self.measured if _judged(each)]
        stale = {each.suite for each in judged if self.changes[each.folder].startswith(first.STALE)}
        return page.About(
            to_use,
            answers,
            against,
            origins,
            titles,
            plain(line(everything, of_suites=True)),
            frozenset(stale),
            plain(origin),
            tuple(tuple(map(plain, row)) for row in (grid.headers, *grid.rows) if grid.rows),
            self._elsewhere(),
            asked,
        )

    def _elsewhere(self) -> dict[tuple[str, str], str]:
        """Return the code that asks other libraries for each row, by its place and name."""
        return {
            (str(row.case.place), row.label): "; ".join(each.code for each in known)
            for results in self.measured
            for compared in results.tables
            for row in compared.rows
            if (known := counterparts.of_case(row.case, self.plugins.strategies))
        }

    def _chosen(self, results: Sequence[Results], choice: Mapping[str, str]) -> str:
        if not choice:
            origin = line([record for each in results for record in each.records])
            return "\n\n".join([origin, *(self._tables(each, False, "") for each in results)])
        if any(each.searched or each.tried for each in results):
            sentence = f"of the limits in '{results[0].folder}' no part can be chosen: leave out all but the name"
            raise insert.InsertError(f"{sentence} in the mark in the document")
        parts = [table.of_choice(each, self.plugins, choice, self._run(each)) for each in results]
        if not any(parts):
            words = " ".join(f"{key}={value}" for key, value in choice.items())
            raise insert.InsertError(f"no table of '{results[0].folder}' is '{words}': mend the mark in the document")
        return "\n\n".join(filter(None, parts))

    def _tables(self, results: Results, headed: bool, title: str) -> str:
        level, machine = "##" if headed else "####", self._origin(results)
        if results.tried:
            return _placed(limits.text(results.records, level), level, machine)
        if results.searched:
            return _placed(fit.text(results.records, level, results.answers), level, machine)
        return table.of_results(results, self.plugins, headed, title, self._run(results))

    def _run(self, results: Results) -> str | None:
        """Return when a run began and at which commit, where there are several of its suite and machine.

        Else an empty text where the suite has several machines, and None where there is nothing to tell apart.
        """
        if self.runs[results.folder, _machines(results)] > 1:
            return _of_run("", results)
        return "" if len(self.machines[results.suite]) > 1 else None

    def _origin(self, results: Results) -> str:
        """Return the machine and the run of some results, where those of their suite are of several."""
        run = self._run(results)
        return "" if run is None else ", ".join(filter(None, (_machines(results), run)))


def _since(changes: Iterable[str]) -> str:
    """Return what has changed since some results, as a sentence after another; an empty text where nothing has."""
    others = [change for change in changes if change != "the same"]
    return f" Since then: {'; '.join(others)}." if others else ""


def _judged(results: Results) -> list[Comparison]:
    """Return the comparisons of rows; limits have none."""
    return [] if results.searched or results.tried else results.tables


def _said(compared: Comparison, plugins: Plugins) -> str:
    """Return what a comparison says as a whole: what to use, and what is to be known of all of its rows."""
    return " ".join(filter(None, (sentence(compared, plugins.strategies), *compared.notes)))


def _machines(results: Results) -> str:
    """Return the machines that results were measured on, or where nothing was measured those that tried."""
    names = dict.fromkeys(name for compared in _judged(results) for name in compared.machines)
    return " and ".join(names or filter(None, dict.fromkeys(map(machine_of, results.records))))


def _of_run(machine: str, results: Results) -> str:
    """Return a machine with when a run of it began, and at which commit."""
    origin = next((record.origin for record in results.records if record.origin.utc), None)
    run = f"{origin.utc[:19].replace('T', ' ')} at {short(origin.commit)}" if origin is not None else ""
    return ", ".join(filter(None, (machine, run)))


def _placed(text: str, level: str, machine: str) -> str:
    """Return limits with their machine below each heading of a level, where one is named."""
    if not machine:
        return text
    return re.sub(rf"^{level} .*$", lambda heading: f"{heading[0]}\n\nOn {escaped(machine)}.", text, flags=re.M)


def _located(answer: Answer, where: str) -> Answer:
    """Return an answer whose claim says where it was decided."""
    return replace(answer, claim=answer.claim.model_copy(update={"says": answer.claim.says + where}))


def _ambiguous(name: str, choice: Mapping[str, str]) -> str:
    """Refuse a mark that is a part of a first page and a folder of results."""
    raise insert.InsertError(
        f"'{name}' is a part of a first page and a folder of results: give the folder another name"
    )


def _whole(text: Callable[[], str], choice: Mapping[str, str]) -> str:
    """Return a text that no mark chooses a part of."""
    return text()
