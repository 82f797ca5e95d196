"""Rows of averaging."""

import optax

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case, decaying
from tests.reference.fedavg_numpy import FedAvg
from tests.reference.fedexp_numpy import FedExP
from tests.reference.fedopt_numpy import (
    FedAdagrad,
    FedAdam,
    FedAMS,
    FedAvgM,
    FedOptAdam,
    FedYogi,
)

CLIENT = {"client_lr": 0.2}
AMS = {"client_lr": 0.2, "server_lr": 0.1, "tau": 1e-4, "beta2": 0.9}

CASES = [
    Case("fedavg", algorithms.fedavg, FedAvg, LR, main=True),
    Case(
        "fedavg-schedule-transform",
        algorithms.fedavg,
        FedAvg,
        {"client_lr": decaying(0.2)},
        **TRANSFORM,
    ),
    Case(
        "fedopt",
        algorithms.fedopt,
        FedOptAdam,
        {"client_lr": 0.2},
        only_factory={"server_optimizer": optax.adam(0.05, b1=0.8, b2=0.9, eps=1e-3)},
        only_twin={"learning_rate": 0.05, "b1": 0.8, "b2": 0.9, "eps": 1e-3},
        main=True,
    ),
    Case("fedavgm", algorithms.fedavgm, FedAvgM, LR | {"momentum": 0.7}, main=True),
    Case("fedadam", algorithms.fedadam, FedAdam, LR | {"tau": 0.1, "beta2": 0.9}, main=True),
    Case(
        "fedadam-from-zero",
        algorithms.fedadam,
        FedAdam,
        LR | {"tau": 0.1, "beta2": 0.9, "initial_second_moment": 0.0},
    ),
    Case("fedyogi", algorithms.fedyogi, FedYogi, LR | {"tau": 0.1, "beta2": 0.9}, main=True),
    Case("fedadagrad", algorithms.fedadagrad, FedAdagrad, LR | {"tau": 0.1}, main=True),
    Case(
        "fedadagrad-schedule",
        algorithms.fedadagrad,
        FedAdagrad,
        {"client_lr": decaying(0.2), "server_lr": decaying(0.8), "tau": 0.1},
    ),
    Case("fedexp", algorithms.fedexp, FedExP, CLIENT | {"epsilon": 1e-3}, main=True),
    Case(
        "fedexp-last-schedule-transform",
        algorithms.fedexp,
        FedExP,
        {"client_lr": decaying(0.2), "epsilon": 0.0, "average_last_two": False},
        **TRANSFORM,
    ),
    Case("fedams", algorithms.fedams, FedAMS, AMS, main=True),
    Case("fedams-2", algorithms.fedams, FedAMS, AMS | {"option": 2, "tau": 0.1}),
]
