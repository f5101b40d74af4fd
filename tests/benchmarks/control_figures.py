"""Time 40 groups of four equal cases and count those that come out different: at most 5 may.

Run it on a quiet machine: `python tests/benchmarks/control_figures.py`. It takes some minutes and exits with 1 when the
control fails more often.
"""

import sys
from statistics import median

from harness.contract import plugins
from harness.verbs import doctor

GROUPS, ROUNDS, ALLOWED = 40, 3, 5


def main() -> int:
    loaded = plugins.load()
    noises = [noise for _ in range(GROUPS) if (noise := doctor.aa_noise(loaded, ROUNDS)) is not None]
    different = sum(noise.word in ("slower", "faster") for noise in noises)
    ratios = sorted(noise.ratio for noise in noises)
    widths = [noise.high / noise.low for noise in noises]
    print(f"{len(noises)} groups of {ROUNDS} rounds: {different} came out different (at most {ALLOWED} may)")
    print(f"ratio: median {median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"interval of a group: median x {median(widths):.2f}, largest x {max(widths):.2f}")
    return int(different > ALLOWED or len(noises) < GROUPS)


if __name__ == "__main__":
    sys.exit(main())
