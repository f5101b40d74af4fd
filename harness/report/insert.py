"""Insert generated text between its two marks in a document, so that no figure is typed by hand."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.machine import whole_file
from harness.refusal import Refusal

Text = Callable[[Mapping[str, str]], str]
"""What writes the text of a place, from the choice that its mark makes."""


MARK = re.compile(r" [^ =]+(?: [^ =]+=[^ ]+)* ")


class InsertError(Refusal):
    """A document without the marks that generated text goes between, or a mark that chooses nothing."""


def insert(document: str, name: str, text: Text) -> str:
    """Return the document with the text in each place of that name: none, one or several.

    A place begins with `<!-- generated: NAME -->` and ends with `<!-- end: NAME -->`. The first mark may choose a part
    of the text: `<!-- generated: NAME place=torch/cpu rows=baseline|checkpoint -->`. Raises InsertError where a place
    has no end.
    """

    def filled(match: re.Match[str]) -> str:
        begin, words, end = match.groups()
        if not end:
            raise InsertError(f"the place of '{name}' has no end: add the line '<!-- end: {name} -->'")
        choice = dict(word.split("=", 1) for word in words.split())
        return f"{begin}\n\n{text(choice).strip()}\n\n{end}"

    begin, end = rf"<!-- generated: {re.escape(name)}((?: [^ =]+=[^ ]+)*) -->", f"<!-- end: {re.escape(name)} -->"
    return re.sub(rf"({begin}).*?({end}|(?=<!-- generated: )|\Z)", filled, document, flags=re.DOTALL)


def text_of(path: Path) -> str:
    """Return the text of a document; raise InsertError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InsertError(f"'{path}' cannot be read ({error}): name a text file that has the marks") from None


def _line_end(path: Path) -> str:
    """Return how the lines of a document end: as the first one does."""
    with path.open("rb") as file:
        return "\r\n" if file.readline().endswith(b"\r\n") else "\n"


def insert_into(path: Path, texts: Mapping[str, Text]) -> list[str]:
    """Insert each text into the places of its name, all or none; return the other names that have places there.

    Raises InsertError where the file cannot be read or written, a mark cannot be read, or no place has such a name.
    """
    old = text_of(path)
    marks = re.findall(r"<!-- generated:(.*?)-->", old)
    for mark in marks:
        if not MARK.fullmatch(mark):
            raise InsertError(
                f"'{path}': '<!-- generated:{mark}-->' cannot be read: write NAME, then KEY=VALUE without blanks"
            )
    names = dict.fromkeys(mark.split()[0] for mark in marks)
    if not names.keys() & texts.keys():
        raise InsertError(
            f"'{path}' has no mark for these results: add '<!-- generated: NAME -->' and '<!-- end: NAME -->'"
        )
    new = old
    for name in filter(texts.__contains__, names):
        new = insert(new, name, texts[name])
    if new != old:
        try:
            whole_file.write(path, new, newline=_line_end(path))
        except OSError as error:
            raise InsertError(f"'{path}' cannot be written ({error.strerror}): give rights, or name another") from None
    return [name for name in names if name not in texts]
