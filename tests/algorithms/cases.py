"""Every method with its NumPy twin; all tests over the catalogue read this table."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_lab import algorithms, compressors
from fedjax_lab.compressors.wrap import message_key
from tests.reference import cfedavg_numpy
from tests.reference import problem as reference
from tests.reference.cfedavg_numpy import CFedAvg
from tests.reference.fafed_numpy import FAFED, NaiveAdaptiveFedAvg
from tests.reference.fedavg_numpy import FedAvg
from tests.reference.fedopt_numpy import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedOptAdam,
    FedYogi,
)
from tests.reference.fedspeed_numpy import FedSpeed, FedSpeedIng
from tests.reference.fedswa_numpy import FedMo, FedMoSWA, FedSWA
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


def falling_root(lr):
    """The schedule of FAFED's theory, over local steps."""
    return lambda t: lr / (1 + t) ** (1 / 3)


def clip_and_decay(max_norm, decay):
    """The twins' transform: global-norm clipping, then weight decay."""

    def transform(g, y):
        norm = np.linalg.norm(g)
        return g * min(1.0, max_norm / max(norm, 1e-300)) + decay * y

    return {"transform": transform}


def clip_and_decay_optax(max_norm, decay):
    transform = optax.chain(optax.clip_by_global_norm(max_norm), optax.add_decayed_weights(decay))
    return {"gradient_transform": transform}


def drop_masks(comp):
    """What ``random_drop`` keeps of a client's message in a round of ``problem.to_batch``."""
    compressor = compressors.random_drop(comp)

    def kept(client, t):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), t), 0)
        message = compressor.compress(
            message_key(jax.random.fold_in(key, client), 0), jnp.ones(reference.DIMENSION)
        )
        return np.asarray(compressor.decompress(message)) > 0

    return kept


