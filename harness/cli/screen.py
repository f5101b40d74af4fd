"""The two streams of the command line: answers on one, all else on the other."""

from rich.console import Console

out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def note(sentence: str) -> None:
    """Write what is going on to standard error."""
    err.print(sentence)
