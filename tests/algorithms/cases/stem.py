"""Rows of stem."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import TRANSFORM, Case, falling_root
from tests.reference.stem_numpy import STEM

STORM = {"client_lr": 0.2, "momentum": 0.3}
FALLING = {"client_lr": falling_root(0.3), "momentum": falling_root(0.9)}
STEPS = {"steps_per_round": 3}  # of the tests' rounds
MEAN = {"prev_at_sync": "mean"}

CASES = [
    Case("stem", algorithms.stem, STEM, STORM, only_twin=STEPS, main=True, uplink=2),
    Case("stem-mean", algorithms.stem, STEM, FALLING | MEAN, only_twin=STEPS),
    Case(
        "stem-schedule-transform",
        algorithms.stem,
        STEM,
        FALLING,
        only_factory=TRANSFORM["only_factory"],
        only_twin=TRANSFORM["only_twin"] | STEPS,
    ),
]
