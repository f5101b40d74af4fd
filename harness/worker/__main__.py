"""Work on one task in a fresh interpreter: `python -m harness.worker SPEC RESULT`."""

import sys
from pathlib import Path

from harness.worker import ranks
from harness.worker.process import leave, work

if __name__ == "__main__":
    leave(lambda: work(Path(sys.argv[1]), Path(sys.argv[2].format(ranks.own()))))
