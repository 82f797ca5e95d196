"""One measurement for each theorem: what is run, what is predicted.

A measurement returns series -> [seeds] at one point. Rates are those of the theorem with L = 1,
unless its text says otherwise.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory.measure import SEEDS, rounds_until, trace
from experiments.theory.problems import Logistic, logistic, separable
from fedjax_lab import algorithms

Series = Mapping[str, np.ndarray]


class Measurement(NamedTuple):
    """A theorem's prediction and how it is measured.

    Attributes:
      theorem: its name.
      title: what is measured.
      axis: what x is.
      values: the points of x.
      run: (point, seeds) -> series.
      predicted: the slope that the theorem's bound has; None: the theorem names none.
      measured: what y is.
      setting: how, in words.
    """

    theorem: str
    title: str
    axis: str
    values: Sequence[float]
    run: Callable[[Any, Sequence[int]], Series]
    predicted: float | None
    measured: str
    setting: str


_GRADIENT = "mean squared gradient over the rounds"


def _mean_gradient(make, problem, seeds, **how):
    """Return the mean of ||grad f||^2 over the rounds of a run, [seeds]."""
    return np.asarray(trace(make, problem, jnp.asarray(seeds), **how)).mean(1)


# --- CFedAvg

_TEXTS = {"top-k 0.9": "top_k:0.9", "random drop 0.9": "random_drop:0.9"}
_COMPRESSORS = {
    "none": algorithms.fedavg,
    **{
        name: functools.partial(algorithms.cfedavg, compressor=text)
        for name, text in _TEXTS.items()
    },
}
_OWN_STEPS = {
    name: functools.partial(algorithms.cfedavg, compressor=text, normalize_by_steps=True)
    for name, text in {"none": "identity", **_TEXTS}.items()
}


def _corollary_4_3(seeds, clients=8, steps=4, rounds=2048):
    """Corollary 4.3: eta_L = 1 / (sqrt(T) K L), eta = sqrt(K m)."""
    how = {"rounds": rounds, "cohort_size": clients, "steps": steps}
    how |= {"client_lr": 1 / (np.sqrt(rounds) * steps), "server_lr": np.sqrt(steps * clients)}
    problem = separable(clients, 0.5)
    return {
        name: _mean_gradient(make, problem, seeds, **how) for name, make in _COMPRESSORS.items()
    }


def _corollary_4_7(rounds):
    """Each client takes 1 to 20 local steps, new ones in every round; K_min = 1."""
    how = {"rounds": rounds, "cohort_size": 8, "steps": 20, "most": 20}
    return {**how, "client_lr": 1 / np.sqrt(rounds), "server_lr": np.sqrt(8)}


def cfedavg_unequal_steps(rounds, seeds):
    """Measure CFedAvg at T with different local steps."""
    problem, how = separable(8, 0.5), _corollary_4_7(rounds)
    return {name: _mean_gradient(make, problem, seeds, **how) for name, make in _OWN_STEPS.items()}


def _error_and_change(problem, algorithm, state, metrics):
    del problem, algorithm, state
    return jnp.stack([metrics["error_sq"], metrics["change_sq"]])


def cfedavg_error(rounds, seeds):
    """Measure the largest mean squared error e over the largest mean squared change u."""
    problem, how = separable(8, 0.5), _corollary_4_7(rounds)
    found = {}
    for name in _TEXTS:
        seen = trace(_OWN_STEPS[name], problem, jnp.asarray(seeds), look=_error_and_change, **how)
        largest = np.asarray(seen).max(1)
        found[name] = largest[:, 0] / largest[:, 1]
    return found


# --- GradMA

gradma = functools.partial(algorithms.gradma, memory_size=32, server_momentum=0.5, memory_decay=0.5)


def gradma_clients(cohort_size, seeds):
    """Measure GradMA at the cohort size S, of 32 clients."""
    rounds, steps = 1024, 4
    how = {"rounds": rounds, "cohort_size": cohort_size, "steps": steps}
    how |= {"client_lr": 1 / (np.sqrt(rounds) * steps), "server_lr": np.sqrt(cohort_size / steps)}
    problem = separable(32, 0.5, noise=0.0)
    return {
        "GradMA": _mean_gradient(gradma, problem, seeds, **how),
        "FedAvg": _mean_gradient(algorithms.fedavg, problem, seeds, **how),
    }


# --- FAFED

_FALLING = 8.0  # w in (w + t)^(-1/3)


def _root_rate(t):
    return 0.5 * (_FALLING + t) ** (-1 / 3)


def _momentum(t):
    return jnp.minimum(1.0, 4.0 * (_FALLING + t) ** (-2 / 3))


_stem = functools.partial(algorithms.stem, client_lr=_root_rate, momentum=_momentum)
_fafed = functools.partial(
    algorithms.fafed,
    client_lr=_root_rate,
    momentum=_momentum,
    second_moment_decay=0.9,
    stability=1.0,
)


def fafed_steps(total, seeds):
    """Measure FAFED, STEM and FedAvg at the steps T = 16 q^3, with 4 clients and q a round."""
    steps = round((total / 16) ** (1 / 3))
    how = {"rounds": int(total) // steps, "cohort_size": 4, "steps": steps}
    problem = separable(4, 0.5)
    return {
        "FAFED": _mean_gradient(_fafed, problem, seeds, **how),
        "STEM": _mean_gradient(_stem, problem, seeds, **how),
        "FedAvg": _mean_gradient(
            algorithms.fedavg, problem, seeds, **how, client_lr=2 / np.sqrt(total)
        ),
    }


# --- FedSWA and FedMoSWA

_FINAL_LR_RATIO = 0.1  # FedMoSWA's rho
_fedmoswa = functools.partial(algorithms.fedmoswa, final_lr_ratio=_FINAL_LR_RATIO)


def _theorem_5_2(seeds, cohort_size=8, steps=4, rounds=2048):
    """Rates as of Corollary 4.3 of CFedAvg, so that all three have the same bound.

    FedMoSWA's rate falls within a round; it starts higher, so that the sum over a round is equal.
    """
    client_lr, server_lr = 1 / (np.sqrt(rounds) * steps), np.sqrt(steps * cohort_size)
    mean_share = 1 - (1 - _FINAL_LR_RATIO) * (steps - 1) / (2 * steps)
    methods = {
        "FedMoSWA": (_fedmoswa, client_lr / mean_share),
        "SCAFFOLD": (algorithms.scaffold, client_lr),
        "FedAvg": (algorithms.fedavg, client_lr),
    }
    how = {"rounds": rounds, "cohort_size": cohort_size, "steps": steps, "server_lr": server_lr}
    return {
        name: _mean_gradient(make, separable(32, 0.5), seeds, **how, client_lr=lr)
        for name, (make, lr) in methods.items()
    }


_NUM_REPLACED = 24
_STABLE = {
    "FedAvg": algorithms.fedavg,
    "FedSAM": functools.partial(algorithms.fedsam, perturbation_radius=0.05),
    "FedSWA": algorithms.fedswa,
    "FedMoSWA": functools.partial(algorithms.fedmoswa, control_update="I"),
}


def _model(problem, algorithm, state, metrics):
    del problem, metrics
    return algorithm.params(state)["w"]


def data_sets(heterogeneity, seed, num_clients=10, num_examples=20):
    """Return (x, y) of 25 federations: one, and the same with one example replaced, 24 times.

    The new example is another draw of the same client.

    Args:
      heterogeneity: as in ``logistic``.
      seed: decides all draws.
      num_clients, num_examples: N and n.
    """
    whole = logistic(num_clients, 2 * num_examples, heterogeneity, seed=seed)
    x, y = np.asarray(whole.x), np.asarray(whole.y)
    rng = np.random.default_rng([seed, 1])
    found = [(x[:, :num_examples], y[:, :num_examples])]
    for client in rng.integers(0, num_clients, _NUM_REPLACED):
        changed_x, changed_y = (table.copy() for table in found[0])
        place, new = rng.integers(num_examples), num_examples + rng.integers(num_examples)
        changed_x[client, place], changed_y[client, place] = x[client, new], y[client, new]
        found.append((changed_x, changed_y))
    return tuple(np.stack(tables) for tables in zip(*found, strict=True))


def stability(heterogeneity, rounds, seeds, methods=_STABLE):
    """Return the distance of two runs whose data differ in one example, method -> [seeds].

    Both runs have the same cohorts, mini-batches and first model. The distance is that of the
    models after the last round, the mean over the 24 examples of ``data_sets``.
    """
    found = {name: [] for name in methods}
    for seed in seeds:
        x, y = data_sets(heterogeneity, seed)
        how = {"rounds": rounds, "cohort_size": x.shape[1], "steps": 5, "client_lr": 0.5}
        for name, make in methods.items():

            def last(x, y, make=make, how=how, seed=seed):
                return trace(make, Logistic(x, y), jnp.asarray([seed]), look=_model, **how)[0, -1]

            models = np.asarray(jax.vmap(last)(x, y))
            found[name].append(np.linalg.norm(models[1:] - models[0], axis=1).mean())
    return {name: np.asarray(values) for name, values in found.items()}


# --- FedSpeed

_PROX = 4.0  # 1 / lambda
_SPEED = {"prox_weight": _PROX, "normalize_perturbation": False}
_fedspeed = functools.partial(algorithms.fedspeed, **_SPEED)
_fedspeed_ing = functools.partial(algorithms.fedspeed_ing, **_SPEED, inertia=0.5)


def fedspeed_rounds(rounds, seeds):
    """Measure FedSpeed at T with K = T local steps, eta_l = lambda / K and r = 0.3 / sqrt(T)."""
    how = {"rounds": rounds, "cohort_size": 8, "steps": rounds, "client_lr": 1 / (_PROX * rounds)}
    problem, radius = separable(8, 0.5), {"perturbation_radius": 0.3 / np.sqrt(rounds)}
    return {
        "FedSpeed": _mean_gradient(_fedspeed, problem, seeds, **how, **radius),
        "FedSpeed-Ing": _mean_gradient(_fedspeed_ing, problem, seeds, **how, **radius),
        "FedAvg": _mean_gradient(algorithms.fedavg, problem, seeds, **how),
    }


# --- SCAFFOLD

_RATES = tuple(0.2 * 2.0 ** (-i / 2) for i in range(17))
_TARGET = 1e-3
_AT_MOST = 1500


def heterogeneity_rounds(spread, seeds):
    """Measure the rounds until ||grad f||^2 stays below 1e-3, with each method's best rate."""
    how = {"rounds": _AT_MOST, "cohort_size": 8, "steps": 10}
    found = {}
    for name, make in (("SCAFFOLD", algorithms.scaffold), ("FedAvg", algorithms.fedavg)):
        per_seed = []
        for seed in seeds:  # of the problem; there is no noise
            problem = separable(8, spread, seed=seed, noise=0.0, is_convex=True)

            def one(rate, make=make, problem=problem):
                return trace(make, problem, jnp.zeros(1, jnp.int32), client_lr=rate, **how)[0]

            traces = np.asarray(jax.vmap(one)(jnp.asarray(_RATES)))
            per_seed.append(min(rounds_until(values, _TARGET) for values in traces))
        found[name] = np.asarray(per_seed)
    return found


