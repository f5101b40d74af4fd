"""The peaks of a device's allocator by phase, whose counters are made up, and what they say of a run."""

import numpy as np
import pytest

from harness import Place
from harness.contract.parts import Parts
from harness.contract.stages import Profile
from harness.machine import memory
from harness.records import Memory
from harness.worker import ranks
from harness.worker.contents import Contents
from harness.worker.device_peaks import DevicePeaks

PLACE = Place("torch", "cuda")


class Device:
    """An allocator with marks that can be reset."""

    EAGER = True

    def __init__(self):
        self.live = self.mark = 0

    def take(self, size):
        self.live += size
        self.mark = max(self.mark, self.live)

    def peak(self, place):
        return {"allocated": self.mark, "retries": 0, "pinned": 0}

    def reset_peak(self, place):
        self.mark = self.live


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def meter():
    return memory.PhaseMeter()


@pytest.fixture
def peaks(device, meter):
    """The peaks of a first step that keeps 10 bytes, takes 35 more for its loss and 20 more in the backward pass."""
    peaks = DevicePeaks(device, PLACE, meter)
    meter.enter("first_step/forward")
    device.take(10)
    meter.enter("first_step/loss")
    device.take(35)
    device.take(-35)
    meter.enter("first_step/backward")
    device.take(20)
    device.take(-30)
    meter.enter(None)
    return peaks


def test_each_phase_has_its_peak_and_the_highest_is_named(peaks):
    assert peaks.of_phase == {"first_step/forward": 10, "first_step/loss": 45, "first_step/backward": 30}
    assert (peaks.highest, peaks.phase) == (45, "first_step/loss")


def test_a_counter_of_0_is_known(peaks):
    figures = peaks.figures()
    assert (figures["peak_device_bytes"], figures["allocation_retries"], figures["pinned_host_bytes"]) == (45, 0, 0)
    assert figures["requested_device_bytes"] is None


def test_the_logits_are_what_the_loss_takes_of_the_device(peaks, device):
    contents = Contents(device, Profile(lambda: 0, lambda: 0, stages={"parameters": 4, "forward": 10}))
    assert contents.by_kind(peaks.of_phase) == {"activations": 6, "logits": 35}


def test_gradients_of_a_piece_of_the_batch_are_no_logits_of_the_next(peaks, device):
    contents = Contents(device, Profile(lambda: 0, lambda: 0, stages={"parameters": 4, "forward": 10, "loss": 17}))
    assert contents.by_kind(peaks.of_phase)["logits"] == 7


@pytest.mark.parametrize(("fed", "activations"), [(4, 50), (12, 48)])
def test_rows_that_are_read_with_the_first_batch_are_no_activations(device, fed, activations):
    profile = Profile(iter([fed]).__next__, lambda: 0, stages={"parameters": 4, "forward": 60})
    contents = Contents(device, profile)
    x, y = np.zeros(2, np.int16), np.zeros(2, np.int8)
    parts = contents.watched(Parts(None, PLACE, batches=lambda parts, windows: iter([(x, y), (x, y)])))
    assert len(list(parts.batches(parts, None))) == 2
    assert contents.by_kind({}) == {"batch": 6, "activations": activations}


@pytest.mark.parametrize(("seen", "sum_of"), [([5, 7], 12), ([5, 7, 9], 12), ([5], None), ([], None)])
def test_a_device_that_showed_no_peak_leaves_no_sum(seen, sum_of):
    figures = ranks.of_devices(Memory(peak_device_bytes=7), seen, 2)
    assert figures.all_ranks_bytes == sum_of
    assert [rank.peak_bytes for rank in figures.ranks] == (seen[:2] if sum_of else [])
