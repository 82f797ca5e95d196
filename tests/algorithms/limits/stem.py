"""Limits of stem; those that need full gradients are among the tests of the method."""

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import LR, Limit
from tests.algorithms.problem import loss_fn

TABLE = [
    Limit(
        "stem = fafed with a constant preconditioner",
        a.stem(loss_fn, momentum=0.3, **LR),
        a.fafed(
            loss_fn,
            client_lr=0.2e12,
            momentum=0.3,
            second_moment_decay=0.5,
            stability=1e12,
            precondition_first_step=True,
        ),
    ),
    Limit(
        "stem without momentum, previous own = previous mean",
        a.stem(loss_fn, momentum=1.0, **LR),
        a.stem(loss_fn, momentum=1.0, prev_at_sync="mean", **LR),
    ),
]
