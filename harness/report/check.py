"""What a check of plugins found, as text."""

from collections.abc import Sequence

from harness.verbs.check import Finding


def text(findings: Sequence[Finding]) -> str:
    """Write a line for each trial, below it each broken promise, and at the end how many there are."""
    lines = []
    for finding in findings:
        where = f" ({finding.where})" if finding.where else ""
        if finding.untested:
            lines.append(f"not tried  {finding.what}{where}: {finding.untested}")
            continue
        lines.append(f"{'WRONG' if finding.faults else 'kept':<9}  {finding.what}{where}")
        lines += [f"           - {fault}" for fault in finding.faults]
    faults = sum(len(finding.faults) for finding in findings)
    untried = sum(bool(finding.untested) for finding in findings)
    summary = {0: "the contract is kept", 1: "1 promise is broken"}.get(faults, f"{faults} promises are broken")
    trials = len(findings) - untried
    summary += f"; {trials} trial{'' if trials == 1 else 's'}"
    summary += f", {untried} not tried" if untried else ""
    return "\n".join([*lines, summary]) + "\n"
