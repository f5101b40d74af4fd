"""What the doctor found, as text."""

from tabulate import tabulate

from harness.machine.checkups import MIB, Calibration, Checkup


def text(checkup: Checkup) -> str:
    """Write calibrations, noise and findings, each finding with its remedy."""
    rows = [(each.way, f"{each.true_bytes / MIB:.1f}", _seen(each), _judgement(each)) for each in checkup.calibrations]
    pieces = [
        f"machine {checkup.machine}",
        tabulate(rows, ("known bytes in", "MiB", "seen", ""), tablefmt="pipe", disable_numparse=True),
    ]
    if checkup.noise is not None:
        noise = checkup.noise
        verdict = "equal" if noise.clean else "NOT equal: trust no speed verdict here, or use more rounds"
        spread = f"{noise.ratio:.3f} x ({noise.low:.3f}-{noise.high:.3f})"
        pieces.append(f"two equal cases over {noise.rounds} rounds: {spread}, {verdict}")
    findings = [f"- {finding.what}: {finding.remedy}" for finding in checkup.findings]
    pieces.append("\n".join(findings) if findings else "nothing that would spoil figures was found")
    return "\n\n".join(pieces) + "\n"


def _seen(calibration: Calibration) -> str:
    return "" if calibration.seen_bytes is None else f"{calibration.seen_bytes / MIB:.2f}"


def _judgement(calibration: Calibration) -> str:
    if calibration.good is None:
        return f"not tried: {calibration.reason}"
    return "good" if calibration.good else "OFF by more than 0.5 MiB and 1 %"
