"""Refuse values of knobs that mean nothing. Each function raises ValueError with one sentence."""


def above_0(strategy: str, **knobs: float) -> None:
    """Refuse values of 0 and less."""
    for name, value in knobs.items():
        if not value > 0:
            raise ValueError(f"{strategy}: {name} is {value}: set {name} above 0")


def at_least_0(strategy: str, **knobs: float) -> None:
    """Refuse values below 0."""
    for name, value in knobs.items():
        if not value >= 0:
            raise ValueError(f"{strategy}: {name} is {value}: set {name} to 0 or more")


def share(strategy: str, **knobs: float) -> None:
    """Refuse values below 0, and those of 1 and more."""
    for name, value in knobs.items():
        if not 0 <= value < 1:
            raise ValueError(f"{strategy}: {name} is {value}: set {name} to 0 or more, and below 1")
