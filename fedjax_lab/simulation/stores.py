"""Where the table of client rows stands during a run.

===========  ====================================================================
``device``   whole on each device that runs clients
``sharded``  N / D rows on each of D devices; what moves in a round is the cohort's rows
``auto``     ``sharded`` where clients run on several devices and their number divides N
===========  ====================================================================

All give the same bits with the same number of devices.
"""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab import tree
from fedjax_lab.checks import check_choice
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.clients.memory import device_memory
from fedjax_lab.clients.store import AXIS, client_mesh
from fedjax_lab.types import FedState

CLIENT_STORES = ("auto", "device", "sharded")


def choose_store(
    client_store: str, client_map: str, shapes: FedState, num_clients: int, name: str
) -> str:
    """Where the table stands: "device" or "sharded".

    Args:
      client_store: as given to ``simulate``.
      client_map: the one that runs, not "auto".
      shapes: the shapes of the method's state.
      num_clients: N.
      name: the method's, for errors.

    Raises:
      ValueError: the name is unknown; "sharded" cannot be had with this client map or N; or the
        state does not fit on a device.
    """
    check_choice("client_store", client_store, CLIENT_STORES)
    devices = parse_client_map(client_map).devices
    can_shard = client_map.startswith("shard_map") and num_clients % len(devices) == 0
    if client_store == "sharded" and not can_shard:
        raise ValueError(
            f"client_store is 'sharded' with client_map {client_map!r} and {num_clients} clients; "
            "it takes shard_map, and a number of devices that divides the number of clients."
        )
    shard = can_shard and len(devices) > 1 and client_store != "device"
    _check_fits(shapes, num_clients, name, len(devices) if shard else 1, client_store)
    return "sharded" if shard else "device"


def state_sharding(shapes: FedState, client_map: str, client_store: str) -> Any:
    """The placement of a state, as ``jax.jit`` takes it for ``out_shardings``.

    Args:
      shapes: a state, or its shapes.
      client_map: the one that runs.
      client_store: what ``choose_store`` said.

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


def _check_fits(shapes, num_clients, name, devices, client_store):
    """Refuse a state that a device cannot hold, before any of it is allocated."""
    table, server = tree.nbytes(shapes.clients), tree.nbytes(shapes.server)
    limit = device_memory()
    needed = math.ceil(table / devices) + server
    if needed <= limit:
        return
    gib = [f"{size / 2**30:,.1f} GiB" for size in (table, server, limit)]
    remedy = "fewer clients, a smaller model, a method without client state"
    if devices == 1:
        remedy += ", or client_map='shard_map' on several devices"
    raise ValueError(
        f"client_store is {client_store!r}, but {name} keeps {table // num_clients:,} bytes for "
        f"each of {num_clients:,} clients: a table of {gib[0]}, and {gib[1]} on the server, where "
        f"a device has {gib[2]}. What helps: {remedy}."
    )
