"""Text that is harmless where it is shown: in markdown, in a spreadsheet, on a terminal."""

import html
import re

CODE = r"(?<!`)(?P<fence>`+)(?!`)(?P<code>.+?)(?<!`)(?P=fence)(?!`)"
"""Code between as many backticks on both sides."""
MARKED = re.compile(CODE + r"|\\(?P<character>[\\`*|\[\]])|\*+")
"""Code, an escaped character, or marks of emphasis."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet would take for the beginning of a formula."""
MARKUP = str.maketrans({"<": "&lt;", ">": "&gt;"} | {character: f"\\{character}" for character in "\\`*|[]"})


def visible(text: str, allowed: str = "") -> str:
    """Replace what a terminal obeys or hides by spaces, but for the characters in `allowed`."""
    return "".join(character if character.isprintable() or character in allowed else " " for character in text)


def escaped(text: str) -> str:
    """Return text that is harmless in markdown and on a terminal: no markup, no control characters, no new cells."""
    return visible(text).translate(MARKUP)


def code(text: str) -> str:
    """Return text as code in markdown, in a cell as well: longer fences for its backticks, its bars escaped."""
    inside = visible(text).replace("|", r"\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", inside)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{inside}{space}{fence}"


def with_code(text: str) -> str:
    """Return text as `escaped` does, but what stands between backticks stays code."""
    pieces, at = [], 0
    for match in re.finditer(CODE, text):
        pieces += [escaped(text[at : match.start()]), code(match["code"])]
        at = match.end()
    return "".join([*pieces, escaped(text[at:])])


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
        if match["code"] is None:
            return match["character"] or ""
        inside = match["code"] if match["fence"] == "`" else match["code"].strip()
        return html.escape(inside.replace(r"\|", "|"), quote=False)

    return html.unescape(MARKED.sub(unmarked, markdown))
