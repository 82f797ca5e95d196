"""What a row of the table of methods says, and the values that several rows share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import optax

from tests.algorithms import problem as softmax
from tests.reference import problem as reference

N = reference.NUM_CLIENTS


class Problem(NamedTuple):
    """What a method and its twin are run on: softmax regression, unless a row says otherwise."""

    loss: Any = softmax.loss_fn  # what ``Case.build`` takes
    initial_params: Callable = softmax.initial_params
    flat: Callable = softmax.flat  # params -> the twin's vector
    oracle: Any = reference.gradient  # what the twin takes


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
    full: bool = False  # with each client's whole data set in the batch
    uplink: int | Fraction = 1  # vectors of the params' size that a client sends in a round
    # what the factory takes in place of a loss function, such as a model
    subject: Callable = lambda loss_fn: loss_fn
    problem: Problem = Problem()  # noqa: RUF009 - immutable

    def build(self, loss_fn, **changes):
        return self.factory(
            self.subject(loss_fn), **{**self.options, **self.only_factory, **changes}
        )

    def build_twin(self, x0, **changes):
        options = {**self.options, **self.only_twin, **changes}
        return self.twin(x0, N, self.problem.oracle, **options)


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


LR = {"client_lr": 0.2, "server_lr": 0.8}
TRANSFORM = {
    "only_factory": clip_and_decay_optax(0.5, 0.1),
    "only_twin": clip_and_decay(0.5, 0.1),
}
