"""What is run: rules, attacks and shares of attackers.

FedAvg on 100 clients with label shares of Dirichlet(1), 20 of them in a round, 50 rounds of 5 local
steps of 32 examples, a linear model. Krum is told of 6 attackers, the 30 % of a cohort. Accuracy is
that of the test set, the mean of the last five evaluations of ten; who attacks is the same for all
rules and seeds. All shares and seeds of a rule and an attack are one program.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab import algorithms, data, models, sweep, with_attack, with_robust_aggregation
from fedjax_lab.simulation.evaluate import build_evaluation

RULES = (
    *("mean", "median", "trimmed_mean:0.3", "krum:6", "multi_krum:6:8", "geometric_median"),
    "norm_clip:1",
)
# Attack -> its options.
ATTACKS = {
    "sign_flip": {"strength": 5.0},
    "label_flip": {"num_classes": 10},
    "gaussian": {"strength": 1.0},
    "alie": {},
    "inner_product": {"strength": 2.0},
}
SHARES = (0.1, 0.2, 0.3)
NONE = "none"  # beside the attacks, with a share of 0
LAST = 5  # evaluations that an accuracy is the mean of


class Scale(NamedTuple):
    """How much is run."""

    rounds: int
    clients: int
    cohort: int
    dataset: str


MACHINE = Scale(50, 100, 20, "fashion_mnist")
SMOKE = Scale(10, 40, 20, "digits")


def build(rule, attack, loss_fn, share=0.0):
    """The method of one run; the share may be traced."""
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    if rule != "mean":
        algorithm = with_robust_aggregation(algorithm, rule)
    if attack != NONE:
        algorithm = with_attack(algorithm, attack, share=share, **ATTACKS[attack])
    return algorithm


def problem(scale):
    """(the clients, the first model, its loss, its evaluation)."""
    train, test = data.load(scale.dataset)
    clients = data.partition(train, "dirichlet:1", num_clients=scale.clients, seed=0)
    mean, std, scale_of = data.normalization(train)
    prepare = data.preprocess(mean, std, scale=scale_of)
    model = models.linear(10)
    params = model.init(jax.random.key(0), jnp.zeros((1, *train.x.shape[1:])))
    evaluate = build_evaluation(models.accuracy_counts(model.apply, prepare), test, 1000)
    return clients, params, models.classification_loss(model.apply, prepare), evaluate


def run(rule, attack, scale, seeds, clients, params, loss_fn, evaluate):
    """All runs of a rule under an attack: {share: {seed: accuracy in percent, None of NaN}}."""
    result = sweep(
        lambda **point: build(rule, attack, loss_fn, **point),
        params,
        clients,
        points={} if attack == NONE else {"share": SHARES},
        seeds=seeds,
        rounds=scale.rounds,
        cohort_size=scale.cohort,
        local_steps=5,
        batch_size=32,
        evaluate=evaluate,
        eval_every=scale.rounds // 10,
    )
    if result.interrupted:  # it is no result, and what is kept is not run again
        raise KeyboardInterrupt
    reached = 100 * result.history["accuracy"][..., -LAST:].mean(-1)
    return {
        f"{point.get('share', 0.0):g}": {
            str(seed): value if math.isfinite(value) else None
            for seed, value in zip(seeds, row.tolist(), strict=True)
        }
        for point, row in zip(result.points, reached, strict=True)
    }


def place(rule, attack):
    """Where the runs of a rule under an attack are kept."""
    return f"{rule} {attack}"
