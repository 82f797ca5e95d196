"""The table of degenerate limits: at the edge of its parameters a method becomes another."""

from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms as a
from fedjax_lab import build_round, with_compression
from tests.algorithms.cases import N
from tests.algorithms.problem import flat, initial_params, loss_fn, run_rounds, to_batch
from tests.reference import problem as reference

LR = {"client_lr": 0.2}


class Limit(NamedTuple):
    name: str
    left: object
    right: object
    rounds: int = 6
    max_steps: int = 3
    full_cohort: bool = False


TABLE = [
    Limit(
        "fedavgm momentum 0 = fedavg",
        a.fedavgm(loss_fn, momentum=0.0, **LR),
        a.fedavg(loss_fn, **LR),
    ),
    Limit(
        "fedopt sgd(s) = fedavg server_lr s",
        a.fedopt(loss_fn, optax.sgd(0.7), **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
    ),
    Limit(
        "fedopt sgd with momentum = fedavgm",
        a.fedopt(loss_fn, optax.sgd(0.7, momentum=0.6), **LR),
        a.fedavgm(loss_fn, server_lr=0.7, momentum=0.6, **LR),
    ),
    Limit(
        "fedavgm at lr (1 - b) = averaged momentum at lr",
        a.fedavgm(loss_fn, momentum=0.8, server_lr=0.2, **LR),
        a.fedopt(loss_fn, optax.chain(optax.ema(0.8, debias=False), optax.sgd(1.0)), **LR),
    ),
    Limit(
        "fedadam beta2 1 = averaged momentum at lr / (2 tau)",
        a.fedadam(loss_fn, server_lr=0.4, beta1=0.8, beta2=1.0, tau=0.2, **LR),
        a.fedavgm(loss_fn, server_lr=0.2, momentum=0.8, **LR),
    ),
    Limit(
        "fedyogi beta2 1 = fedadam beta2 1",
        a.fedyogi(loss_fn, server_lr=0.4, beta2=1.0, tau=0.2, **LR),
        a.fedadam(loss_fn, server_lr=0.4, beta2=1.0, tau=0.2, **LR),
    ),
    Limit(
        "scaffold II round 1 = fedavg",
        a.scaffold(loss_fn, server_lr=0.7, **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
        rounds=1,
    ),
    Limit(
        "scaffold I round 1 = fedavg",
        a.scaffold(loss_fn, control_update="I", **LR),
        a.fedavg(loss_fn, **LR),
        rounds=1,
    ),
    Limit(
        "scaffold, one step, all clients = fedavg",
        a.scaffold(loss_fn, **LR),
        a.fedavg(loss_fn, **LR),
        max_steps=1,
        full_cohort=True,
    ),
    Limit(
        "gradma_s without memory = fedavgm",
        a.gradma_s(loss_fn, memory_size=0, server_momentum=0.6, **LR),
        a.fedavgm(loss_fn, momentum=0.6, **LR),
    ),
    Limit(
        "gradma without memory and momentum = gradma_w",
        a.gradma(loss_fn, memory_size=0, server_momentum=0.0, **LR),
        a.gradma_w(loss_fn, **LR),
    ),
    Limit(
        "gradma_w, one step = fedavg",
        a.gradma_w(loss_fn, **LR),
        a.fedavg(loss_fn, **LR),
        max_steps=1,
    ),
    Limit(
        "gradma, one step = gradma_s",
        a.gradma(loss_fn, memory_size=5, **LR),
        a.gradma_s(loss_fn, memory_size=5, **LR),
        max_steps=1,
    ),
    Limit(
        "memory that never overflows = any larger one",
        a.gradma_s(loss_fn, memory_size=N, **LR),
        a.gradma_s(loss_fn, memory_size=6, **LR),
        rounds=1,
    ),
]


BARE = {"correction": False, "perturbation_weight": 0.0}
TABLE += [
    Limit(
        "fedswa, constant rate, server_lr 1 = fedavg",
        a.fedswa(loss_fn, final_lr_ratio=1.0, server_lr=1.0, **LR),
        a.fedavg(loss_fn, **LR),
    ),
    Limit(
        "fedswa, one step = fedavg at its server_lr",
        a.fedswa(loss_fn, server_lr=1.5, **LR),
        a.fedavg(loss_fn, server_lr=1.5, **LR),
        max_steps=1,
    ),
    Limit(
        "fedmoswa II round 1 = fedswa", a.fedmoswa(loss_fn, **LR), a.fedswa(loss_fn, **LR), rounds=1
    ),
    Limit(
        "fedmoswa I round 1 = fedswa",
        a.fedmoswa(loss_fn, control_update="I", **LR),
        a.fedswa(loss_fn, **LR),
        rounds=1,
    ),
    Limit(
        "fedmoswa, constant rate, server_lr 1 = fedmo",
        a.fedmoswa(loss_fn, final_lr_ratio=1.0, server_lr=1.0, **LR),
        a.fedmo(loss_fn, **LR),
    ),
    Limit("fedmo round 1 = scaffold", a.fedmo(loss_fn, **LR), a.scaffold(loss_fn, **LR), rounds=1),
    Limit(
        "fedspeed, no prox, correction and perturbation = fedavg",
        a.fedspeed(loss_fn, prox_weight=1e-13, **BARE, **LR),
        a.fedavg(loss_fn, **LR),
    ),
    Limit(
        "fedspeed radius 0 = weight 0",
        a.fedspeed(loss_fn, perturbation_radius=0.0, **LR),
        a.fedspeed(loss_fn, perturbation_weight=0.0, **LR),
    ),
    Limit(
        "fedspeed, dual of all = of the cohort, all clients",
        a.fedspeed(loss_fn, server_dual="all", **LR),
        a.fedspeed(loss_fn, **LR),
        full_cohort=True,
    ),
    Limit(
        "fedspeed_ing, dual of all = of the cohort, all clients",
        a.fedspeed_ing(loss_fn, inertia=0.3, server_dual="all", **LR),
        a.fedspeed_ing(loss_fn, inertia=0.3, **LR),
        full_cohort=True,
    ),
    Limit(
        "fedspeed_ing without inertia = fedspeed",
        a.fedspeed_ing(loss_fn, inertia=0.0, **LR),
        a.fedspeed(loss_fn, **LR),
    ),
    Limit(
        "fedspeed_ing without inertia = fedspeed, dual of all",
        a.fedspeed_ing(loss_fn, inertia=0.0, server_dual="all", **LR),
        a.fedspeed(loss_fn, server_dual="all", **LR),
    ),
]

TABLE += [
    Limit(
        "cfedavg, identity = fedavg",
        a.cfedavg(loss_fn, compressor="identity", server_lr=0.7, **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
    ),
    Limit(
        "cfedavg, nothing dropped = fedavg",
        a.cfedavg(loss_fn, compressor="top_k:0", **LR),
        a.fedavg(loss_fn, **LR),
    ),
    Limit(
        "cfedavg, nothing dropped at random = fedavg",
        a.cfedavg(loss_fn, compressor="random_drop:0", error_feedback=False, **LR),
        a.fedavg(loss_fn, **LR),
    ),
    Limit(
        "cfedavg by steps, equal steps K, server_lr K = cfedavg",
        a.cfedavg(loss_fn, compressor="top_k:0.7", normalize_by_steps=True, server_lr=2.1, **LR),
        a.cfedavg(loss_fn, compressor="top_k:0.7", server_lr=0.7, **LR),
        full_cohort=True,
    ),
    Limit(
        "cfedavg round 1 = compressed scaffold",
        a.cfedavg(loss_fn, compressor="top_k:0.7", **LR),
        with_compression(a.scaffold(loss_fn, **LR), "top_k:0.7"),
        rounds=1,
    ),
]


@pytest.mark.parametrize("limit", TABLE, ids=lambda limit: limit.name)
def test_limit(limit, x64):
    drawn = reference.make_rounds(
        7,
        limit.rounds,
        cohort_size=N if limit.full_cohort else 4,
        max_steps=limit.max_steps,
        batch_size=4,
        equal_steps=limit.full_cohort,
        weighted=not limit.full_cohort,
    )

    def run(algorithm):
        state = algorithm.init(initial_params(), N)
        state, _ = run_rounds(build_round(algorithm, "scan"), state, drawn)
        return flat(algorithm.params(state))

    left, right = run(limit.left), run(limit.right)
    assert np.abs(left - flat(initial_params())).max() > 1e-2
    np.testing.assert_allclose(left, right, rtol=0, atol=1e-10)


def test_the_mean_of_scaffolds_controls_is_the_servers(x64):
    drawn = reference.make_rounds(2, 8, cohort_size=4, max_steps=3, batch_size=4)
    for option in ("I", "II"):
        algorithm = a.scaffold(loss_fn, control_update=option, **LR)
        state = algorithm.init(initial_params(), N)
        state, _ = run_rounds(build_round(algorithm, "vmap"), state, drawn)
        mean = jax.tree.map(lambda rows: rows.mean(0), state.clients)
        np.testing.assert_allclose(flat(mean), flat(state.server.control), atol=1e-12)


@pytest.mark.parametrize(("gamma", "agreeing"), [(0.2, 1), (4 / N, 2)])
def test_fedmo_parts_from_scaffold_in_the_stated_round(gamma, agreeing, x64):
    drawn = reference.make_rounds(
        15, 3, cohort_size=4, max_steps=3, batch_size=4, equal_steps=True, weighted=False
    )
    paths = []
    for algorithm in (a.fedmo(loss_fn, momentum=gamma, **LR), a.scaffold(loss_fn, **LR)):
        state, path = algorithm.init(initial_params(), N), []
        for t, (_, padded) in enumerate(drawn):
            state, _ = jax.jit(algorithm.round_fn)(state, to_batch(padded, t))
            path.append(flat(algorithm.params(state)))
        paths.append(path)
    difference = np.abs(np.subtract(*paths)).max(axis=1)
    assert (difference[:agreeing] < 1e-12).all()
    assert (difference[agreeing:] > 1e-5).all()


def test_a_kept_local_model_is_used(x64):
    """With conflicting gradients, x_{-1} = the client's last model is not x_{-1} = x_t."""
    drawn = reference.make_rounds(0, 8, cohort_size=5, max_steps=3, batch_size=8)
    ends = []
    for keep in (False, True):
        algorithm = a.gradma_w(loss_fn, client_lr=2.0, keep_local_model=keep)
        state = algorithm.init(initial_params(), N)
        state, _ = run_rounds(build_round(algorithm, "scan"), state, drawn)
        ends.append(flat(algorithm.params(state)))
    assert np.abs(ends[0] - ends[1]).max() > 1e-3
