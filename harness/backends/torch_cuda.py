"""Predict what a torch run takes on a CUDA device that is not there, and what it puts into the host's memory."""

from collections.abc import Callable, Mapping

from harness.backends import NO_VARIABLES, Batch, cards
from harness.backends.cuda_allocator import Allocator
from harness.backends.torch_cuda_operators import pretended
from harness.backends.torch_cuda_storage import DeviceStorage
from harness.backends.torch_memory import traced
from harness.contract.parts import Parts
from harness.records.forecast import Forecast

VARIABLE, EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
"""The variable by which torch's allocator is set, and the setting that lets segments grow."""


def run(
    build: Callable[[], Parts], batch: Batch, steps: int, environment: Mapping[str, str] = NO_VARIABLES
) -> Forecast:
    """Return the peak bytes of each phase on the chosen card, which need not be there, above what priming leaves.

    Beside them stand what torch's allocator takes from the driver for it, what the driver counts for the process, and
    what lies in the host's memory instead.
    """
    card = cards.chosen()
    device = DeviceStorage(card, allocator=Allocator(expandable=EXPANDABLE in environment.get(VARIABLE, "")))
    device.settle()
    forecast = traced(build, batch, steps, device, pretended(device))
    reserved = device.allocator.peak_reserved
    return forecast._replace(
        reserved_bytes=reserved,
        driver_bytes=None if card.context_bytes is None else reserved + card.context_bytes,
        host_bytes=device.peak_host + device.pinned.locked,
        target=card.name,
    )
