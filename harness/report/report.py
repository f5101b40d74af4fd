"""All results as one report: its tables, figures, pictures and page, and the answers to what documents say."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from harness.contract.plugins import Plugins
from harness.records.store import StoreError
from harness.report import charts, documents, fit, insert, page, table
from harness.report.export import Figures, as_csv, as_json, of_tables
from harness.report.results import Results
from harness.verdicts.claims import Answer
from harness.verdicts.documents import Documents, Found, Sentence, answered

TITLE = "Memory strategies, measured"
DOCUMENTS = "documents"
"""The name of the place in a document where the answers to what documents say go."""


@dataclass(frozen=True)
class Report:
    """Results in the order of the report, and what documents say of them, if that is asked."""

    results: tuple[Results, ...]
    plugins: Plugins
    documents: Documents | None = None

    @cached_property
    def sentences(self) -> list[Sentence]:
        """What documents say, answered. Raises ClaimError where an expression cannot be read."""
        if self.documents is None:
            return []
        return answered(self.documents, [Found(each.folder, each.tables, each.answers) for each in self.results])

    @cached_property
    def figures(self) -> list[Figures]:
        """Every row as plain values; limits that `fit` found have none."""
        rows = []
        for each in self.results:
            if not each.searched:
                rows += of_tables(each.suite, each.tables, table.tokens_per_step(each.tables, self.plugins))
        return rows

    def markdown(self, title: str = "") -> str:
        """Write the answers to documents where they were asked for, else all tables, each under its suite's name."""
        if self.documents is not None:
            return documents.text(self.documents, self.sentences)
        return "\n".join(self._tables(each, True, title) for each in self.results)

    def csv(self) -> str:
        """Write a line for each row."""
        return as_csv(self.figures)

    def json(self) -> str:
        """Write an object for each row."""
        return as_json(self.figures)

    def put_into(self, path: Path) -> None:
        """Insert the tables of each folder, and the answers to documents, where a document has their marks.

        Raises InsertError where it cannot be read, or where a mark chooses what is not there.
        """
        by_folder: dict[str, list[Results]] = {}
        for each in self.results:
            by_folder.setdefault(each.folder, []).append(each)
        for name, results in by_folder.items():
            insert.insert_into(path, name, partial(self._chosen, results))
        if (said := self.documents) is not None:
            insert.insert_into(path, DOCUMENTS, lambda choice: documents.text(said, self.sentences))

    def pictures(self, folder: Path, only: str = "") -> Iterator[Path]:
        """Draw the charts of each suite, or those whose name contains `only`; yield the files."""
        for name in dict.fromkeys(row["suite"] for row in self.figures):
            drawn = charts.of_rows([row for row in self.figures if row["suite"] == name])
            yield from charts.save({each: drawn[each] for each in drawn if only in each}, folder, name)

    def write_page(self, path: Path) -> None:
        """Write everything as one offline page; raise StoreError where the file cannot be written."""
        answers: dict[str, list[Answer]] = {}
        limits: dict[str, list[fit.Limits]] = {}
        for each in self.results:
            answers.setdefault(each.suite, []).extend(each.answers)
            limits.setdefault(each.suite, []).extend(fit.limits(each.records))
        text = page.html(TITLE, self.figures, answers, limits, self.documents, self.sentences)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"the page cannot be written to '{path}' ({error.strerror}): name another file") from None

    def _chosen(self, results: Sequence[Results], choice: Mapping[str, str]) -> str:
        if not choice:
            return "\n".join(self._tables(each, False, "") for each in results)
        parts = [table.of_choice(each, self.plugins, choice) for each in results]
        if not any(parts):
            words = " ".join(f"{key}={value}" for key, value in choice.items())
            raise insert.InsertError(f"no table of '{results[0].folder}' is '{words}': mend the mark in the document")
        return "\n\n".join(filter(None, parts))

    def _tables(self, results: Results, headed: bool, title: str) -> str:
        if results.searched:
            return fit.text(results.records, "##" if headed else "####", results.answers)
        return table.of_results(results, self.plugins, headed, title)
