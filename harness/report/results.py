"""Results files, each read and judged once, for every form of report."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.records import Record, store
from harness.verdicts import claims, judge
from harness.verdicts.judge import Comparison


@dataclass(frozen=True)
class Results:
    """The records of one file, under the name of their suite; `folder` is that of the suite among all results."""

    suite: str
    folder: str
    records: tuple[Record, ...]

    @cached_property
    def searched(self) -> bool:
        """Whether these are limits that `harness fit` found."""
        return any(record.limits is not None for record in self.records)

    @cached_property
    def tables(self) -> list[Comparison]:
        """The judged comparisons, or the limits by what they are compared to."""
        return judge.searched(self.records) if self.searched else judge.judge(self.records)

    @cached_property
    def answers(self) -> list[claims.Answer]:
        """The answers to the claims of the run. Raises ClaimError for one that cannot be read."""
        return claims.answered(self.records, self.tables)


def read(files: Iterable[Path], warn: Callable[[str], None], aliases: Mapping[str, str] | None = None) -> list[Results]:
    """Read results files, former names of strategies by `aliases`; `warn` is called for lines that are no records."""
    results = []
    for file in files:
        records, problems = store.read(file, aliases)
        for problem in problems:
            warn(problem)
        name = next((record.origin.suite for record in records if record.origin.suite), file.stem)
        results.append(Results(name, file.parent.parent.name, tuple(records)))
    return results
