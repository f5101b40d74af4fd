"""Results files, each read and judged once, for every form of report."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.records import Claim, Record, store
from harness.report.text import visible
from harness.suite.claims import claims_of
from harness.verdicts import claims, judge
from harness.verdicts.judge import Comparison


@dataclass(frozen=True)
class Results:
    """The records of one file, under the name of their suite; `folder` is that of the suite among all results.

    `asked` are claims that are answered in the place of those that the run was made for.
    """

    suite: str
    folder: str
    records: tuple[Record, ...]
    asked: tuple[Claim, ...] | None = None

    @cached_property
    def searched(self) -> bool:
        """Whether these are limits that `harness fit` found."""
        return any(record.limits is not None for record in self.records)

    @cached_property
    def advice(self) -> bool:
        """Whether these are the predictions that `harness advise --save` kept, and not those that a run began with."""
        slots = [record.slot for record in self.records if record.slot is not None]
        of_a_run = any(record.origin.plan for record in self.records)
        return bool(slots) and not of_a_run and all(slot.kind == "predict" for slot in slots)

    @cached_property
    def tried(self) -> bool:
        """Whether these are predictions that `harness doctor --limits` tried."""
        return any(record.trial is not None for record in self.records)

    @cached_property
    def tables(self) -> list[Comparison]:
        """The judged comparisons, or the limits by what they are compared to."""
        return judge.searched(self.records) if self.searched else judge.judge(self.records)

    @cached_property
    def answers(self) -> list[claims.Answer]:
        """The answers to the claims of the run. Raises ClaimError for one that cannot be read."""
        if self.asked is None:
            return claims.answered(self.records, self.tables)
        return [claims.answer(claim, self.tables) for claim in claims.answerable(self.asked, self.records)]


def read(
    files: Iterable[Path],
    warn: Callable[[str], None],
    aliases: Mapping[str, str] | None = None,
    suites: Path | None = None,
) -> list[Results]:
    """Read results files, each once, with former names of strategies by `aliases`.

    `warn` is called for lines that are no records; a file without any is left out beside others.
    With a folder of `suites` the claims that are answered are theirs as they stand now. Raises SuiteError for a suite
    that cannot be read.
    """
    results = []
    for file in {file.resolve(): file for file in files}.values():
        records, problems = store.read(file, aliases)
        for problem in problems:
            warn(problem)
        name = visible(next((record.origin.suite for record in records if record.origin.suite), file.stem))
        folder = Path(os.path.abspath(file)).parent.parent.name  # as it is named, where a link leads elsewhere
        results.append(Results(name, folder, tuple(records), _asked(suites, folder, aliases or {})))
    return [each for each in results if each.records] or results


def _asked(suites: Path | None, folder: str, aliases: Mapping[str, str]) -> tuple[Claim, ...] | None:
    """Return the claims of the suite that a folder of results was made from, if it is there."""
    path = None if suites is None else suites / f"{folder.removesuffix('_fit')}.yaml"
    if path is None or not path.is_file():
        return None
    return tuple(store.renamed_claim(claim, aliases) for claim in claims_of(path))
