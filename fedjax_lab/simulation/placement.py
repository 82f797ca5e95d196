"""Placement of a run: client map, store of client state and shardings.

A client store says where the table of client state is stored during a run:

===========  ====================================================================================
``device``   a full copy on each device that runs clients
``sharded``  N / D rows on each of D devices; a round transfers only the cohort's rows
``host``     in files on the host; a chunk of rounds gets the rows of its own clients, at most
             ``eval_every`` times ``cohort_size``
``auto``     ``host`` if the table would fill more than half of a device, or of the D devices;
             else ``sharded`` if clients run on several devices whose number divides N; else
             ``device``
===========  ====================================================================================

With the same number of devices, all stores give the same bits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_lab import tree
from fedjax_lab.checks import check_choice
from fedjax_lab.clients.mapping import ClientMap, parse_client_map
from fedjax_lab.clients.model_axis import (
    ModelLayout,
    ParamsSharding,
    bytes_of_a_device,
    model_layout,
)
from fedjax_lab.clients.store import AXIS, Rows, sharded_rows
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.device_memory import device_memory
from fedjax_lab.machine.target import Target
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.types import FedState, Key, Params, PyTree

HOST = "host"
CLIENT_STORES = ("auto", "device", "sharded", HOST)
_HALF = 0.5  # of a device, that a table may fill before "auto" keeps it on the host


@dataclasses.dataclass(frozen=True)
class Request:
    """The placement that the caller asks for, of which "auto" is still to be chosen.

    Attributes:
      client_map: how clients are mapped to devices; it may be one that the planner chooses.
      client_store: "auto", "device", "sharded" or "host".
      params_sharding: as in ``simulate``.
      target: the machine; None: the current machine.
    """

    client_map: ClientMap
    client_store: str
    params_sharding: ParamsSharding
    target: Target | None

    @classmethod
    def of(
        cls,
        client_map: str,
        client_store: str = "auto",
        params_sharding: ParamsSharding = None,
        target: Target | None = None,
    ) -> "Request":
        """Create a request from the names of a client map and a client store.

        Args:
          target: the machine; None: the current machine.

        Raises:
          TypeError, ValueError: a name is unknown, or the machine has too few devices.
        """
        parsed = parse_client_map(client_map, target)
        check_choice("client_store", client_store, CLIENT_STORES)
        if target is None:
            Processes.here().check_map(parsed)
        return cls(parsed, client_store, params_sharding, target)

    def with_map(self, client_map: str) -> "Request":
        """Return the request with a client map in place of "auto"."""
        return dataclasses.replace(self, client_map=parse_client_map(client_map, self.target))

    def placement(self, client_store: str, params: Params, frozen: PyTree) -> "Placement":
        """Return the placement with a store, "device", "sharded" or "host".

        Raises:
          TypeError, ValueError: as ``layout``.
        """
        layout = self.layout(params, frozen)
        return Placement(self.client_map, client_store, layout, self.params_sharding, self.target)

    def layout(self, params: Params, frozen: PyTree) -> ModelLayout | None:
        """Compute how the client map and ``params_sharding`` divide a model.

        Raises:
          TypeError, ValueError: as ``fedjax_lab.clients.model_axis.model_layout``.
        """
        return model_layout(params, self.client_map.mesh, self.params_sharding, frozen)

    def store_on_devices(self, num_clients: int) -> str:
        """Choose the store, "device" or "sharded".

        Raises:
          ValueError: "sharded" does not work with this client map or N.
        """
        if self.client_store == "sharded" and not self._can_divide(num_clients):
            available = jax.device_count() if self.target is None else self.target.num_devices
            fitting = max(n for n in range(1, available + 1) if num_clients % n == 0)
            hint = f", such as 'shard_map:{fitting}'" if fitting > 1 else ""
            raise ValueError(
                f"client_store is 'sharded' with client_map {self.client_map.name!r} and "
                f"{num_clients} clients; it requires shard_map, and a number of devices that "
                f"divides the number of clients{hint}."
            )
        return "sharded" if self.divides_table(num_clients) else "device"

    def divides_table(self, num_clients: int) -> bool:
        """Return True if devices will divide the table of client state."""
        may_divide = self.client_store in ("auto", "sharded") and self.client_map.shares > 1
        return may_divide and self._can_divide(num_clients)

    def _can_divide(self, num_clients: int) -> bool:
        return self.client_map.kind == "shard_map" and num_clients % self.client_map.shares == 0

    def keeps_rows_on_host(self, shapes: FedState) -> bool:
        """Return True if the table of client state is kept on the host and is not empty."""
        table = tree.nbytes(shapes.clients)
        too_large = table > _HALF * device_memory() * jax.device_count()
        wanted = self.client_store == HOST or (self.client_store == "auto" and too_large)
        return table > 0 and wanted


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices that compute a run.

    Attributes:
      client_map: how clients are mapped to devices.
      client_store: "device", "sharded" or "host".
      layout: layout of a model that devices divide; None: each device has a full copy.
      params_sharding: as in ``simulate``.
      target: the machine; None: the current machine.
    """

    client_map: ClientMap
    client_store: str = "device"
    layout: ModelLayout | None = None
    params_sharding: ParamsSharding = None
    target: Target | None = None

    def check_memory(self, shapes: FedState, name: str) -> None:
        """Check that a state fits on the devices.

        Raises:
          ValueError: it does not.
        """
        table, server = tree.nbytes(shapes.clients), tree.nbytes(shapes.server)
        limit, placed = device_memory(), self.state_sharding(shapes)
        if (table + server if placed is None else bytes_of_a_device(shapes, placed)) > limit:
            num_clients = jax.tree.leaves(shapes.clients)[0].shape[0] if table else 1
            sizes = [f"{size / 2**30:,.1f} GiB" for size in (table, server, limit)]
            raise ValueError(
                f"client_store is {self.client_store!r}, but {name} keeps "
                f"{table // num_clients:,} bytes for each of {num_clients:,} clients: a table of "
                f"{sizes[0]}, and {sizes[1]} on the server, where a device has {sizes[2]}. What "
                "helps: client_store='host', fewer clients, a smaller model, or a method without "
                "client state."
            )

    @property
    def is_on_host(self) -> bool:
        """True if the table of client state is kept on the host."""
        return self.client_store == HOST

    def record(self) -> dict[str, Any]:
        """Return the entries of config.json."""
        return {
            "client_map": self.client_map.name,
            "client_store": self.client_store,
            "num_devices": max(1, len(self.client_map.devices)),
        }

    @property
    def rows(self) -> Rows:
        """Functions by which a round reads and writes client rows."""
        mesh = self.client_map.mesh
        if self.client_store == "device" or not self.client_map.divides_rows or mesh is None:
            return Rows()
        return sharded_rows(mesh)

    @property
    def _mesh(self) -> Mesh | None:
        """Mesh of several devices; None: one device runs everything."""
        mesh = self.client_map.mesh
        return None if mesh is None or mesh.size < 2 else mesh

    def _put(self, values: PyTree, shardings: Any) -> PyTree:
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, values)
        return Processes.here().put(values, shardings)

    def copies(self, values: PyTree) -> PyTree:
        """Copy values to every device of the client map, once, before the run."""
        return self._put(values, _on(self._mesh))

    def divided(self, values: PyTree) -> PyTree:
        """Shard values along the leading axis."""
        return self._put(values, _on(self._mesh, AXIS))

    def clients(self, clients: FederatedArrays) -> FederatedArrays:
        """Copy the clients' data to every device; their constants are sharded like client rows."""
        return self._put(clients, self._of_clients(clients))

    def models(self, params: Params, frozen: PyTree) -> tuple[Params, PyTree]:
        """Put (params, frozen weights) onto the devices; the client map may divide a model."""
        return self._put((params, frozen), (self._shardings(params, None), self._of_frozen(frozen)))

    def of_arguments(
        self, state: FedState, clients: FederatedArrays, key: Key | None, frozen: PyTree
    ) -> tuple[PyTree, ...] | None:
        """Return the shardings of the arguments of a chunk; None if one device runs everything.

        Args:
          state: the state with the rows of all clients.
        """
        if self._mesh is None:
            return None
        of_state, of_frozen = self.state_sharding(state), self._of_frozen(frozen)
        return of_state, self._of_clients(clients), _on(self._mesh), of_frozen

    def _of_clients(self, clients: FederatedArrays) -> Any:
        shardings = jax.tree.map(lambda _: _on(self._mesh), clients)
        if self.client_store != "sharded":
            return shardings
        constants = self._shardings(clients.constants, AXIS)
        return dataclasses.replace(shardings, constants=constants)

    def _of_frozen(self, frozen: PyTree) -> Any:
        if self.layout is not None:
            return self.layout.shardings(self.layout.frozen)
        return self._shardings(frozen, None)

    def state_sharding(self, shapes: FedState) -> Any:
        """Return the shardings of a state, for ``out_shardings`` of ``jax.jit``.

        Returns:
          A pytree of shardings with the state's structure; None if one device runs everything.
        """
        if self._mesh is None:
            return None
        leading = AXIS if self.client_store == "sharded" else None
        rows = self._shardings(shapes.clients, leading)
        return self._shardings(shapes._replace(clients=()), None)._replace(clients=rows)

    def row_sharding(self, rows: PyTree) -> Any:
        """Return the sharding of a chunk's client rows.

        ``shard_map`` divides the rows over its shares.

        Args:
          rows: pytree [M, ...], or their shapes.
        """
        return self._shardings(rows, AXIS if self.client_map.divides_rows else None)

    def left_by_programs(self, state: FedState) -> Any:
        """Return the shardings in which a program must return a state; None: no need to say.

        A program must be told about a divided model, and about leaves without values, such as rows
        that are never sent: the compiler would place these anywhere.

        Returns:
          As ``state_sharding``, without rows that are kept on the host.
        """
        sharding = self.state_sharding(state)
        if self.layout is None and sharding is not None:
            sharding = jax.tree.map(lambda leaf, to: None if leaf.size else to, state, sharding)
        if not jax.tree.leaves(sharding):
            return None
        return sharding._replace(clients=None) if self.is_on_host else sharding

    def _shardings(self, values: PyTree, leading: str | None) -> Any:
        if self._mesh is None:
            return None
        if self.layout is not None:
            return self.layout.shardings(self.layout.specs(values, leading))
        return jax.tree.map(lambda _: _on(self._mesh, leading), values)


def _on(mesh: Mesh | None, leading: str | None = None) -> NamedSharding | None:
    """Return a sharding along the leading axis, or a copy on each device of a mesh."""
    spec = PartitionSpec() if leading is None else PartitionSpec(leading)
    return None if mesh is None else NamedSharding(mesh, spec)
