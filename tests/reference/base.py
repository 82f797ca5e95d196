"""What every NumPy twin shares: a client's part of a round, weighted means, schedules.

The twins are an independent second implementation of the algorithms, written from their
equations alone: float64, flat vectors x in R^d, plain loops over clients and steps. Notation of
every file here:

    x        server model x_t           y        local model x^i_{t,k}
    eta      client learning rate       d_i      x_t - x^i_{t,K_i}, a descent direction
    w_i      weights of the clients that take part, normalised to sum to 1

Rules that hold for all of them: a client without a mini-batch (K_i = 0) did not take part, so it
is in no mean and keeps its state row; a round in which nobody took part changes nothing; a mean
over the cohort uses w_i, a sum over clients divided by N does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Vector = np.ndarray
Scalar = float | Callable[[int], float]


@dataclass
class ReferenceClient:
    """One client's part of a round.

    ``minibatches`` holds those of the steps that are taken, so K_i is its length, and each has
    valid examples only. A mini-batch is opaque to the twins, except that a full local gradient
    without explicit ``full`` data concatenates them: they are tuples of arrays then.
    """

    id: int
    minibatches: list
    weight: float = 1.0
    full: Any | None = None

    @property
    def steps(self) -> int:
        return len(self.minibatches)

    def round_examples(self) -> tuple:
        """All valid examples of the round, the mini-batches one after the other."""
        return tuple(np.concatenate(arrays) for arrays in zip(*self.minibatches, strict=True))

    def full_examples(self):
        """The data of a full local gradient: the explicit one, else the round's."""
        return self.round_examples() if self.full is None else self.full


def at(value: Scalar, t: int) -> float:
    """A hyper-parameter at index t: a number, or a schedule called with t."""
    return value(t) if callable(value) else value


def participants(clients: Sequence[ReferenceClient]) -> list[ReferenceClient]:
    """The clients that took part, in cohort order."""
    return [client for client in clients if client.minibatches]


def cohort_weights(clients: Sequence[ReferenceClient]) -> list[float]:
    """The weights, normalised over the given clients (all 0 if they sum to 0)."""
    total = sum(client.weight for client in clients)
    return [client.weight / total if total > 0 else 0.0 for client in clients]


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """sum_i w_i v_i for normalised weights."""
    return sum((w * v for w, v in zip(weights, vectors, strict=True)), np.zeros_like(vectors[0]))


class Twin:
    """Server model, gradient oracle and the local SGD that most twins start from.

    ``gradient(y, minibatch)`` is the mean gradient over the mini-batch's examples at y.
    ``transform(g, y)`` (clipping, weight decay) acts on every raw gradient, with y the point at
    which it was taken, before any correction of the algorithm. ``step_transform()`` makes the
    S(direction, y) of ``new_step``. ``client_lr`` and ``server_lr`` are numbers or schedules of the
    round.
    """

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr: Scalar,
        server_lr: Scalar = 1.0,
        transform=None,
        step_transform=None,
    ):
        self.x = np.array(x0, dtype=np.float64)
        self.num_clients = num_clients
        self.gradient = gradient
        self.client_lr = client_lr
        self.server_lr = server_lr
        self.transform = transform
        self.step_transform = step_transform

    def client_rows(self) -> np.ndarray:
        """One zero vector per client: [N, d]."""
        return np.zeros((self.num_clients, self.x.size))

    def transformed(self, g: Vector, y: Vector) -> Vector:
        return g if self.transform is None else self.transform(g, y)

    def grad(self, y: Vector, minibatch) -> Vector:
        """The mini-batch gradient at y, transformed."""
        return self.transformed(self.gradient(y, minibatch), y)

    def new_step(self):
        """S of one client's steps in one round, y <- y - eta S(direction, y).

        It acts on the whole direction, corrections included, and may remember the client's earlier
        steps in the round. A step that the server takes for all is none of them.
        """
        return self.step_transform() if self.step_transform else lambda direction, y: direction

    def local_sgd(self, client: ReferenceClient, t: int) -> Vector:
        """K_i steps y <- y - eta S(g(y)) from x_t; returns d_i."""
        y, S = self.x.copy(), self.new_step()
        for minibatch in client.minibatches:
            y = y - at(self.client_lr, t) * S(self.grad(y, minibatch), y)
        return self.x - y
