"""The peaks of a device's allocator, phase by phase: read and reset at every boundary of the host's phases."""

from typing import Any

from harness.contract.place import Place
from harness.machine.memory import PhaseMeter

DEVICE = "cuda"
OF_DEVICE = {
    "peak_device_bytes": "allocated",
    "requested_device_bytes": "requested",
    "reserved_device_bytes": "reserved",
    "allocation_retries": "retries",
    "pinned_host_bytes": "pinned",
}
"""The peaks of a device's allocator: their names in a record and those that a backend gives them."""


class DevicePeaks:
    """The highest of each of the allocator's counters, the phase that allocated most, and the peak of each phase."""

    def __init__(self, backend: Any, place: Place, meter: PhaseMeter) -> None:
        self.peaks: dict[str, int] = {}
        self.of_phase: dict[str, int] = {}
        self.phase: str | None = None
        self._backend, self._place, self._running = backend, place, meter.current
        inner = meter.on_change

        def turn(meter: PhaseMeter) -> None:
            inner(meter)
            self._turn(meter.current)

        meter.on_change = turn

    @property
    def highest(self) -> int:
        """The most bytes that were allocated so far; 0 where the allocator has shown none."""
        return self.peaks.get("allocated", 0)

    def now(self) -> int:
        """Return the peak since the running phase began, in bytes."""
        return int(self._backend.peak(self._place).get("allocated", 0))

    def _turn(self, entered: str | None) -> None:
        now = self._backend.peak(self._place)
        for name, value in now.items():
            if name == "allocated" and value > self.highest:
                self.phase = self._running
            self.peaks[name] = max(value, self.peaks.get(name, 0))
        if self._running is not None:
            self.of_phase[self._running] = max(now.get("allocated", 0), self.of_phase.get(self._running, 0))
        self._backend.reset_peak(self._place)
        self._running = entered

    def figures(self) -> dict[str, Any]:
        """Return the peaks by the names that they have in a record."""
        return {figure: self.peaks.get(name) for figure, name in OF_DEVICE.items()}
