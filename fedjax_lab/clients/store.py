"""Per-client state: a pytree with leading axis N, one row per client."""

import jax
import jax.numpy as jnp

from fedjax_lab.types import Params, PyTree


def one_row_per_client(row: PyTree, num_clients: int) -> PyTree:
    """A table [N, ...] whose rows all equal ``row``.

    Args:
      row: pytree of arrays [...].
      num_clients: N.
    """
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), row)


def zero_row_per_client(params: Params, num_clients: int) -> PyTree:
    """A table [N, ...] of zeros, one row shaped like ``params`` per client.

    Args:
      params: pytree of arrays [...]; only shapes and dtypes count.
      num_clients: N.
    """
    return jax.tree.map(lambda leaf: jnp.zeros((num_clients, *leaf.shape), leaf.dtype), params)


def take_clients(clients: PyTree, client_ids: jax.Array) -> PyTree:
    """Rows [S, ...] of the cohort; a padded slot (id N) reads the last row.

    Args:
      clients: table, pytree [N, ...].
      client_ids: int32 [S].
    """
    return jax.tree.map(lambda table: table.at[client_ids].get(mode="clip"), clients)


def put_clients(
    clients: PyTree, client_ids: jax.Array, rows: PyTree, participates: jax.Array
) -> PyTree:
    """Write back the rows of those who took part; all others stay bit for bit.

    Args:
      clients: table, pytree [N, ...].
      client_ids: int32 [S]; a padded slot has id N.
      rows: new rows, pytree [S, ...].
      participates: bool [S].
    """

    def put(table, new):
        # An index past the end is dropped; -1 would overwrite the last client.
        target = jnp.where(participates, client_ids, table.shape[0])
        return table.at[target].set(new, mode="drop", unique_indices=False)

    return jax.tree.map(put, clients, rows)
