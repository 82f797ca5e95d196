"""Limits of representation."""

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.networks import preprocess, two_blocks
from tests.algorithms.problem import loss_fn

MODEL = two_blocks()
ARGUMENTS = LR | {"preprocess": preprocess}
PLAIN = ARGUMENTS | {"hybrid_ce_weight": 0.0, "hybrid_kl_weight": 0.0}

TABLE = [
    Limit(
        "moon weight 0 = fedavg",
        a.moon(MODEL, contrastive_weight=0.0, **ARGUMENTS),
        FEDAVG,
    ),
    Limit("moon round 1 = fedavg", a.moon(MODEL, **ARGUMENTS), FEDAVG, rounds=1),
    Limit(
        "moonm momentum 0 = moon",
        a.moonm(MODEL, momentum=0.0, **ARGUMENTS),
        a.moon(MODEL, **ARGUMENTS),
    ),
    Limit("fedmlb without paths = fedavg", a.fedmlb(MODEL, **PLAIN), FEDAVG),
    Limit(
        "fedmlbm without paths = fedavgm",
        a.fedmlbm(MODEL, momentum=0.6, **PLAIN),
        a.fedavgm(loss_fn, momentum=0.6, **LR),
    ),
    Limit(
        "fedmlbm momentum 0 = fedmlb",
        a.fedmlbm(MODEL, momentum=0.0, **ARGUMENTS),
        a.fedmlb(MODEL, **ARGUMENTS),
    ),
]
