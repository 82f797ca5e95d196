"""Limits of fedspeed."""

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

BARE = {"correction": False, "perturbation_weight": 0.0}

TABLE = [
    Limit(
        "fedspeed, no prox, correction and perturbation = fedavg",
        a.fedspeed(loss_fn, prox_weight=1e-13, **BARE, **LR),
        FEDAVG,
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
