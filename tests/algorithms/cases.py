"""Every method with its NumPy twin; all tests over the catalogue read this table."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import optax

from fedjax_lab import algorithms
from tests.reference import problem as reference
from tests.reference.fedavg_numpy import FedAvg
from tests.reference.fedopt_numpy import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedOptAdam,
    FedYogi,
)
from tests.reference.gradma_numpy import GradMA, GradMAS, GradMAW
from tests.reference.scaffold_numpy import Scaffold

N = reference.NUM_CLIENTS


@dataclass(frozen=True)
class Case:
    """A factory, its arguments, and the twin that must agree with it."""

    id: str
    factory: Callable
    twin: type
    options: dict = field(default_factory=dict)  # of both
    only_factory: dict = field(default_factory=dict)
    only_twin: dict = field(default_factory=dict)
    main: bool = False  # one per factory: tested under all client maps

    def build(self, loss_fn, **changes):
        return self.factory(loss_fn, **{**self.options, **self.only_factory, **changes})

    def build_twin(self, x0, gradient=reference.gradient):
        return self.twin(x0, N, gradient, **self.options, **self.only_twin)


def decaying(lr):
    """A schedule that NumPy and JAX both evaluate."""
    return lambda t: lr * 0.9**t


def clip_and_decay(max_norm, decay):
    """The twins' transform: global-norm clipping, then weight decay."""

    def transform(g, y):
        norm = np.linalg.norm(g)
        return g * min(1.0, max_norm / max(norm, 1e-300)) + decay * y

    return {"transform": transform}


def clip_and_decay_optax(max_norm, decay):
    transform = optax.chain(optax.clip_by_global_norm(max_norm), optax.add_decayed_weights(decay))
    return {"gradient_transform": transform}


LR = {"client_lr": 0.2, "server_lr": 0.8}
TRANSFORM = {
    "only_factory": clip_and_decay_optax(0.5, 0.1),
    "only_twin": clip_and_decay(0.5, 0.1),
}
PER_LEAF = {"options": LR | {"qp_scope": "per_leaf"}, "only_twin": {"leaves": reference.LEAVES}}
MEMORY = {"memory_size": 5, "server_momentum": 0.7, "memory_decay": 0.5}

CASES = [
    Case("fedavg", algorithms.fedavg, FedAvg, LR, main=True),
    Case("fedavg-schedule", algorithms.fedavg, FedAvg, {"client_lr": decaying(0.2)}),
    Case("fedavg-transform", algorithms.fedavg, FedAvg, LR, **TRANSFORM),
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
    Case("fedyogi", algorithms.fedyogi, FedYogi, LR | {"tau": 0.1, "beta2": 0.9}, main=True),
    Case("fedadagrad", algorithms.fedadagrad, FedAdagrad, LR | {"tau": 0.1}, main=True),
    Case("scaffold", algorithms.scaffold, Scaffold, LR, main=True),
    Case("scaffold-I", algorithms.scaffold, Scaffold, LR | {"control_update": "I"}),
    Case("scaffold-transform", algorithms.scaffold, Scaffold, LR, **TRANSFORM),
    Case("gradma", algorithms.gradma, GradMA, LR | MEMORY, main=True),
    Case("gradma-keep", algorithms.gradma, GradMA, LR | MEMORY | {"keep_local_model": True}),
    Case("gradma_w", algorithms.gradma_w, GradMAW, LR, main=True),
    Case("gradma_w-keep", algorithms.gradma_w, GradMAW, LR | {"keep_local_model": True}),
    Case("gradma_w-per_leaf", algorithms.gradma_w, GradMAW, **PER_LEAF),
    Case("gradma_s", algorithms.gradma_s, GradMAS, LR | MEMORY, main=True),
    Case(
        "gradma_s-per_leaf",
        algorithms.gradma_s,
        GradMAS,
        LR | MEMORY | {"qp_scope": "per_leaf"},
        only_twin={"leaves": reference.LEAVES},
    ),
    Case("gradma_s-margin", algorithms.gradma_s, GradMAS, LR | MEMORY | {"margin": 0.05}),
    Case("gradma_s-no_memory", algorithms.gradma_s, GradMAS, LR | MEMORY | {"memory_size": 0}),
]
MAIN = [case for case in CASES if case.main]
