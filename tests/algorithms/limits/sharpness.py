"""Limits of sharpness and global_sharpness.

A radius of 0 is given as a schedule, so that the perturbed gradient is computed.
"""

import jax.numpy as jnp

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

RADIUS = {"perturbation_radius": 0.3}
NO_RADIUS = {"perturbation_radius": lambda t: 0.0 * t}
DUAL = {"prox_weight": 0.4}


def linear_loss(params, examples, key):
    """Linear in the params: its gradient is the same everywhere."""
    logits = examples["x"] @ params["W"] + params["b"][None, :]
    return jnp.take_along_axis(logits, examples["y"][:, None], axis=1)[:, 0]


TABLE = [
    Limit("fedsam radius 0 = fedavg", a.fedsam(loss_fn, **NO_RADIUS, **LR), FEDAVG),
    Limit(
        "fedsam, linear loss = fedavg",
        a.fedsam(linear_loss, **RADIUS, **LR),
        a.fedavg(linear_loss, **LR),
    ),
    Limit(
        "mofedsam mixing 1 = fedsam",
        a.mofedsam(loss_fn, mixing=1.0, server_lr=0.7, **RADIUS, **LR),
        a.fedsam(loss_fn, server_lr=0.7, **RADIUS, **LR),
    ),
    Limit(
        "mofedsam radius 0 = fedcm",
        a.mofedsam(loss_fn, mixing=0.3, **NO_RADIUS, **LR),
        a.fedcm(loss_fn, mixing=0.3, **LR),
    ),
    Limit(
        "mofedsam round 1 = fedsam at mixing * client_lr",
        a.mofedsam(loss_fn, mixing=0.3, client_lr=0.5, **RADIUS),
        a.fedsam(loss_fn, client_lr=0.15, **RADIUS),
        rounds=1,
    ),
    Limit("fedasam radius 0 = fedavg", a.fedasam(loss_fn, **NO_RADIUS, **LR), FEDAVG),
    Limit(
        "fedasam with a constant scale = fedsam",
        a.fedasam(loss_fn, perturbation_radius=0.3e-12, stability=1e12, **LR),
        a.fedsam(loss_fn, **RADIUS, **LR),
    ),
    Limit(
        "fedgamma radius 0 = scaffold",
        a.fedgamma(loss_fn, **NO_RADIUS, **LR),
        a.scaffold(loss_fn, **LR),
    ),
    Limit(
        "fedgamma round 1 = fedsam",
        a.fedgamma(loss_fn, **RADIUS, **LR),
        a.fedsam(loss_fn, **RADIUS, **LR),
        rounds=1,
    ),
    Limit(
        "fedlesam radius 0 = fedavg",
        a.fedlesam(loss_fn, server_lr=0.7, **NO_RADIUS, **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
    ),
    Limit(
        "fedlesam round 1 = fedavg",
        a.fedlesam(loss_fn, **RADIUS, **LR),
        FEDAVG,
        rounds=1,
    ),
    Limit(
        "fedlesam, linear loss = fedavg",
        a.fedlesam(linear_loss, **RADIUS, **LR),
        a.fedavg(linear_loss, **LR),
    ),
    Limit(
        "fedlesam, all clients: own last visit = last round",
        a.fedlesam(loss_fn, **RADIUS, **LR),
        a.fedlesam(loss_fn, reference="last_round", **RADIUS, **LR),
        full_cohort=True,
    ),
    Limit(
        "fedlesam-S radius 0 = scaffold",
        a.fedlesam(loss_fn, variant="S", server_lr=0.7, **NO_RADIUS, **LR),
        a.scaffold(loss_fn, server_lr=0.7, **LR),
    ),
    Limit(
        "fedlesam-S round 1 = scaffold",
        a.fedlesam(loss_fn, variant="S", **RADIUS, **LR),
        a.scaffold(loss_fn, **LR),
        rounds=1,
    ),
    Limit(
        "fedlesam-S without correction = fedlesam",
        a.fedlesam(loss_fn, variant="S", correction_weight=0.0, **RADIUS, **LR),
        a.fedlesam(loss_fn, **RADIUS, **LR),
    ),
    Limit(
        "fedlesam-D radius 0 = feddyn",
        a.fedlesam(loss_fn, variant="D", **DUAL, **NO_RADIUS, **LR),
        a.feddyn(loss_fn, **DUAL, **LR),
    ),
    Limit(
        "fedlesam-D round 1 = feddyn",
        a.fedlesam(loss_fn, variant="D", reference="last_round", **DUAL, **RADIUS, **LR),
        a.feddyn(loss_fn, **DUAL, **LR),
        rounds=1,
    ),
    Limit(
        "fedsmoo radius 0 = feddyn",
        a.fedsmoo(loss_fn, **DUAL, **NO_RADIUS, **LR),
        a.feddyn(loss_fn, **DUAL, **LR),
    ),
    Limit(
        "fedsmoo radius 0, s of mu = feddyn",
        a.fedsmoo(loss_fn, s_source="mu", **DUAL, **NO_RADIUS, **LR),
        a.feddyn(loss_fn, **DUAL, **LR),
    ),
    Limit(
        "fedsmoo, one step, round 1 = fedspeed with the duals of all",
        a.fedsmoo(loss_fn, **DUAL, **RADIUS, **LR),
        a.fedspeed(loss_fn, server_dual="all", **DUAL, **RADIUS, **LR),
        rounds=1,
        max_steps=1,
    ),
    Limit(
        "fedsmoo round 1, s of mu - e = of mu",
        a.fedsmoo(loss_fn, **DUAL, **RADIUS, **LR),
        a.fedsmoo(loss_fn, s_source="mu", **DUAL, **RADIUS, **LR),
        rounds=1,
    ),
]
