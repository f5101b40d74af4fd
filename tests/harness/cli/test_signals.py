"""Signals that end the command line: which are heard, and what is said of an interruption."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from harness.cli import commands, signals

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
IGNORING = """
import os, signal, sys
from harness.cli import signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
signals.listen()
os.kill(os.getpid(), signal.SIGHUP)
print("went on")
"""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Put back afterwards what is done with signals."""
    handlers, hook = {each: signal.getsignal(each) for each in ENDING}, sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_that_was_ignored_stays_ignored_and_the_others_are_heard(number: signal.Signals) -> None:
    for each in ENDING:
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    signal.signal(number, signal.SIG_IGN)
    signals.listen()
    for each in ENDING:
        assert signal.getsignal(each) is (signal.SIG_IGN if each == number else signals._end)


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", IGNORING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


@pytest.mark.parametrize("verb", ["run", "fit", "doctor", "plan"])
def test_an_interruption_promises_to_resume_where_the_verb_does(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(standalone_mode: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "app", app)
    monkeypatch.setattr(sys, "argv", ["harness", verb, "small.yaml"])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    resumes = "interrupted: what is measured is kept; the same command resumes"
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"{resumes if verb == 'run' else 'interrupted'}\n"
