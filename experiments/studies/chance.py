"""How often a claim would show, or be contradicted, if no method differed from another.

    python -m experiments.studies.chance

simulates it. Against one rival both have 2.5 %: the two ends of a 95 % interval. Against several,
the one with the best mean counts, and it is the best partly by chance: a false "contradicted" gets
likelier with the number of rivals, and a false "shows" nearly impossible.
"""

from typing import NamedTuple

import numpy as np

from fedjax_lab.estimates import standard_errors

_DRAWS = 400_000


class Chance(NamedTuple):
    """Shares of tests in percent, of one measure.

    Attributes:
      shows: of tests that show.
      contradicted: of tests that are contradicted.
    """

    shows: float
    contradicted: float


def simulate(rivals: int, seeds: int, draws: int = _DRAWS) -> Chance:
    """Draw accuracies of equal methods, independent and normal, and decide by the rules.

    What all methods of a seed have in common cancels in the paired differences.

    Args:
      rivals: of a claim; the one with the best mean counts.
      seeds: of its runs.
      draws: tests that are simulated.
    """
    rng = np.random.default_rng(0)
    ahead = rng.standard_normal((draws, 1, seeds), np.float32)
    others = rng.standard_normal((draws, rivals, seeds), np.float32)
    best = others.mean(2).argmax(1)
    differences = ahead[:, 0] - others[np.arange(draws), best]
    half = standard_errors(seeds) * differences.std(1, ddof=1) / np.sqrt(seeds)
    mean = differences.mean(1)
    return Chance(100 * float((mean > half).mean()), 100 * float((mean < -half).mean()))


# What ``main`` prints, in percent: seeds -> of 1, 2, ... rivals.
_SHOWS = {
    3: (2.5, 0.99, 0.58, 0.39, 0.27, 0.23, 0.18, 0.17, 0.14, 0.11, 0.11, 0.09, 0.08),
    10: (2.5, 0.61, 0.28, 0.14, 0.09, 0.06, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.02),
}
_CONTRADICTED = {
    3: (2.5, 4.02, 5.10, 5.87, 6.64, 7.17, 7.70, 8.16, 8.58, 8.91, 9.16, 9.63, 9.81),
    10: (2.5, 4.41, 5.91, 7.22, 8.40, 9.38, 10.31, 11.15, 11.92, 12.64, 13.36, 13.95, 14.45),
}


def of(rivals: int, seeds: int) -> Chance:
    """Return the chances of a test, in percent.

    Args:
      rivals: those that were run, up to 13.
      seeds: of both; the numbers are those of 3 seeds or of 10, whichever is nearer.
    """
    seeds = 3 if seeds < 7 else 10
    return Chance(_SHOWS[seeds][rivals - 1], _CONTRADICTED[seeds][rivals - 1])


def main() -> None:
    """Print the chances for each number of rivals and seeds."""
    for seeds, known in _SHOWS.items():
        for number in range(1, len(known) + 1):
            found = simulate(number, seeds)
            print(f"{number} rivals, {seeds} seeds: shows {found.shows:.2f} %, ", end="")
            print(f"contradicted {found.contradicted:.2f} %")


if __name__ == "__main__":
    main()
