"""What one worker process is asked to do, and the files of rows that it reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from harness.records.case import Case, Value

Kind = Literal["predict", "reference", "numerics", "memory", "pilot", "time", "contract"]

TURN_PIPE = "turn"
"""The pipe in the folder of a task by which its process says that it waits for its turn."""


def id_type(vocabulary: int) -> str:
    """Return the narrowest type that holds all ids of a vocabulary."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class TokenFile:
    """Point at `tokens` ids in `path`, all below `vocabulary`.

    `vocabulary` is what was asked for, or with 0 what the corpus has. `digest` is the sha256 of the
    little-endian ids: equal digests mean that two machines trained on the same tokens.
    """

    path: Path
    tokens: int
    vocabulary: int
    dtype: str
    digest: str


@dataclass(frozen=True)
class DocumentFile(TokenFile):
    """Point at the ids of whole `documents`, end to end, and at their `lengths` [documents] in tokens.

    `left_out` documents before the last one were longer than was asked for.
    """

    lengths: Path
    documents: int
    left_out: int


@dataclass(frozen=True)
class FrameFile:
    """Point at `frames` rows of `features` in `path`, and at a label below `classes` for each in `labels`.

    A label takes `label_bytes`: 8 where numpy made it of Python's integers.
    """

    path: Path
    labels: Path
    frames: int
    features: int
    classes: int
    dtype: str
    digest: str
    label_bytes: int = 4


class Task(Value):
    """What a worker is to do. `cases` holds one case, but for the predictor, which takes many.

    `corpora` are the rows that each group of cases reads, None where the workload draws its own. `environment` are
    variables that the strategies set beside those of the harness. With `calls` a prediction lists the work of a step
    call by call, for those who want its time. A task of time with more than one of `turns` stops itself before each,
    so that others can have theirs.
    """

    kind: Kind
    cases: tuple[Case, ...]
    run_id: str
    parent: int
    folder: str
    corpora: dict[str, DocumentFile | TokenFile | FrameFile | None] = Field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    steps: int = 3
    warmup: int = 1
    turns: int = 1
    reference: str | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    calls: bool = False

    @property
    def case(self) -> Case:
        return self.cases[0]

    @property
    def corpus(self) -> DocumentFile | TokenFile | FrameFile | None:
        """The rows of the first case."""
        return self.corpora.get(self.case.comparison_key)
