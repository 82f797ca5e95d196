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
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.clients.store import AXIS, client_mesh
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.memory import device_memory
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.rounds import Schedule
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
    client_store: str, client_map: str, shapes: FedState, num_clients: int, name: str
) -> str:
    """Where a table stands that does not stay on the host: "device" or "sharded".

    Args:
      client_store: as given to ``simulate``.
      client_map: the one that runs, not "auto".
      shapes: the shapes of the method's state.
      num_clients: N.
      name: the method's, for errors.

    Raises:
      ValueError: "sharded" cannot be had with this client map or N, or the state does not fit on a
        device.
    """
    devices = max(len(parse_client_map(client_map).devices), 1)
    can_shard = client_map.startswith("shard_map") and num_clients % devices == 0
    if client_store == "sharded" and not can_shard:
        raise ValueError(
            f"client_store is 'sharded' with client_map {client_map!r} and {num_clients} clients; "
            "it takes shard_map, and a number of devices that divides the number of clients."
        )
    shard = can_shard and devices > 1 and client_store != "device"
    table, server, limit = tree.nbytes(shapes.clients), tree.nbytes(shapes.server), device_memory()
    if table / (devices if shard else 1) + server > limit:
        sizes = [f"{size / 2**30:,.1f} GiB" for size in (table, server, limit)]
        raise ValueError(
            f"client_store is {client_store!r}, but {name} keeps {table // num_clients:,} bytes "
            f"for each of {num_clients:,} clients: a table of {sizes[0]}, and {sizes[1]} on the "
            f"server, where a device has {sizes[2]}. What helps: client_store='host', fewer "
            "clients, a smaller model, or a method without client state."
        )
    return "sharded" if shard else "device"


def state_sharding(shapes: FedState, client_map: str, client_store: str) -> Any:
    """The placement of a state, as ``jax.jit`` takes it for ``out_shardings``.

    Args:
      shapes: a state, or its shapes.
      client_map: the one that runs.
      client_store: what ``choose_store`` said, or "host".

    Returns:
      A pytree of shardings like the state; None where one device runs everything.
    """
    devices = parse_client_map(client_map).devices
    if len(devices) < 2:
        return None
    mesh = client_mesh(devices)
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))
    rows = split if client_store == "sharded" else whole
    placed = jax.tree.map(lambda _: whole, shapes)
    return placed._replace(clients=jax.tree.map(lambda _: rows, shapes.clients))


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
