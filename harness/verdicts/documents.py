"""What documents say, row by row, held against all results: which claim of which suite answers each sentence."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.records import Claim, Value
from harness.records.store import renamed_claim
from harness.suite import yaml
from harness.verdicts import claims
from harness.verdicts.claims import Answer
from harness.verdicts.expressions import ClaimError
from harness.verdicts.judge import Comparison


class Sentence(Value):
    """One sentence of a document, and in a line why it is so, or why it was not tested.

    All claims whose id is its own, alone or with words after it, are shown with it, unless another sentence has more of
    those words; those that `by` lists, or else the one of just its id, decide it, and `figures` says in words what the
    figures of each of these are. With a `suite` (a folder of results) and an expression `that` it asks those results a
    question of its own.
    """

    id: str = Field(min_length=1, max_length=64)
    says: str = Field(min_length=1, max_length=1000)
    why: str = Field("", max_length=1000)
    by: list[str] = Field(default_factory=list)
    figures: dict[str, str] = Field(default_factory=dict)
    suite: str = ""
    that: str = Field("", max_length=1000)
    where: dict[str, bool | int | float | str] = Field(default_factory=dict)

    @property
    def deciding(self) -> list[str]:
        """The ids of the claims that decide it."""
        return self.by or [self.id]


class Documents(BaseModel):
    """The documents by their letter, and what they say."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    documents: dict[str, str]
    sentences: list[Sentence]


@dataclass(frozen=True)
class SuiteResults:
    """The results of one suite: the folder they lie in, their judged comparisons and the answers to its own claims."""

    folder: str
    tables: Sequence[Comparison]
    answers: Sequence[Answer]


@dataclass(frozen=True)
class Judgement:
    """What a document says, with the answers to it, each from the suite named."""

    sentence: Sentence
    answers: tuple[tuple[Answer, str], ...]

    @property
    def verdict(self) -> str:
        """What the deciding answers come to; `in part` where some hold and some do not.

        It is verified only where each deciding claim is answered.
        """
        decided = {name: self._answered(name) - {"untested"} for name in self.sentence.deciding}
        verdicts = set().union(*decided.values())
        if "in part" in verdicts or {"verified", "refuted"} <= verdicts:
            return "in part"
        if "refuted" in verdicts:
            return "refuted"
        if not all(decided.values()):
            return "untested"
        return "inconclusive" if "inconclusive" in verdicts else "verified"

    def _answered(self, name: str) -> set[str]:
        return {answer.verdict for answer, _ in self.answers if answer.claim.id == name}


def read(path: Path) -> Documents:
    """Read a file of sentences; raise ClaimError with one sentence for anything else."""
    try:
        document = yaml.load(path)
        documents = Documents.model_validate(document.data)
    except yaml.YamlError as error:
        raise ClaimError(str(error)) from None
    except ValidationError as error:
        raise ClaimError(f"{path}{yaml.fault(document, error)}") from None
    twice = next((id for id, count in Counter(each.id for each in documents.sentences).items() if count > 1), None)
    if twice is not None:
        raise ClaimError(f"{path}: '{twice}' is the id of several sentences: give each its own")
    for sentence in documents.sentences:
        if sentence.id[0] not in documents.documents:
            raise ClaimError(f"{path}: '{sentence.id}' is of no document: name '{sentence.id[0]}' among the documents")
        if bool(sentence.that) != bool(sentence.suite):
            raise ClaimError(f"{path}: '{sentence.id}': give both `suite` and `that`, or neither")
        if other := sentence.figures.keys() - set(sentence.deciding):
            raise ClaimError(f"{path}: '{sentence.id}': `figures` names '{min(other)}', which does not decide it")
    return documents


def answered(
    documents: Documents, results: Sequence[SuiteResults], aliases: Mapping[str, str] | None = None
) -> list[Judgement]:
    """Answer each sentence by all results, with former names of strategies by `aliases`.

    Raise ClaimError where an expression cannot be read.
    """
    ids = [sentence.id for sentence in documents.sentences]
    return [Judgement(each, tuple(_answers(each, results, ids, aliases or {}))) for each in documents.sentences]


def _answers(
    sentence: Sentence, results: Sequence[SuiteResults], ids: Sequence[str], aliases: Mapping[str, str]
) -> Iterator[tuple[Answer, str]]:
    for result in results:
        if sentence.that and result.folder == sentence.suite:
            claim = Claim(id=sentence.id, says=sentence.says, that=sentence.that, where=sentence.where)
            yield claims.answer(renamed_claim(claim, aliases), result.tables), result.folder
    for result in results:
        for answer in result.answers:
            if answer.claim.id in sentence.deciding or _owner(answer.claim.id, ids) == sentence.id:
                yield answer, result.folder


def _owner(claim: str, ids: Sequence[str]) -> str | None:
    """Return which of the ids a claim's begins with, the longest; None where there is none."""
    return max((each for each in ids if f"{claim} ".startswith(f"{each} ")), key=len, default=None)
