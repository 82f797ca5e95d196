"""Where variance-reduced momentum begins: FAFED's and STEM's first estimates, and their clock.

Both methods start from gradients over all valid examples of the first round, and both count global
local steps, of which the last of a round is the synchronisation.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import LocalTraining
from fedjax_lab.clients.local import Gradient
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import Cohort, CohortBatch, FedState, PyTree


def until_sync(training: LocalTraining, first: jax.Array, steps: int) -> Callable[..., jax.Array]:
    """Return the learning rates of a round's local steps: 0 for the last one, the sync.

    Args:
      training: knows the rate of each global local step.
      first: int32 scalar, the global local step of the round's first one.
    """

    def lr(k, num_steps):
        return jnp.where(k + 1 < num_steps, training.rate_at_step(first + k, steps), 0.0)

    return lr


def first_estimates(
    gradient: Gradient,
    estimates: Callable[[PyTree], dict[str, PyTree]],
    first_step: Callable[[Any, dict, Cohort], Any],
) -> Phase:
    """Build a method's first exchange, before the local steps of its first round.

    The server state has ``params`` and ``started``, a bool; () there says that the exchange was
    made before the run, by somebody for certain, so that no round computes anything for it.

    Args:
      estimates: a client's gradient -> its message; the server gets the means.
      first_step: (server, means, ``Cohort``) -> the server that has started.
    """

    def broadcast(server, round):
        return None if isinstance(server.started, tuple) else (server.params, server.started)

    def client_update(received, row, batch):
        x, started = received
        zeros = estimates(tree.zeros_like(x))

        def all_examples():
            g = gradient.full(x, batch._replace(full_examples=None, full_mask=None))
            return estimates(g)

        # ``started`` is the same for all clients, so that only one branch runs.
        return jax.lax.cond(started, lambda: zeros, all_examples), row, {}

    def server_update(server, messages, cohort):
        return tree.where(server.started, server, first_step(server, messages, cohort)), {}

    fields = estimates(jnp.zeros(()))
    return Phase(
        broadcast,
        client_update,
        server_update,
        reduce=dict.fromkeys(fields, "mean"),
        once=True,
    )


def take_first_estimates(
    first_exchange: Phase,
    server: Any,
    clients: PyTree,
    num_clients: int,
    batch: CohortBatch | None,
) -> tuple[Any, PyTree]:
    """Start with the first estimates taken, so that no round takes them: (server, clients' rows).

    Args:
      batch: round 0's batch. None: the server stays as it is, and the first round takes them; so
        does a later one if nobody takes part in this batch.
    """
    if batch is None:
        return server, clients
    alone = Algorithm("first_estimates", lambda *given: (server, clients), (first_exchange,))
    state = FedState(server, clients, jnp.asarray(num_clients, jnp.int32))
    server = alone.round_fn(state, batch)[0].server
    is_certain = batch.participates is None and batch.num_steps is None  # that somebody takes part
    return server._replace(started=()) if is_certain else server, clients
