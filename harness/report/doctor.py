"""A doctor's findings as text."""

from tabulate import tabulate

from harness.machine.checkups import Calibration, Checkup, Noise
from harness.verbs.doctor import Failure

MIB = 1 << 20
DIFFERENT = "NOT equal, which chance alone shows in 1 of 20 checkups: see the findings below, and use a quiet machine"
WORDS = {"within 5 %": "equal within 5 %", "slower": DIFFERENT, "faster": DIFFERENT}
"""What the words of time say of equal cases."""


def text(checkup: Checkup, noise: bool = True) -> str:
    """Write calibrations, noise, if it was to be measured, and findings, each with its remedy."""
    rows = [(each.way, f"{each.true_bytes / MIB:.1f}", _seen(each), _judgement(each)) for each in checkup.calibrations]
    pieces = [
        f"machine {checkup.machine}",
        tabulate(rows, ("known bytes in", "MiB", "seen", ""), tablefmt="pipe", disable_numparse=True),
    ]
    if checkup.noise is not None:
        pieces.append(_noise(checkup.noise))
    elif noise:
        pieces.append("noise: could not be measured")
    findings = [f"- {finding.what}: {finding.remedy}" for finding in checkup.findings]
    pieces.append("\n".join(findings) if findings else "nothing that would spoil figures was found")
    return "\n\n".join(pieces) + "\n"


def _noise(noise: Noise) -> str:
    """Write how equal cases came out, in a word that says no more than the interval."""
    word = WORDS.get(noise.word, "open: this machine is too noisy to say")
    ratio = f"{noise.ratio:.2f} x ({noise.low:.2f}-{noise.high:.2f})"
    figures = (
        ("rounds drift by", noise.drift),
        ("processes of a round scatter by", noise.scatter),
        ("steps of a process by", noise.within),
    )
    shown = ", ".join(f"{what} {figure:.1%}" for what, figure in figures if figure is not None)
    return f"equal cases over {noise.rounds} rounds: {ratio}, {word}{f'; {shown}' if shown else ''}"


def _seen(calibration: Calibration) -> str:
    return "" if calibration.seen_bytes is None else f"{calibration.seen_bytes / MIB:.2f}"


def _judgement(calibration: Calibration) -> str:
    if isinstance(calibration, Failure):
        return f"FAILED: {calibration.reason}"
    if calibration.good is None:
        return f"not tried: {calibration.reason}"
    return "good" if calibration.good else "OFF by more than 0.5 MiB and 1 %"
