"""Limits of the personal methods, in what the server serves; tests/algorithms/test_personal.py has
those of the clients' own models.
"""

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

FROZEN_BIAS = a.fedbabu(loss_fn, head="b", **LR)

TABLE = [
    Limit(
        "fedper with nothing personal = fedavg", a.fedper(loss_fn, personal="nothing", **LR), FEDAVG
    ),
    Limit(
        "fedper with all personal = local_only",
        a.fedper(loss_fn, personal="all", **LR),
        a.local_only(loss_fn, **LR),
    ),
    Limit(
        "lg_fedavg = fedper of the same leaves",
        a.lg_fedavg(loss_fn, personal="W", server_lr=0.7, **LR),
        a.fedper(loss_fn, personal=lambda path: path == "W", server_lr=0.7, **LR),
    ),
    Limit(
        "fedbn = fedper of the same leaves",
        a.fedbn(loss_fn, personal="b", **LR),
        a.fedper(loss_fn, personal="b", **LR),
    ),
    Limit(
        "fedrep without steps of the head = fedbabu",
        a.fedrep(loss_fn, personal="b", head_steps=0, **LR),
        FROZEN_BIAS,
    ),
    Limit("fedbabu without a head = fedavg", a.fedbabu(loss_fn, head="nothing", **LR), FEDAVG),
    Limit("the server of ditto is fedavg's", a.ditto(loss_fn, prox_weight=0.5, **LR), FEDAVG),
    Limit("the server of apfl is fedavg's", a.apfl(loss_fn, **LR), FEDAVG),
    Limit(
        "pfedme, one step of one, round 1 = fedavg at the product of the rates",
        a.pfedme(
            loss_fn, client_lr=0.5, prox_weight=2.0, personal_lr=0.3, inner_steps=1, server_lr=0.7
        ),
        a.fedavg(loss_fn, client_lr=0.3, server_lr=0.7),
        rounds=1,
        max_steps=1,
    ),
    Limit(
        "fedexp far from disagreement = fedavg",
        a.fedexp(loss_fn, epsilon=1e9, average_last_two=False, **LR),
        FEDAVG,
    ),
    Limit(
        "fedexp far from disagreement, round 1 = half a step of fedavg",
        a.fedexp(loss_fn, epsilon=1e9, **LR),
        a.fedavg(loss_fn, server_lr=0.5, **LR),
        rounds=1,
    ),
]
