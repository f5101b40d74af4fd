"""A fresh process that is asked: it ends with who asked, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.machine import orphans

ASKING = """
import sys
from harness.contract.place import Place
from harness.machine import child, environment
env = environment.variables("predict", Place("torch", "cpu"), "corpus", 1, None)
child.answer_of("asked", sys.argv[1] + "/pid", env={**env, "PYTHONPATH": sys.argv[1]})
"""
ASKED = """
import os, sys, time
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(300)
"""
PATIENCE = 20.0
"""Seconds in which all has ended that is ended at all: beside other tests a keeper may start late."""


def within(seconds: float, happened) -> bool:
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.01)
    return happened()


def test_what_is_asked_ends_with_a_harness_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(ASKED)
    with subprocess.Popen([sys.executable, "-c", ASKING, str(tmp_path)]) as parent:
        try:
            assert within(PATIENCE, (tmp_path / "pid").exists)
            asked = int((tmp_path / "pid").read_text())
        finally:
            parent.kill()
    ended = within(PATIENCE, lambda: not orphans._began(asked) or orphans._over(asked))
    if not ended:
        os.kill(asked, signal.SIGKILL)
    assert ended, "it outlived who asked"
