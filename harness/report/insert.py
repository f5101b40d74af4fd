"""Put generated text between its two marks in a document, so that no figure is typed by hand."""

from pathlib import Path


class InsertError(Exception):
    """A document without the marks that generated text goes between."""


def marks(name: str) -> tuple[str, str]:
    """Give the comment lines between which the text named so stands."""
    return f"<!-- generated: {name} -->", f"<!-- end: {name} -->"


def insert(document: str, name: str, text: str) -> str:
    """Return the document with the text in its place; raise InsertError when the marks are missing."""
    begin, end = marks(name)
    before, found, rest = document.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise InsertError(f"there is no place for '{name}': add the lines '{begin}' and '{end}'")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def has_place(path: Path, name: str) -> bool:
    """Say whether a file has the marks; raise InsertError when it cannot be read."""
    return marks(name)[0] in _text(path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InsertError(f"'{path}' cannot be read ({error}): name a text file that has the marks") from None


def insert_into(path: Path, name: str, text: str) -> bool:
    """Put the text into a file; return whether the file changed."""
    old = _text(path)
    new = insert(old, name, text)
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old
