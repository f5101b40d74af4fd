"""Ten questions of someone who never saw the harness, the command that answers each, and the seconds it takes.

    python tests/benchmarks/question_figures.py [--write]

Each command runs once, in a new folder and with an empty cache, one after the other, and on nothing but the machine it
is asked on: a GPU need not be there. With `--write` the table goes into docs/questions.md.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tabulate import tabulate

from harness.machine import facts
from harness.report.insert import insert_into

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/questions.md"
HEADS = ("question", "command", "where the answer stands", "seconds", "seconds again")


class Question(NamedTuple):
    """What is asked, the words after `harness`, and where in what is printed the answer stands."""

    text: str
    words: str
    where: str


QUESTIONS = (
    Question(
        "What takes the memory in my run, and what is against it?",
        "plan long_context --explain baseline --place torch/cpu -k baseline",
        "the table of kinds",
    ),
    Question(
        "Will an 8B model fit on 24 GiB?",
        "plan --model qwen3-8b --tokens 2048 --gpu rtx4090 --with bfloat16,qlora,checkpoint,fused_loss",
        "the column `fits`",
    ),
    Question(
        "Which options should I use?",
        "advise --model qwen3-0.6b --tokens 2048 --gpu rtx4060 --predict-only --with checkpoint,bfloat16 "
        "--with fused_loss",
        "the line that begins with `Use`",
    ),
    Question(
        "How long may a text be?",
        "fit --model qwen3-0.6b --over tokens --gpu rtx4090 --predict-only --with bfloat16,checkpoint,fused_loss",
        "the column `predicted`",
    ),
    Question("What does checkpointing cost?", "show checkpoint", "the lines `measured in`"),
    Question("Is the answer still right in bfloat16?", "report results/precision", "the column `answer`"),
    Question(
        "Why does it run out while it evaluates or saves?",
        "plan --model smollm2-135m --tokens 256 --evaluations 2 --place torch/cpu --with checkpoint "
        "--with checkpoint,streamed_save",
        "the column `peak in`",
    ),
    Question(
        "What does padding cost on texts of all lengths?",
        "plan --model smollm2-135m --tokens 512 --documents 64 --batch 4 --place torch/cpu --with packed",
        "the column `of baseline`",
    ),
    Question("How do I try an idea of my own?", "new strategy my_idea", "three files, with the commands that run them"),
    Question(
        "What of the five documents is true?", "report results --documents suites/claims.yaml", "the column `verdict`"
    ),
)


def seconds(question: Question, folder: Path, cache: Path) -> float:
    """Return the seconds that a command takes; end with what it printed where it is refused."""
    begun = time.perf_counter()
    words = [sys.executable, "-m", "harness", *shlex.split(question.words)]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, check=False
    )
    taken = time.perf_counter() - begun
    if done.returncode:
        sys.exit(f"harness {question.words}: {done.stdout}{done.stderr}")
    return taken


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Ask every question twice: with an empty cache, and again."""
    for question in QUESTIONS:
        with TemporaryDirectory() as name:
            folder, cache = Path(name) / "here", Path(name) / "cache"
            folder.mkdir()
            (folder / "suites").symlink_to(ROOT / "suites")
            shutil.copytree(ROOT / "results", folder / "results")  # its own, since commands write beside what they read
            first = seconds(question, folder, cache)
            again = f"{seconds(question, folder, cache):.0f}" if question.words.split()[0] != "new" else ""
        print(f"{first:6.1f} s  {question.text}", file=sys.stderr, flush=True)
        yield question.text, f"`harness {question.words}`", question.where, f"{first:.0f}", again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/questions.md")
    asked = parser.parse_args()
    table = tabulate(
        list(rows()), HEADS, tablefmt="pipe", colalign=(*["left"] * 3, "right", "right"), disable_numparse=True
    )
    text = f"*Asked {date.today()} at commit {facts.commit()}, on {facts.name()}.*\n\n{table}"
    if asked.write:
        insert_into(DOCUMENT, {"questions": lambda choice: text})
    else:
        print(text)


if __name__ == "__main__":
    main()
