"""The suite that a command line asks for when it names a model in place of a file."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.contract.plugins import nearest
from harness.suite.bounds import SuiteError
from harness.workloads.causal_lm import configs

LEAN = "checkpoint,fused_loss"
USUAL = (LEAN, "bfloat16", f"bfloat16,{LEAN}", f"bfloat16,lora,{LEAN}", f"bfloat16,qlora,{LEAN}")
"""The rows of a suite that says nothing about strategies: full training, and what most take where that does not fit."""
USUAL_ON_RANKS = (
    f"ddp,{LEAN}",
    f"zero2,{LEAN}",
    f"fsdp,{LEAN}",
    f"bfloat16,fsdp,{LEAN}",
    f"bfloat16,qlora,fsdp,{LEAN}",
)
"""Those of one that says on how many ranks it runs."""
WORKLOADS = ("causal_lm", "causal_lm_documents")
"""What trains a published model: on windows of one length, and on texts of all lengths."""
USUAL_TOKENS = 2048
LEAST_TOKENS = 128
"""Where a search for the most tokens begins, if nothing else is said."""
OPTIONS = {"shape": "--model", "places": "--place", "strategies": "--with", "ranks": "--ranks"}
"""The option that writes each key of the suite."""
MEMBER = re.compile(r"\s*([\w.-]+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")
KNOB = re.compile(r"\s*(\w+)\s*=\s*(.*?)\s*")
VALUE = re.compile(r"\s*([\w.+/-]+)\s*")
OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Values as Python writes them, in YAML."""


@dataclass(frozen=True)
class Model:
    """A model, and how it is to be trained: `rows` are strategies as a table writes them, joined by commas.

    Where `tokens` are not named they are the usual ones, as far as the model has positions. With `documents` it is
    trained on so many texts of all lengths, those of the standard library of Python; with `evaluations` it is evaluated
    after the steps, saved and resumed. With `ranks` rows that divide the run do so among that many, each of which has a
    row of the batch if nothing else is said.
    """

    name: str
    tokens: int | None = None
    batch: int | None = None
    rows: Sequence[str] = ()
    documents: int | None = None
    evaluations: int | None = None
    usual_tokens: int = USUAL_TOKENS
    ranks: int | None = None

    @property
    def stem(self) -> str:
        """What the suite and its results are called: as the model, or as its folder or file."""
        if self.name in configs.published():
            return self.name
        path = Path(os.path.abspath(self.name))  # links keep their names: caches name files by their contents
        folder = path if path.is_dir() else path.parent
        name = folder.name if path in (folder, folder / "config.json") else path.stem
        return re.sub(r"[^\w.-]", "-", name) or "model"

    def _is_of_the_hub(self) -> bool:
        """Check whether it is named like a repository of the Hub, and is none whose configuration is known."""
        path = re.fullmatch(r"[\w.-]+/[\w.-]+", self.name) is not None and not self.name.endswith(".json")
        return path and not self.name.startswith(".") and not Path(self.name).exists()

    def suite(self, places: Sequence[str]) -> str:
        """Write the suite as YAML. Raises SuiteError for a model that is not there and for a row that is none."""
        if self._is_of_the_hub():
            hint = nearest(self.name.rpartition("/")[2].lower(), configs.published())
            remedy = f"give the path of its config.json{hint}"
            raise SuiteError(f"--model: there is no published configuration and no file '{self.name}': {remedy}")
        try:
            values = configs.read(self.name)
            positions = configs.of(values, "max_position_embeddings")
        except ValueError as error:
            raise SuiteError(f"--model: {error}") from None
        if self.tokens and self.tokens > positions:
            change = f"changes: {{{configs.key(values, 'max_position_embeddings')}: {self.tokens}}}"
            remedy = f"give at most that many, or a suite whose shape says `{change}`"
            raise SuiteError(
                f"--tokens: {self.tokens:,} are more than the {positions:,} positions of {self.stem}: {remedy}"
            )
        tokens = self.tokens or min(self.usual_tokens, positions)
        key = "preset" if self.name in configs.published() else "config"
        sizes = {"batch": self.batch or self.ranks, "documents": self.documents, "evaluations": self.evaluations}
        more = "".join(f", {name}: {size}" for name, size in sizes.items() if size)
        texts = self.documents is not None
        lines = [
            f"title: {json.dumps(f'{self.stem} at {tokens:,} tokens')}",
            f"workload: {WORKLOADS[bool(texts)]}",
            f"places: [{', '.join(places)}]",
            f"corpus: {'standard_library' if texts else 'zipf'}",
            f"shape: {{{key}: {json.dumps(self.name)}, tokens: {tokens}{more}{', longer: skip' if texts else ''}}}",
            "strategies:",
            *(f"  - {row(each)}" for each in self.rows or (USUAL_ON_RANKS if self.ranks else USUAL)),
            *([f"ranks: {self.ranks}"] if self.ranks else []),
            "rounds: 0",
        ]
        return "\n".join(lines) + "\n"


def names(text: str) -> list[str]:
    """Return the names of the strategies in `checkpoint, chunked_loss(chunk=512)`."""
    return [match[1] for match in MEMBER.finditer(text)]


def row(text: str) -> str:
    """Write `checkpoint, chunked_loss(chunk=512)` as an entry of `strategies`."""
    members: list[str] = []
    at = 0
    while at < len(text) or not members:
        match = MEMBER.match(text, at)
        if match is None:
            raise SuiteError(f"--with: '{text}' is no list of strategies: write NAME,NAME(knob=value),...")
        at = match.end()
        members.append(_member(match[1], match[2], text))
    return members[0] if len(members) == 1 else f"[{', '.join(members)}]"


def _member(name: str, knobs: str | None, text: str) -> str:
    if not knobs:
        return name
    settings: list[tuple[str, list[str]]] = []
    for piece in knobs.replace("'", "").replace('"', "").split(","):
        knob = KNOB.fullmatch(piece)
        value = VALUE.fullmatch(piece if knob is None else knob[2])
        if value is None and knob is not None:
            raise SuiteError(f"--with: '{knob[2]}' in '{text}' is no value: write it in letters, digits and ._+/-")
        if knob is not None and value is not None:
            settings.append((knob[1], [OF_PYTHON.get(value[1], value[1])]))
        elif value is not None and settings:  # of a value that has commas itself: targets=q_proj,v_proj
            settings[-1][1].append(value[1])
        else:
            raise SuiteError(f"--with: '{piece.strip()}' in '{text}' sets no knob: write knob=value")
    written = (f"{key}: {each[0] if len(each) == 1 else json.dumps(','.join(each))}" for key, each in settings)
    return f"{{{name}: {{{', '.join(written)}}}}}"
