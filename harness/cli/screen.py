"""The two streams of the command line: answers on one, all else on the other."""

from rich.console import Console

from harness.report.text import on_terminal

out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def note(sentence: str) -> None:
    """Write what is going on to standard error."""
    err.print(sentence)


def show(markdown: str, end: str = "", screen: Console = out) -> None:
    """Write an answer: markdown where a file or a program reads it, on a terminal without its escapes."""
    screen.print(on_terminal(markdown) if screen.file.isatty() else markdown, end=end)
