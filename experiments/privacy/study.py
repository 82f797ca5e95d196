"""What is run: the methods, their noise, and the search for each one's server learning rate.

1,000 clients with label shares of Dirichlet(1), a linear model, 60 rounds of Poisson cohorts of
100 expected, 3 local steps of 20 examples, clip norm 0.3. FedAvg also with cyclic cohorts, with
independent noise and with noise of 10 bands, as many as the rounds after which a client comes back.
Delta is 1e-5, a hundredth of 1 / N. For each method and epsilon, the server learning rate is the
best of five on 6,000 images held out of the training set, with a seed of its own; accuracy is that
of the test set, over the other seeds.
All runs of a method are one program.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import algorithms, data, models, privacy, sweep, with_dp
from fedjax_lab.simulation.evaluate import build_evaluation

EPSILONS = (1.0, 2.0, 4.0, 8.0, math.inf)
DELTA = 1e-5
CLIP_NORM = 0.3
TUNING_SEED = 100


class Method(NamedTuple):
    """A column of the table: a factory, the server learning rates of its grid, cohorts, noise."""

    factory: str
    rates: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0)
    sampling: str = "poisson"
    bands: int = 1


_LOWER = (0.1, 0.3, 1.0, 3.0, 10.0)  # more noise takes smaller steps
METHODS = {
    "FedAvg": Method("fedavg"),
    "FedAdam": Method("fedadam", (0.003, 0.01, 0.03, 0.1, 0.3)),
    "CFedAvg": Method("cfedavg"),
    "FedAvg, cyclic": Method("fedavg", _LOWER, "cyclic"),
    "FedAvg, cyclic, 10 bands": Method("fedavg", _LOWER, "cyclic", bands=10),
}


class Scale(NamedTuple):
    """How much is run."""

    rounds: int
    clients: int
    cohort: int
    dataset: str
    held_out: int


MACHINE = Scale(60, 1000, 100, "fashion_mnist", 6000)
SMOKE = Scale(2, 40, 10, "digits", 200)


def build(method, loss_fn, server_lr, noise_multiplier):
    """The method of one run; the numbers may be traced."""
    extra = {"compressor": "top_k:0.9"} if method.factory == "cfedavg" else {}
    factory = getattr(algorithms, method.factory)
    plain = factory(loss_fn, client_lr=0.1, server_lr=server_lr, **extra)
    return with_dp(plain, CLIP_NORM, noise_multiplier, noise_bands=method.bands)


@functools.cache
def noise_for(sampling, bands, scale, epsilon):
    """The noise multiplier with which all rounds cost ``epsilon``."""
    if math.isinf(epsilon):
        return 0.0
    return privacy.noise_multiplier(
        epsilon,
        DELTA,
        scale.rounds,
        cohort_size=scale.cohort,
        num_clients=scale.clients,
        sampling=sampling,
        accountant="pld",
        noise_bands=bands,
    )


def run(method, scale, seeds):
    """Tune a method for each epsilon, and run it: {epsilon: what became of it}."""
    noises = {e: noise_for(method.sampling, method.bands, scale, e) for e in EPSILONS}
    train, test = data.load(scale.dataset)
    rest = len(train.y) - scale.held_out
    # The files are not sorted by label.
    fitted, held = (data.Examples(train.x[s], train.y[s]) for s in (slice(rest), slice(rest, None)))
    mean, std, scale_of = data.normalization(fitted)
    prepare = data.preprocess(mean, std, scale=scale_of)
    model = models.linear(10)
    params = model.init(jax.random.key(0), jnp.zeros((1, *train.x.shape[1:])))
    loss_fn = models.classification_loss(model.apply, prepare)

    def sweep_over(points, seeds, examples):
        count = models.accuracy_counts(model.apply, prepare)
        result = sweep(
            lambda **point: build(method, loss_fn, **point),
            params,
            clients,
            points=points,
            seeds=seeds,
            rounds=scale.rounds,
            cohort_size=scale.cohort,
            local_steps=3,
            batch_size=20,
            sampling=method.sampling,
            evaluate=build_evaluation(count, examples, 1000),
            eval_every=scale.rounds,
        )
        if result.interrupted:  # it is no result, and what is kept is not run again
            raise KeyboardInterrupt
        return 100 * result.values("accuracy")

    clients = data.partition(fitted, "dirichlet:1", num_clients=scale.clients, seed=0)
    rates = method.rates
    points = [
        {"server_lr": rate, "noise_multiplier": noise}
        for noise in noises.values()
        for rate in rates
    ]
    tried = sweep_over(points, [TUNING_SEED], held).reshape(len(noises), len(rates))
    best = [points[row * len(rates) + np.nanargmax(scores)] for row, scores in enumerate(tried)]
    reached = sweep_over(best, seeds, test)
    return {
        f"{epsilon:g}": {**point, "accuracy": dict(zip(map(str, seeds), row.tolist(), strict=True))}
        for epsilon, point, row in zip(noises, best, reached, strict=True)
    }
