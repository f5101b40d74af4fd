"""Where a case runs."""

from typing import NamedTuple

NAMES = ("torch", "jax")
DEVICES = ("cpu", "cuda")


class Place(NamedTuple):
    """Where a case runs: a backend (`torch`, `jax`) and a device (`cpu`, `cuda`)."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}/{self.device}"

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read `backend/device`; raise ValueError for anything else."""
        backend, slash, device = str(text).partition("/")
        if not (backend and slash and device) or "/" in device:
            raise ValueError(f"{text!r} is not a place: write backend/device, for example torch/cpu")
        return cls(backend, device)