MEASUREMENTS: dict[str, Measurement] = {
    "cfedavg_clients": Measurement(
        "CFedAvg, Corollary 4.3",
        "Speed-up in the number of clients",
        "clients m",
        (2, 4, 8, 16, 32),
        lambda m, seeds: _corollary_4_3(seeds, clients=m),
        -0.5,
        _GRADIENT,
        "K = 4, T = 2,048, all m clients in every round",
    ),
    "cfedavg_steps": Measurement(
        "CFedAvg, Corollary 4.3",
        "Speed-up in the local steps",
        "local steps K",
        (1, 2, 4, 8, 16),
        lambda k, seeds: _corollary_4_3(seeds, steps=k),
        -0.5,
        _GRADIENT,
        "m = 8, T = 2,048",
    ),
    "cfedavg_rounds": Measurement(
        "CFedAvg, Corollary 4.3",
        "Rate in the rounds",
        "rounds T",
        (256, 512, 1024, 2048, 4096),
        lambda t, seeds: _corollary_4_3(seeds, rounds=t),
        -0.5,
        _GRADIENT,
        "m = 8, K = 4",
    ),
    "cfedavg_unequal_steps": Measurement(
        "CFedAvg, Corollary 4.7",
        "Rate in the rounds with different local steps",
        "rounds T",
        (256, 512, 1024, 2048, 4096),
        cfedavg_unequal_steps,
        -0.5,
        _GRADIENT,
        "m = 8, K_i drawn from 1 to 20 in every round, eta_L = 1 / sqrt(T), eta = sqrt(m)",
    ),
    "cfedavg_error": Measurement(
        "CFedAvg, Theorem 4.6",
        "Error that error feedback keeps",
        "rounds T",
        (256, 512, 1024, 2048, 4096),
        cfedavg_error,
        0.0,
        "largest squared error e_i over the largest squared change u_i, means over the clients",
        "as above",
    ),
    "gradma_clients": Measurement(
        "GradMA, Corollary 1",
        "Speed-up in the cohort size",
        "cohort size S",
        (2, 4, 8, 16, 32),
        gradma_clients,
        -0.5,
        _GRADIENT,
        "32 clients, I = 4, T = 1,024, eta_l = 1 / (sqrt(T) I), eta_g = sqrt(S / I), momentum and "
        "memory decay 0.5, no noise, as in the theorem",
    ),
    "fafed_steps": Measurement(
        "FAFED, Theorem 2",
        "Rate in the samples",
        "steps T",
        tuple(16 * q**3 for q in (4, 6, 8, 10, 12, 16)),
        fafed_steps,
        -2 / 3,
        _GRADIENT,
        "4 clients, q = (T / N^2)^(1/3), eta_t = 0.5 / (8 + t)^(1/3), alpha_t = 4 / (8 + t)^(2/3), "
        "beta = 0.9, rho = 1; FedAvg's rate is 2 / sqrt(T), whose bound has the slope -1/2",
    ),
    "fedmoswa_rounds": Measurement(
        "FedMoSWA, Theorem 5.2",
        "Rate in the rounds",
        "rounds T",
        (256, 512, 1024, 2048, 4096),
        lambda t, seeds: _theorem_5_2(seeds, rounds=t),
        -0.5,
        _GRADIENT,
        "8 of 32 clients, K = 4, rates as of CFedAvg's corollary; FedMoSWA's falls within a round, "
        "with the same sum",
    ),
    "fedmoswa_clients": Measurement(
        "FedMoSWA, Theorem 5.2",
        "Speed-up in the cohort size",
        "cohort size s",
        (2, 4, 8, 16, 32),
        lambda s, seeds: _theorem_5_2(seeds, cohort_size=s),
        -0.5,
        _GRADIENT,
        "32 clients, K = 4, T = 2,048",
    ),
    "stability_rounds": Measurement(
        "FedSWA and FedMoSWA, Theorem 5.1",
        "Distance of two runs that differ in one example",
        "rounds T",
        (4, 8, 16, 32, 64, 128),
        lambda rounds, seeds: stability(1.0, rounds, seeds),
        None,
        "distance of the two models, mean over 24 replaced examples",
        "logistic regression, 10 clients of 20 examples, K = 5, eta_l = 0.5, true models of the "
        "clients spread by 1",
    ),
    "stability_heterogeneity": Measurement(
        "FedSWA and FedMoSWA, Theorem 5.1",
        "The same distance over the heterogeneity",
        "spread of the clients' true models",
        (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
        lambda spread, seeds: stability(spread, 64, seeds),
        None,
        "distance of the two models, mean over 24 replaced examples",
        "as above, T = 64",
    ),
    "fedspeed_rounds": Measurement(
        "FedSpeed, Corollary 3.5.5",
        "Rate in the rounds with as many local steps",
        "rounds T = local steps K",
        (16, 32, 64, 128, 256, 512),
        fedspeed_rounds,
        -1.0,
        _GRADIENT,
        "8 clients, all in every round, lambda = 0.25, eta_l = lambda / K, r = 0.3 / sqrt(T) along "
        "the plain gradient; FedSpeed-Ing with inertia 0.5",
    ),
    "heterogeneity_rounds": Measurement(
        "SCAFFOLD, Theorem III",
        "Rounds to a target over the heterogeneity",
        "spread of the clients' centres",
        (0.25, 0.5, 1.0, 2.0, 4.0),
        heterogeneity_rounds,
        0.0,
        "rounds until the squared gradient stays below 0.001, with the best of 17 rates",
        "least squares, 8 clients, all in every round, K = 10, no noise; the seeds are of problems",
    ),
}


def measure(name: str, values: Sequence[float], seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Run a measurement; returns {"x": points, "y": {series: [points][seeds]}}.

    Args:
      name: its name.
      values: the points of x.
      seeds: seeds.
    """
    points = [MEASUREMENTS[name].run(value, seeds) for value in values]
    return {
        "x": [float(value) for value in values],
        "y": {
            series: [np.asarray(point[series], np.float64).tolist() for point in points]
            for series in points[0]
        },
    }
