"""What a check of plugins found, as text."""

from collections.abc import Sequence

from harness.verbs.check import Finding


def text(found: Sequence[Finding]) -> str:
    """Write a line for each thing that was tried, below it each broken promise, and at the end how many there are."""
    lines = []
    for finding in found:
        where = f" ({finding.where})" if finding.where else ""
        if finding.untested:
            lines.append(f"not tried  {finding.what}{where}: {finding.untested}")
            continue
        lines.append(f"{'WRONG' if finding.faults else 'kept':<9}  {finding.what}{where}")
        lines += [f"           - {fault}" for fault in finding.faults]
    faults = sum(len(finding.faults) for finding in found)
    untried = sum(bool(finding.untested) for finding in found)
    told = "the contract is kept" if not faults else f"{faults} promises are broken" if faults > 1 else "1 is broken"
    return (
        "\n".join([*lines, f"{told}; {len(found) - untried} trials" + (f", {untried} not tried" if untried else "")])
        + "\n"
    )
