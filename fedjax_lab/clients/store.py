"""Client state: a table, pytree [N, ...], with one row per client, and how a round accesses it.

``device``: every device that runs clients has a full copy of the table.
``sharded``: each of D devices stores N / D rows; see ``sharded_rows``.
``host``: the table is on the host, and a chunk of rounds gets the rows of its clients; see
``window_rows``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fedjax_lab.clients.exchange import send_rows
from fedjax_lab.clients.model_axis import MODEL, held_layout
from fedjax_lab.machine.compiler import mesh_of
from fedjax_lab.tree import along
from fedjax_lab.types import Params, PyTree

AXIS = "clients"  # mesh axis of the devices that divide a cohort


def one_row_per_client(row: PyTree, num_clients: int) -> PyTree:
    """Create a table [N, ...] whose rows all equal ``row``.

    Args:
      row: pytree of arrays [...], or of numbers.
      num_clients: N.
    """
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *jnp.shape(leaf))), row)


def zero_row_per_client(params: Params, num_clients: int) -> PyTree:
    """Create a table [N, ...] of zeros, with the shapes of ``params`` for each client.

    Args:
      params: pytree of arrays [...]; only shapes and dtypes are used.
      num_clients: N.
    """
    return jax.tree.map(lambda leaf: jnp.zeros((num_clients, *leaf.shape), leaf.dtype), params)


def take_clients(clients: PyTree, client_ids: jax.Array) -> PyTree:
    """Read the rows [S, ...] of the cohort; a padded slot (id N) reads the last row.

    Args:
      clients: table, pytree [N, ...].
      client_ids: int32 [S].
    """
    return jax.tree.map(lambda table: table.at[client_ids].get(mode="clip"), clients)


def put_clients(
    clients: PyTree, client_ids: jax.Array, rows: PyTree, participates: jax.Array
) -> PyTree:
    """Write the rows of participating clients; all other rows keep their bits.

    Args:
      clients: table, pytree [N, ...].
      client_ids: int32 [S]; a padded slot has id N.
      rows: new rows, pytree [S, ...].
      participates: bool [S].
    """

    def put(table, new):
        # An index past the end is dropped; -1 would overwrite the last client.
        target = jnp.where(participates, client_ids, table.shape[0])
        return table.at[target].set(new, mode="drop")

    return jax.tree.map(put, clients, rows)


def client_mesh(devices: Sequence[Any], parts: int = 0) -> Mesh:
    """Create the mesh of the devices that divide a cohort, with the axis ``clients``.

    Args:
      parts: length of a second axis ``model``; 0: no second axis.

    Raises:
      ValueError: the caller has set another mesh.
    """
    others = jax.sharding.get_abstract_mesh().axis_names
    if others and AXIS not in others:
        raise ValueError(
            f"jax.set_mesh has set a mesh with the axes {', '.join(map(str, others))}, and clients "
            "are divided over a mesh of their own. Call this outside of jax.set_mesh."
        )
    return mesh_of(tuple(devices), AXIS, **({MODEL: parts} if parts else {}))


class Rows(NamedTuple):
    """Access of a round to the table of client rows.

    Attributes:
      take: (table, client_ids [S]) -> rows [S, ...], as ``take_clients``.
      put: (table, client_ids [S], rows [S, ...], participates [S]) -> table, as ``put_clients``.
      take_constants: as ``take``, of the table of the clients' constants, which has all N rows.
    """

    take: Callable[[PyTree, jax.Array], PyTree] = take_clients
    put: Callable[[PyTree, jax.Array, PyTree, jax.Array], PyTree] = put_clients
    take_constants: Callable[[PyTree, jax.Array], PyTree] = take_clients


def sharded_rows(mesh: Mesh) -> Rows:
    """Build the access to a table that is sharded over the mesh axis ``clients``.

    The device that owns a row sends it to the device that runs the client, and later writes the new
    row. Only the cohort's rows are sent, S d values in each direction, independent of N. They are
    sent as bits, so that a round gives the same bits as with a full table on each device.

    Args:
      mesh: mesh with the axis ``clients``, whose length divides N and the number of slots. A second
        axis divides the rows themselves, like the model.
    """
    split, same, devices = PartitionSpec(AXIS), PartitionSpec(), mesh.shape[AXIS]
    spread = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def own(ids, table):
        """Return (positions in this device's share, which ids are there)."""
        share = table.shape[0]
        place = ids - jax.lax.axis_index(AXIS) * share
        return place, (place >= 0) & (place < share)

    def divided(table):
        """Return the specs of a table or of rows; an unmentioned axis would be gathered."""
        layout = held_layout()
        return split if layout is None else layout.specs(table, AXIS)

    def take(clients, client_ids):
        def on_device(clients, ids):
            if not (tables := jax.tree.leaves(clients)):
                return clients
            last = tables[0].shape[0] * devices - 1  # a padded slot reads the last row
            place, here = own(jnp.minimum(ids, last), tables[0])

            def send(rows):
                bits = _bits(rows)
                bits = jnp.where(along(here, bits), bits, 0)
                bits = jax.lax.psum_scatter(bits, AXIS, scatter_dimension=0, tiled=True)
                return _from_bits(bits, rows.dtype)

            rows = jax.tree.map(lambda table: table.at[place].get(mode="clip"), clients)
            return send_rows(rows, send, devices)

        specs = divided(clients)
        return spread(on_device, in_specs=(specs, same), out_specs=specs)(clients, client_ids)

    def put(clients, client_ids, rows, participates):
        def on_device(clients, ids, rows, participates):
            def send(rows):
                return _from_bits(jax.lax.all_gather(_bits(rows), AXIS, tiled=True), rows.dtype)

            def one(table, new):
                place, here = own(ids, table)
                target = jnp.where(here & participates, place, table.shape[0])
                return table.at[target].set(new, mode="drop")

            return jax.tree.map(one, clients, send_rows(rows, send, devices))

        specs = divided(clients)
        in_specs = (specs, same, divided(rows), same)
        put_rows = spread(on_device, in_specs=in_specs, out_specs=specs)
        return put_rows(clients, client_ids, rows, participates)

    return Rows(take, put, take)


def window_rows(window: jax.Array, rows: Rows) -> Rows:
    """Build the access to a table that has only the rows of some clients.

    Args:
      window: int32 [M], ids of these clients in ascending order; N for padding.
      rows: how a table [M, ...] is read and written.
    """

    def place(client_ids):
        return jnp.searchsorted(window, client_ids).astype(jnp.int32)

    def put(clients, client_ids, new, participates):
        return rows.put(clients, place(client_ids), new, participates)

    return Rows(lambda clients, client_ids: rows.take(clients, place(client_ids)), put)


def _bits(leaf: jax.Array) -> jax.Array:
    """Reinterpret a leaf as unsigned integers; adding zeros to these is exact."""
    if jnp.issubdtype(leaf.dtype, jnp.bool_):
        return leaf.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))


def _from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.bool_):
        return bits.astype(bool)
    return jax.lax.bitcast_convert_type(bits, dtype)
