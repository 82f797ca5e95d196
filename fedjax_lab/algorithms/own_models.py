"""Methods whose clients keep a model of their own in their rows."""

import jax

from fedjax_lab.algorithms.server import ParamsServer
from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.types import CohortBatch, FedState, Params, Personal, PyTree


def start_with_own_models(
    params: Params, num_clients: int, batch: CohortBatch | None
) -> tuple[ParamsServer, PyTree]:
    """Start a method whose clients all begin with the initial model as their own.

    Args:
      params: the initial global model.
      num_clients: N.
      batch: not used.
    """
    return ParamsServer(params), one_row_per_client(params, num_clients)


def own_row(state: FedState, client: jax.Array) -> PyTree:
    """Return a client's row of the table.

    Args:
      state: the method's state.
      client: int32 scalar, its id.
    """
    return jax.tree.map(lambda rows: rows[client], state.clients)


OWN_ROW = Personal(own_row)  # each client's model is its row