LR = {"client_lr": 0.2, "server_lr": 0.8}
TRANSFORM = {
    "only_factory": clip_and_decay_optax(0.5, 0.1),
    "only_twin": clip_and_decay(0.5, 0.1),
}
PER_LEAF = {"options": LR | {"qp_scope": "per_leaf"}, "only_twin": {"leaves": reference.LEAVES}}
MEMORY = {"memory_size": 5, "server_momentum": 0.7, "memory_decay": 0.5}
SWA = {"client_lr": 0.2, "final_lr_ratio": 0.1, "server_lr": 1.5}
MOSWA = SWA | {"momentum": 0.3}
SPEED = LR | {"prox_weight": 0.4, "perturbation_radius": 0.3, "perturbation_weight": 0.7}
UNNORMALIZED = {"normalize_perturbation": False}
UNPERTURBED = {"perturbation_weight": 0.0}
UNCORRECTED = {"correction": False}
DUAL_OF_ALL = {"server_dual": "all"}
INERTIA = {"inertia": decaying(0.5)}
FAFED_STEPS = {"steps_per_round": 3}  # of the tests' rounds
ADAPTIVE = {
    "client_lr": 0.05,
    "server_lr": 0.8,
    "momentum": 0.3,
    "second_moment_decay": 0.9,
    "stability": 0.1,
}
TOP_K = {
    "only_factory": {"compressor": "top_k:0.5"},
    "only_twin": {"compressor": cfedavg_numpy.top_k(0.5)},
}
DROP = {
    "only_factory": {"compressor": "random_drop:0.4"},
    "only_twin": {"compressor": cfedavg_numpy.random_drop(drop_masks(0.4))},
}
NAIVE = {"client_lr": 0.02, "second_moment_decay": 0.9}

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
    Case("fedswa", algorithms.fedswa, FedSWA, SWA, main=True),
    Case("fedswa-schedule", algorithms.fedswa, FedSWA, SWA | {"client_lr": decaying(0.2)}),
    Case("fedswa-ratio", algorithms.fedswa, FedSWA, SWA | {"final_lr_ratio": decaying(0.5)}),
    Case("fedswa-transform", algorithms.fedswa, FedSWA, SWA, **TRANSFORM),
    Case("fedmoswa", algorithms.fedmoswa, FedMoSWA, MOSWA, main=True),
    Case("fedmoswa-I", algorithms.fedmoswa, FedMoSWA, MOSWA | {"control_update": "I"}),
    Case("fedmoswa-schedule", algorithms.fedmoswa, FedMoSWA, MOSWA | {"momentum": decaying(0.5)}),
    Case("fedmoswa-transform", algorithms.fedmoswa, FedMoSWA, MOSWA, **TRANSFORM),
    Case(
        "fedmoswa-first_round",
        algorithms.fedmoswa,
        FedMoSWA,
        SWA,
        only_factory={"momentum": 0.3, "first_round_gamma_one": True},
        only_twin={"momentum": lambda t: 1.0 if t == 0 else 0.3},
    ),
    Case("fedmo", algorithms.fedmo, FedMo, {"client_lr": 0.2, "momentum": 0.3}, main=True),
    Case("fedmo-I", algorithms.fedmo, FedMo, {"client_lr": 0.2, "control_update": "I"}),
    Case("fedspeed", algorithms.fedspeed, FedSpeed, SPEED, main=True),
    Case("fedspeed-defaults", algorithms.fedspeed, FedSpeed, LR),
    Case("fedspeed-constant", algorithms.fedspeed, FedSpeed, SPEED | UNNORMALIZED),
    Case("fedspeed-unperturbed", algorithms.fedspeed, FedSpeed, SPEED | UNPERTURBED),
    Case("fedspeed-radius_0", algorithms.fedspeed, FedSpeed, SPEED | {"perturbation_radius": 0.0}),
    Case("fedspeed-uncorrected", algorithms.fedspeed, FedSpeed, SPEED | UNCORRECTED),
    Case("fedspeed-prox", algorithms.fedspeed, FedSpeed, SPEED | UNCORRECTED | UNPERTURBED),
    Case("fedspeed-all", algorithms.fedspeed, FedSpeed, SPEED | DUAL_OF_ALL),
    Case("fedspeed-all-uncorrected", algorithms.fedspeed, FedSpeed, LR | DUAL_OF_ALL | UNCORRECTED),
    Case("fedspeed-transform", algorithms.fedspeed, FedSpeed, SPEED, **TRANSFORM),
    Case(
        "fedspeed-schedule",
        algorithms.fedspeed,
        FedSpeed,
        SPEED | {"client_lr": decaying(0.2), "perturbation_radius": decaying(0.3)},
    ),
    Case("fedspeed_ing", algorithms.fedspeed_ing, FedSpeedIng, SPEED | {"inertia": 0.3}, main=True),
    Case("fedspeed_ing-schedule", algorithms.fedspeed_ing, FedSpeedIng, SPEED | INERTIA),
    Case("fedspeed_ing-all", algorithms.fedspeed_ing, FedSpeedIng, SPEED | INERTIA | DUAL_OF_ALL),
    Case(
        "fedspeed_ing-uncorrected",
        algorithms.fedspeed_ing,
        FedSpeedIng,
        SPEED | INERTIA | UNCORRECTED,
    ),
    Case("fafed", algorithms.fafed, FAFED, ADAPTIVE, only_twin=FAFED_STEPS, main=True),
    Case(
        "fafed-first",
        algorithms.fafed,
        FAFED,
        ADAPTIVE | {"precondition_first_step": True},
        only_twin=FAFED_STEPS,
    ),
    Case(
        "fafed-schedule",
        algorithms.fafed,
        FAFED,
        ADAPTIVE | {"client_lr": falling_root(0.1), "momentum": falling_root(0.9)},
        only_twin=FAFED_STEPS,
    ),
    Case(
        "fafed-transform",
        algorithms.fafed,
        FAFED,
        ADAPTIVE,
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
    Case("cfedavg", algorithms.cfedavg, CFedAvg, LR, **TOP_K, main=True),
    Case(
        "cfedavg-no_feedback", algorithms.cfedavg, CFedAvg, LR | {"error_feedback": False}, **TOP_K
    ),
    Case(
        "cfedavg-by_steps", algorithms.cfedavg, CFedAvg, LR | {"normalize_by_steps": True}, **TOP_K
    ),
    Case(
        "cfedavg-by_steps-no_feedback",
        algorithms.cfedavg,
        CFedAvg,
        LR | {"normalize_by_steps": True, "error_feedback": False},
        **TOP_K,
    ),
    Case(
        "cfedavg-transform",
        algorithms.cfedavg,
        CFedAvg,
        LR,
        only_factory=TOP_K["only_factory"] | TRANSFORM["only_factory"],
        only_twin=TOP_K["only_twin"] | TRANSFORM["only_twin"],
    ),
    Case("cfedavg-drop", algorithms.cfedavg, CFedAvg, LR, **DROP),
    Case(
        "cfedavg-drop-no_feedback",
        algorithms.cfedavg,
        CFedAvg,
        LR | {"error_feedback": False},
        **DROP,
    ),
]
MAIN = [case for case in CASES if case.main]
