"""Read an untrusted YAML file into plain values, or refuse it in one sentence with line and column.

PyYAML's `safe_load` runs no code, but a few lines of aliases or merge keys keep it busy for seconds, it keeps
the last of two equal keys, and it reads `no` as False, `017` as 15, `1:30` as 90 and `1e-3` as text. So only
its parser is used: its events are checked one by one, and the values are built from them by fewer and simpler
rules. It is the parser written in Python, not libyaml's: every machine then gives the same answer at the same
line and column, and 256 KiB of the worst input found take about 0.3 s.

Plain scalars are `null`, `~` or nothing; `true` and `false`; decimal integers without leading zeros; decimal
floats such as `1e-3`. Everything else, and everything quoted, is text. Keys are text as written.
"""

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from harness.contract.plugins import printable

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_EVENTS = 20_000
MAX_SCALAR = 4096
MAX_NUMBER = 32

Location = tuple[str | int, ...]

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NOT_ZERO = re.compile(r"[-+0.]*[1-9]")
_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")  # as the parser counts them
_CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False}
_REFUSED = {
    "*": "an unquoted * starts an alias, which is not allowed; write text with a * in quotes, as in '*/cpu'",
    "&": "an unquoted & starts an anchor, which is not allowed; write the value out, or text in quotes",
    "!": "an unquoted ! starts a tag, which is not allowed; remove it, or write text in quotes",
    "%": "a line that starts with % is a directive, which is not allowed; remove it",
}


class YamlError(ValueError):
    """A YAML file that cannot be read, in one sentence.

    `where` is the file's name, with control characters escaped; `line` and `column` count from 1 and are None
    where the whole file is meant.
    """

    def __init__(self, message: str, where: str = "", line: int | None = None, column: int | None = None):
        super().__init__(message)
        self.where, self.line, self.column = where, line, column


@dataclass(frozen=True)
class Document:
    """What a file says, and on which line it says it.

    `data` is made of dict, list, str, int, float, bool and None alone. `lines` gives the line, from 1, of
    every key and list item by its path from the root, such as `("strategies", 2, "chunked_loss")`.
    """

    data: dict[str, Any]
    lines: Mapping[Location, int]


def load(path: Path) -> Document:
    """Read one regular file of at most 256 KiB of UTF-8.

    Never waits: a named pipe is refused instead of read. Raises YamlError, whatever is wrong.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_BYTES + 1) if regular else b""
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        _refuse(str(path), f"cannot be read ({printable(reason)}); give the path of a readable YAML file")
    if not regular:
        _refuse(str(path), "is not a regular file; give the path of a YAML file")
    return loads(data, str(path))


def loads(text: bytes | str, name: str = "<suite>") -> Document:
    """Read YAML text; `name` stands for the file in messages. Raises YamlError, whatever is wrong."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > MAX_BYTES:
        _refuse(name, f"holds more than {MAX_BYTES} bytes; split it into smaller files")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        problem = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        _refuse(name, problem, _mark_after(data[: error.start].decode()))

    events = _checked(_parse(text, name), name)
    next(events)  # the start of the stream
    if isinstance(next(events), yaml.StreamEndEvent):
        _refuse(name, "holds no values; write lines such as 'key: value'")
    root = next(events)
    if not isinstance(root, yaml.MappingStartEvent):
        _refuse(name, "the file is not a mapping; write lines such as 'key: value'", root.start_mark)
    lines: dict[Location, int] = {}
    value = _value(root, events, (), lines, name)
    for _ in events:  # a second document is refused while it is read
        pass
    return Document(value, lines)


def line_of(document: Document, path: Sequence[str | int]) -> int | None:
    """Return the line, from 1, of the longest beginning of `path` that is in the file; None if none is."""
    beginnings = (tuple(path[:length]) for length in range(len(path), 0, -1))
    return next((document.lines[known] for known in beginnings if known in document.lines), None)


def fault(document: Document, error: ValidationError) -> str:
    """Return what a model found wrong first in a document, after its line and key: `, line 3: sentences.0.id: ...`."""
    first = error.errors()[0]
    line = line_of(document, first["loc"])
    return f"{f', line {line}' if line else ''}: {'.'.join(map(str, first['loc']))}: {first['msg']}"


def _parse(text: str, name: str) -> Iterator[Any]:
    """Yield PyYAML's events; turn each of its errors into a YamlError."""
    try:
        loader: Any = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        problem = f"the character {_quote(text[error.position])} is not allowed in YAML; remove it"
        _refuse(name, problem, _mark_after(text[: error.position]))
    try:
        while loader.check_event():
            yield loader.get_event()
    except yaml.MarkedYAMLError as error:
        _refuse(name, *_explain(error, text))
    except (ValueError, OverflowError):
        # What chr() and int() raise for "\UFFFFFFFF" and a %YAML version of 5000 digits gets through PyYAML.
        problem = "a number here is too large; write the character itself, or no directive"
        _refuse(name, problem, loader.get_mark())
    finally:
        loader.dispose()


