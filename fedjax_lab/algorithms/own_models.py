"""Methods whose clients keep a model of their own in their rows."""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.types import CohortBatch, FedState, Params, Personal, PyTree


def start_with_own_models(server: Callable[[Params], Any]) -> Callable:
    """Start a method whose clients all begin with the initial model as their own.

    Args:
      server: the first params -> the server state.
    """

    def start(params: Params, num_clients: int, batch: CohortBatch | None) -> tuple[Any, PyTree]:
        return server(params), one_row_per_client(params, num_clients)

    return start


def own_row(state: FedState, client: jax.Array) -> PyTree:
    """Return a client's row of the table.

    Args:
      state: the method's state.
      client: int32 scalar, its id.
    """
    return jax.tree.map(lambda rows: rows[client], state.clients)


OWN_ROW = Personal(own_row)  # each client's model is its row
