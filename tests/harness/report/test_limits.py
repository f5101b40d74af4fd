"""What came of predictions that were tried as limits, in one sentence."""

from harness.records import Trial
from harness.report.limits import summary

MIB = 1 << 20


def test_how_far_a_bound_was_above_the_peak_is_said_as_a_share_of_that_peak() -> None:
    trial = Trial(predicted_peak_bytes=190 * MIB, at_most_bytes=300 * MIB, at_most="ok", peak_bytes=200 * MIB)
    assert "What cases of 100 MiB or more take at most was 50.0% above their peak on average." in summary([trial])
