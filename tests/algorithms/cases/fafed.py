"""Rows of fafed."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import TRANSFORM, Case, decaying, falling_root
from tests.reference.fafed_numpy import FAFED, NaiveAdaptiveFedAvg

FAFED_STEPS = {"steps_per_round": 3}  # of the tests' rounds
ADAPTIVE = {
    "client_lr": 0.05,
    "server_lr": 0.8,
    "momentum": 0.3,
    "second_moment_decay": 0.9,
    "stability": 0.1,
}
NAIVE = {"client_lr": 0.02, "second_moment_decay": 0.9}

CASES = [
    Case("fafed", algorithms.fafed, FAFED, ADAPTIVE, only_twin=FAFED_STEPS, main=True, uplink=3),
    Case(
        "fafed-first",
        algorithms.fafed,
        FAFED,
        ADAPTIVE | {"precondition_first_step": True},
        only_twin=FAFED_STEPS,
    ),
    Case(
        "fafed-schedule-transform",
        algorithms.fafed,
        FAFED,
        ADAPTIVE | {"client_lr": falling_root(0.1), "momentum": falling_root(0.9)},
        only_factory=TRANSFORM["only_factory"],
        only_twin=TRANSFORM["only_twin"] | FAFED_STEPS,
    ),
    Case(
        "naive_adaptive_fedavg",
        algorithms.naive_adaptive_fedavg,
        NaiveAdaptiveFedAvg,
        NAIVE | {"server_lr": 0.8, "initial_second_moment": 0.1},
        main=True,
    ),
    Case("naive-from_zero", algorithms.naive_adaptive_fedavg, NaiveAdaptiveFedAvg, NAIVE),
    Case(
        "naive-schedule",
        algorithms.naive_adaptive_fedavg,
        NaiveAdaptiveFedAvg,
        NAIVE | {"client_lr": decaying(0.03), "initial_second_moment": 1.0},
    ),
]
