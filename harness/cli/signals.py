"""Signals that end a run: Ctrl-C is a KeyboardInterrupt, the others a SystemExit, whatever they come in."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDED = 128
"""The status of what a signal ended, before the signal's number is added."""
INTERRUPTED = ENDED + signal.SIGINT
_raised: list[BaseException] = []


def listen() -> None:
    """Raise an exception for each signal that ends a run, from now on; what was ignored before stays ignored."""
    _raised.clear()
    sys.unraisablehook = _send_again
    for number in (signal.SIGTERM, signal.SIGHUP):  # the second is the terminal that was closed
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it
            signal.signal(number, _end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, _end)


@contextmanager
def undisguised() -> Iterator[None]:
    """Raise a signal that came here as itself: a lock or a serializer that it came in raises an error of its own."""
    before = len(_raised)
    try:
        yield
    except Exception:
        if len(_raised) > before:
            raise _raised[-1] from None
        raise


def _end(number: int, frame: object) -> None:
    _raised.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(ENDED + number))
    raise _raised[-1]


def _send_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Send a signal again that came while an object was finalized: Python prints what is raised there, and goes on."""
    match dropped.exc_value:
        case KeyboardInterrupt():
            number: int = signal.SIGINT
        case SystemExit(code=int(status)) if status > ENDED:
            number = status - ENDED
        case _:
            sys.__unraisablehook__(dropped)
            return
    again = threading.Timer(0.05, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
