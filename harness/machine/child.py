"""A question to a fresh process, and its answer."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from harness.contract.plugins import printable
from harness.machine import orphans


class AnswerError(Exception):
    """A process that ended without an answer, in one sentence."""


def answer_of(module: str, *arguments: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Run a module in a fresh process and return the JSON object that it printed in its last line.

    Raise AnswerError, with the last line that it wrote to standard error, where it printed none.
    """
    orphans.start()  # should this process be killed, the other ends with it
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else "it printed nothing"
        raise AnswerError(printable(f"the process of {module} ended with {done.returncode}: {reason[:300]}")) from None
