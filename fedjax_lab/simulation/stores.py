"""Where the table of client rows stands during a run.

===========  ====================================================================================
``device``   whole on each device that runs clients
``sharded``  N / D rows on each of D devices; what moves in a round is the cohort's rows
``host``     in files on the host; a chunk of rounds gets the rows of its own clients, at most
             ``eval_every`` times ``cohort_size``
``auto``     ``host`` where the table would fill more than half of a device, or of the D that
             there are; else ``sharded`` where clients run on several devices and their number
             divides N; else ``device``
===========  ====================================================================================

All give the same bits with the same number of devices.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab import tree
from fedjax_lab.checks import check_choice
from fedjax_lab.clients.host_table import HostTable
from fedjax_lab.clients.mapping import PLANNED, parse_client_map
from fedjax_lab.clients.model_axis import (
    ModelLayout,
    ParamsSharding,
    bytes_of_a_device,
    model_layout,
)
from fedjax_lab.clients.store import AXIS
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.memory import device_memory
from fedjax_lab.machine.target import Target
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.rounds import Schedule, is_shardable
from fedjax_lab.types import FedState, Key, Params, PyTree

CLIENT_STORES = ("auto", "device", "sharded", "host")
_HALF = 0.5  # of a device, that a table may fill before "auto" keeps it on the host


def stays_on_host(client_store: str, shapes: FedState) -> bool:
    """Whether the table stays on the host; one without rows does not.

    Args:
      client_store: as given to ``simulate``.
      shapes: the shapes of the method's state.

    Raises:
      ValueError: the name is unknown.
    """
    check_choice("client_store", client_store, CLIENT_STORES)
    table = tree.nbytes(shapes.clients)
    too_large = table > _HALF * device_memory() * jax.device_count()
    return table > 0 and (client_store == "host" or (client_store == "auto" and too_large))


def choose_store(
    client_store: str,
    client_map: str,
    shapes: FedState,
    num_clients: int,
    name: str,
    layout: ModelLayout | None = None,
) -> str:
    """Where a table stands that does not stay on the host: "device" or "sharded".

    Args:
      client_store: as given to ``simulate``.
      client_map: the one that runs, not "auto".
      shapes: the shapes of the method's state.
      num_clients: N.
      name: the method's, for errors.
      layout: of a model that is divided.

    Raises:
      ValueError: "sharded" cannot be had with this client map or N, or the state does not fit on a
        device.
    """
    devices = parse_client_map(client_map).shares
    can_shard = client_map.startswith("shard_map") and num_clients % devices == 0
    if client_store == "sharded" and not can_shard:
        raise ValueError(
            f"client_store is 'sharded' with client_map {client_map!r} and {num_clients} clients; "
            "it takes shard_map, and a number of devices that divides the number of clients."
        )
    shard = can_shard and devices > 1 and client_store != "device"
    store = "sharded" if shard else "device"
    table, server, limit = tree.nbytes(shapes.clients), tree.nbytes(shapes.server), device_memory()
    placed = state_sharding(shapes, client_map, store, layout)
    if (table + server if placed is None else bytes_of_a_device(shapes, placed)) > limit:
        sizes = [f"{size / 2**30:,.1f} GiB" for size in (table, server, limit)]
        raise ValueError(
            f"client_store is {client_store!r}, but {name} keeps {table // num_clients:,} bytes "
            f"for each of {num_clients:,} clients: a table of {sizes[0]}, and {sizes[1]} on the "
            f"server, where a device has {sizes[2]}. What helps: client_store='host', fewer "
            "clients, a smaller model, or a method without client state."
        )
    return store


def state_sharding(
    shapes: FedState,
    client_map: str,
    client_store: str,
    layout: ModelLayout | None = None,
    target: Target | None = None,
) -> Any:
    """The placement of a state, as ``jax.jit`` takes it for ``out_shardings``.

    Args:
      shapes: a state, or its shapes.
      client_map: the one that runs.
      client_store: what ``choose_store`` said, or "host".
      layout: of a model that is divided; None: it is whole on each device.
      target: the machine; None: the running one.

    Returns:
      A pytree of shardings like the state; None where one device runs everything.
    """
    server = _shardings(shapes._replace(clients=()), client_map, None, layout, target)
    if server is None:
        return None
    leading = AXIS if client_store == "sharded" else None
    return server._replace(clients=_shardings(shapes.clients, client_map, leading, layout, target))


def row_sharding(rows: PyTree, client_map: str, layout: ModelLayout | None = None) -> Any:
    """The placement of a chunk's rows, as of ``state_sharding``.

    Args:
      rows: pytree [M, ...], or their shapes.
      client_map: the one that runs; ``shard_map`` divides them over its shares.
      layout: of a model that is divided.
    """
    leading = AXIS if is_shardable(client_map) else None
    return _shardings(rows, client_map, leading, layout)


def _shardings(values, client_map, leading, layout, target=None):
    mesh = parse_client_map(client_map, target).mesh
    if mesh is None or mesh.size < 2:
        return None
    if layout is not None:
        return layout.shardings(layout.specs(values, leading))
    place = NamedSharding(mesh, PartitionSpec() if leading is None else PartitionSpec(leading))
    return jax.tree.map(lambda _: place, values)


def place_model(
    params: Params, frozen: PyTree, client_map: str, params_sharding: ParamsSharding
) -> tuple[Params, PyTree, ModelLayout | None]:
    """(params, frozen weights, their layout): divided, if the client map divides models.

    Args:
      params: the server model.
      frozen: the method's frozen weights, or ().
      client_map, params_sharding: as given to ``simulate``.

    Raises:
      TypeError, ValueError: as of ``model_layout``.
    """
    mesh = None if client_map in PLANNED else parse_client_map(client_map).mesh
    layout = model_layout(params, mesh, params_sharding, frozen)
    if layout is None:
        return params, jax.tree.map(jnp.asarray, frozen), None
    params = jax.device_put(params, layout.shardings(layout.specs(params)))
    return params, jax.device_put(frozen, layout.shardings(layout.frozen)), layout


def left_by_chunks(sharding: Any, table: HostTable | None, layout: ModelLayout | None) -> Any:
    """Where a chunk's program leaves a state whose model is divided: where it was.

    Args:
      sharding: what ``state_sharding`` said.
      table: the rows on the host, which no program leaves where they were; None: there are none.
      layout: of a model that is divided; None: the compiler leaves it where it was.
    """
    if layout is None or table is None:
        return None if layout is None else sharding
    return sharding._replace(clients=None)


def start_on_host(
    algorithm: Algorithm,
    params: Params,
    clients: FederatedArrays,
    key: Key,
    frozen: PyTree,
    schedule: Schedule,
    progress: bool = False,
) -> tuple[FedState, HostTable]:
    """The state before round 0 with one row, which stands for nobody's, and the table.

    Args:
      algorithm: the method.
      params: the first server model.
      clients: the clients' data.
      key: the run's key.
      frozen: the method's frozen weights.
      schedule: how the first batch is drawn.
      progress: say on stderr how large the table is.

    Raises:
      ValueError: the method's clients do not all start with the same row, or its server model
        depends on all rows, as that of ``with_personal`` does.
    """

    def init(params, clients, key, frozen):
        batch = schedule.draw(clients, key, jnp.zeros((), jnp.int32))
        bound = dataclasses.replace(algorithm, frozen=frozen)
        return bound.init(params, clients.num_clients, batch)

    arguments = (params, clients, key, frozen)
    repeats = _repeats_one_row(jax.make_jaxpr(lambda *given: init(*given).clients)(*arguments))

    @jax.jit
    def start(*given):
        state = init(*given)
        tables = zip(jax.tree.leaves(state.clients), repeats, strict=True)
        alike = [(table == table[:1]).all() for table, repeated in tables if not repeated]
        first = jax.tree.map(lambda table: table[0], state.clients)
        return jax.tree.map(jnp.copy, state._replace(clients=(), frozen=())), first, alike

    state, first, alike = start(*arguments)
    name = algorithm.name
    if not all(map(bool, alike)):
        raise ValueError(
            f"client_store is 'host', but the clients of {name} start with unlike rows; choose "
            "another store."
        )
    one = state._replace(clients=jax.tree.map(lambda leaf: leaf[None], first))
    other = one._replace(clients=jax.tree.map(_another, one.clients))
    if not _equal(algorithm.params(one), algorithm.params(other)):
        raise ValueError(
            f"client_store is 'host', but the server model of {name} depends on the rows of all "
            "clients; choose another store."
        )
    table = HostTable(first, clients.num_clients)
    if progress:
        print(f"{name}: client rows stay on the host: {table!r}", file=sys.stderr, flush=True)
    return one, table


def _repeats_one_row(traced: ClosedJaxpr) -> list[bool]:
    """Of each result, whether it is one row, repeated: the table is not needed to see it."""
    written = {v: eqn for eqn in traced.jaxpr.eqns for v in eqn.outvars}

    def repeats(result):
        eqn = None if isinstance(result, Literal) else written.get(result)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        return 0 not in eqn.params["broadcast_dimensions"]

    return [repeats(result) for result in traced.jaxpr.outvars]


def check_host_store(is_fresh: bool, diagnose: Any, client_map: str) -> None:
    """Refuse what needs the whole table on a device.

    Args:
      is_fresh: whether the run starts from ``params``.
      diagnose, client_map: as given to ``simulate``.

    Raises:
      ValueError: a ``state`` or ``diagnose`` is given, or rounds are to be measured.
    """
    for wrong, what in (
        (not is_fresh, "a state to start from"),
        (diagnose is not None, "diagnose"),
        (client_map == "measure", "client_map='measure'"),
    ):
        if wrong:
            raise ValueError(
                f"client_store is 'host', where no device holds all client rows; {what} needs "
                "them. Choose another store, or do without."
            )


def _another(leaf: jax.Array) -> jax.Array:
    return ~leaf if jnp.issubdtype(leaf.dtype, jnp.bool_) else leaf + 1


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
