"""How large a suite may be, and the refusal of one that cannot be run."""

from harness.refusal import Refusal

MAX_CASES = 10_000
MAX_RANKS = 1024
MAX_ROUNDS = 100


class SuiteError(Refusal):
    """A suite that cannot be run, in one sentence with its place and the remedy."""
