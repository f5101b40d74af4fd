"""Text that is harmless where it is shown: in markdown, in a spreadsheet, on a terminal."""

import html
import re

CODE = re.compile(r"(?<!\\)`([^`]+)`")
"""What stands between backticks."""
MARKED = re.compile(CODE.pattern + r"|\\([\\`*|\[\]])|\*+")
"""Code, an escaped character, or marks of emphasis."""
NO_CODE = frozenset("\\`|<>")
"""What code in a cell cannot hold: what ends it or the cell, and what may not stand on a page unescaped."""
REFERENCE = re.compile(r"&(?=#?\w+;)")
"""What would show another character than itself."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet would take for the beginning of a formula."""
ESCAPED = re.compile(r"\\([\\`*|\[\]])|&(?:lt|gt|amp);")
"""What `escaped` made of a character."""
BETWEEN_CELLS = re.compile(r"(?<!\\)((?:\\\\)*)\|")
"""The bar between two cells, and the backslashes before it that stand for themselves."""
MARKUP = str.maketrans({"<": "&lt;", ">": "&gt;"} | {character: f"\\{character}" for character in "\\`*|[]"})


def visible(text: str, allowed: str = "") -> str:
    """Replace what a terminal obeys or hides by spaces, but for the characters in `allowed`."""
    return "".join(character if character.isprintable() or character in allowed else " " for character in text)


def escaped(text: str) -> str:
    """Return text that is harmless in markdown and on a terminal: no markup, no control characters, no new cells."""
    return REFERENCE.sub("&amp;", visible(text)).translate(MARKUP)


def code(text: str) -> str:
    """Return text as code in markdown, where it can be that in a cell of a table; else `escaped`."""
    return f"`{visible(text)}`" if NO_CODE.isdisjoint(text) else escaped(text)


def with_code(text: str) -> str:
    """Return text as `escaped` does, but what stands between two backticks is code where it can be."""
    pieces = CODE.split(text)  # every other one stood between backticks
    return "".join(code(piece) if at % 2 else escaped(piece) for at, piece in enumerate(pieces))


def with_full_stop(sentence: str) -> str:
    """Return a sentence with a full stop, unless it asks something."""
    return sentence if sentence.endswith(("?", ".")) else f"{sentence}."


def cell(text: str) -> str:
    """Return text that is harmless in a spreadsheet and on a terminal: no formula, no control characters."""
    line = visible(text, allowed="\n")
    return f"'{line}" if line.startswith(FORMULA) else line


def row_name(label: str) -> str:
    """Return the label of a row as markdown, as code unless it is the baseline's."""
    return label if label == "baseline" else code(label)


def plain(markdown: str) -> str:
    """Return a sentence of ours without its markup: what was escaped as it was, no emphasis, no code marks."""

    def unmarked(match: re.Match[str]) -> str:
        return html.escape(match[1], quote=False) if match[1] else match[2] or ""

    return html.unescape(MARKED.sub(unmarked, markdown))


def on_terminal(markdown: str) -> str:
    """Return markdown as a terminal shows it: each character that was escaped as it was, and no table crooked by that.

    Lines of code stay as they are.
    """
    lines, in_code = [], False
    for line in markdown.split("\n"):
        fence = line.startswith("```")
        lines.append(line if fence or in_code else _row(line) if line.startswith("|") else _unescaped(line))
        in_code ^= fence
    return "\n".join(lines)


def _row(line: str) -> str:
    """Return the row of a table with each cell as it was, and as wide."""
    cells = BETWEEN_CELLS.sub(r"\1\n", line).split("\n")
    plain_cells = [_unescaped(each) for each in cells]
    return "|".join(f"{each}{' ' * (len(cell) - len(each))}" for cell, each in zip(cells, plain_cells, strict=True))


def _unescaped(text: str) -> str:
    return ESCAPED.sub(lambda match: match[1] or html.unescape(match[0]), text)