def _explain(error: yaml.MarkedYAMLError, text: str) -> tuple[str, Any]:
    """Return what a syntax error most likely is, and where."""
    start: Any = error.context_mark
    mark: Any = error.problem_mark or start
    places = [(text[place.index : place.index + 1], place) for place in (start, mark) if place]
    if places[0][0] not in ("'", '"'):  # within quotes nothing is special
        for sign, place in places:
            if sign in ("*", "&", "!") or (sign == "%" and place.column == 0):
                return _REFUSED[sign], place
        if sign in ("%", "@", "`"):
            return f"unquoted text may not start with {sign}; write it in quotes", mark
        if sign == "\t":
            return "a tab may not indent or separate; write spaces", mark
    context = f"{error.context} from line {start.line + 1}: " if start else ""
    problem = printable(f"{context}{error.problem}")
    return f"not YAML ({problem}); check quotes, brackets and indentation here", mark


def _checked(events: Iterator[Any], name: str) -> Iterator[Any]:
    """Yield the events on; refuse on sight what could be costly or read in two ways."""
    depth = documents = 0
    for count, event in enumerate(events, 1):
        problem, start, end = None, event.start_mark, event.end_mark
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            # It reaches from the first directive, even one that PyYAML ignores, to the end of `---`.
            problem = _REFUSED["%"] if start.line != end.line else None
        if count > MAX_EVENTS:
            problem = f"the file holds more than {MAX_EVENTS} YAML events; split it into smaller files"
        elif depth > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} levels deep; use fewer"
        elif documents > 1:
            problem = "a second document starts here; put it in a file of its own"
        elif isinstance(event, yaml.AliasEvent):
            problem = _REFUSED["*"]
        elif getattr(event, "anchor", None) is not None:
            problem = _REFUSED["&"]
        elif getattr(event, "tag", None) is not None:
            problem = _REFUSED["!"]
        elif isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR:
            problem = f"a value of {len(event.value)} characters, more than {MAX_SCALAR}; shorten it"
        if problem:
            _refuse(name, problem, start)
        yield event


def _value(event: Any, events: Iterator[Any], path: Location, lines: dict[Location, int], name: str) -> Any:
    """Build the value that starts with `event`; note the line of each key and item below it."""
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, name) if event.implicit[0] else _text(event, name)

    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Any] = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            at = (*path, len(items))
            lines[at] = item.start_mark.line + 1
            items.append(_value(item, events, at, lines, name))
        return items

    mapping: dict[str, Any] = {}
    while not isinstance(entry := next(events), yaml.MappingEndEvent):
        mark = entry.start_mark
        if not isinstance(entry, yaml.ScalarEvent):
            _refuse(name, "a key may not be a list or a mapping; write text, in quotes if need be", mark)
        key = _text(entry, name)
        at = (*path, key)
        if key == "<<" and entry.implicit[0]:
            _refuse(name, "the merge key << is not allowed; write the keys out", mark)
        if key in mapping:
            _refuse(name, f"the key {_quote(key)} is on line {lines[at]} already; keep one of the two", mark)
        lines[at] = mark.line + 1
        mapping[key] = _value(next(events), events, at, lines, name)
    return mapping


def _scalar(event: Any, name: str) -> str | int | float | bool | None:
    """Read a plain scalar: null, a boolean, a decimal number, or else text."""
    text = _text(event, name)
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if not _FLOAT.fullmatch(text):  # an integer matches too
        return text
    if len(text) > MAX_NUMBER:
        problem = f"the number {_quote(text)} has more than {MAX_NUMBER} characters; shorten it, or quote it"
        _refuse(name, problem, event.start_mark)
    if _INTEGER.fullmatch(text):
        return int(text)
    number = float(text)
    if math.isinf(number) or (number == 0 and _NOT_ZERO.match(text)):
        problem = f"the number {_quote(text)} is outside the range of a 64-bit float; write one inside it"
        _refuse(name, problem, event.start_mark)
    return number


def _text(event: Any, name: str) -> str:
    r"""Return a scalar as text; join the pairs `\ud83d\ude00` by which JSON writes one character."""
    try:
        return str(event.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        problem = f"the text {_quote(event.value)} holds half of a surrogate pair; write the character itself"
        _refuse(name, problem, event.start_mark)


def _refuse(name: str, problem: str, mark: Any = None) -> NoReturn:
    """Raise the YamlError; the parser's own error, which quotes the file raw, is not shown with it."""
    where = printable(name)
    if mark is None:
        raise YamlError(f"{where}: {problem}", where) from None
    line, column = mark.line + 1, mark.column + 1
    raise YamlError(f"{where}, line {line}, column {column}: {problem}", where, line, column) from None


def _mark_after(before: str) -> yaml.Mark:
    """Return the mark of what follows the text `before`."""
    rows = _LINE_BREAK.split(before)
    return yaml.Mark("", len(before), len(rows) - 1, len(rows[-1]), None, 0)


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
