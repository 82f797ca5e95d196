"""Where a run is computed: the client map, the table of client rows, shardings and processes.

Client stores say where the table of client rows stands during a run:

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
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab import tree
from fedjax_lab.checks import check_choice
from fedjax_lab.clients.mapping import ClientMap, parse_client_map
from fedjax_lab.clients.model_axis import (
    ModelLayout,
    ParamsSharding,
    bytes_of_a_device,
    model_layout,
    on_mesh,
)
from fedjax_lab.clients.store import AXIS, Rows, sharded_rows
from fedjax_lab.machine.memory import device_memory
from fedjax_lab.machine.target import Target
from fedjax_lab.simulation.team import Team
from fedjax_lab.types import FedState, Params, PyTree

CLIENT_STORES = ("auto", "device", "sharded", "host")
_HALF = 0.5  # of a device, that a table may fill before "auto" keeps it on the host


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a run is computed.

    Attributes:
      client_map: how clients are mapped to devices.
      client_store: "device", "sharded" or "host"; what was asked for while it is to be chosen.
      params_sharding: as of ``simulate``.
      layout: of a model that devices divide; None: it is whole on each device.
      target: the machine; None: the running one.
      team: the processes that compute it together.
    """

    client_map: ClientMap
    client_store: str = "device"
    params_sharding: ParamsSharding = None
    layout: ModelLayout | None = None
    target: Target | None = None
    team: Team = Team()  # noqa: RUF009 - it holds nothing

    @classmethod
    def of(
        cls,
        client_map: str | ClientMap,
        client_store: str = "device",
        params_sharding: ParamsSharding = None,
        target: Target | None = None,
        team: Team | None = None,
    ) -> "Placement":
        """A placement by the names of its client map and client store.

        Args:
          client_map, client_store, params_sharding: as of ``simulate``.
          target: the machine; None: the running one.
          team: the processes; None: those of the running program.

        Raises:
          TypeError, ValueError: a name is unknown, or the machine has too few devices.
        """
        parsed = parse_client_map(client_map, target)
        check_choice("client_store", client_store, CLIENT_STORES)
        team = Team.here() if team is None else team
        team.check_map(parsed)
        return cls(parsed, client_store, params_sharding, None, target, team)

    def with_map(self, client_map: str | ClientMap) -> "Placement":
        """The same with another client map.

        Args:
          client_map: its name.
        """
        return dataclasses.replace(self, client_map=parse_client_map(client_map, self.target))

    def with_layout(self, params: Params, frozen: PyTree) -> "Placement":
        """The same, with the layout of a model that the client map divides.

        Args:
          params: the server model, or its shapes.
          frozen: frozen weights, or their shapes.

        Raises:
          TypeError, ValueError: as of ``model_layout``.
        """
        layout = model_layout(params, self.client_map.mesh, self.params_sharding, frozen)
        return dataclasses.replace(self, layout=layout)

    def with_store(self, shapes: FedState, num_clients: int, name: str) -> "Placement":
        """The same with the store that is to be had, "device" or "sharded".

        Args:
          shapes: of the method's state.
          num_clients: N.
          name: the method's, for errors.

        Raises:
          ValueError: "sharded" cannot be had with this client map or N, or the state does not fit
            on a device.
        """
        client_map, asked = self.client_map, self.client_store
        can_shard = client_map.kind == "shard_map" and num_clients % client_map.shares == 0
        if asked == "sharded" and not can_shard:
            raise ValueError(
                f"client_store is 'sharded' with client_map {client_map.name!r} and {num_clients} "
                "clients; it takes shard_map, and a number of devices that divides the number of "
                "clients."
            )
        shard = can_shard and client_map.shares > 1 and asked != "device"
        found = dataclasses.replace(self, client_store="sharded" if shard else "device")
        table, server = tree.nbytes(shapes.clients), tree.nbytes(shapes.server)
        limit, placed = device_memory(), found.state_sharding(shapes)
        if (table + server if placed is None else bytes_of_a_device(shapes, placed)) > limit:
            sizes = [f"{size / 2**30:,.1f} GiB" for size in (table, server, limit)]
            raise ValueError(
                f"client_store is {found.client_store!r}, but {name} keeps "
                f"{table // num_clients:,} bytes for each of {num_clients:,} clients: a table of "
                f"{sizes[0]}, and {sizes[1]} on the server, where a device has {sizes[2]}. What "
                "helps: client_store='host', fewer clients, a smaller model, or a method without "
                "client state."
            )
        return found

    def keeps_rows_on_host(self, shapes: FedState) -> bool:
        """Whether the table of client rows stays on the host; one without rows does not.

        Args:
          shapes: of the method's state.
        """
        table = tree.nbytes(shapes.clients)
        too_large = table > _HALF * device_memory() * jax.device_count()
        asked = self.client_store
        return table > 0 and (asked == "host" or (asked == "auto" and too_large))

    def table_shares(self, num_clients: int) -> int:
        """Among how many devices the clients' rows will be divided.

        Args:
          num_clients: N.
        """
        shares = self.client_map.shares if self.client_map.divides_rows else 1
        if self.client_store not in ("auto", "sharded"):
            return 1
        return 1 if num_clients % shares else shares

    def record(self) -> dict[str, Any]:
        """What config.json says of it."""
        return {
            "client_map": self.client_map.name,
            "client_store": self.client_store,
            "num_devices": max(1, len(self.client_map.devices)),
        }

    @property
    def rows(self) -> Rows:
        """How a round reads and writes client rows."""
        mesh = self.client_map.mesh
        if self.client_store == "device" or not self.client_map.divides_rows or mesh is None:
            return Rows()
        return sharded_rows(mesh)

    def copies(self, values: PyTree) -> PyTree:
        """Copy values to every device that the client map uses, once, before the run.

        A model that its devices divide stays as it is.

        Args:
          values: pytree of arrays.
        """
        mesh = self.client_map.mesh
        if mesh is None or mesh.size < 2:
            return values
        if self.team.is_multiprocess:
            return self.team.put(values, NamedSharding(mesh, PartitionSpec()))
        return on_mesh(values, mesh)

    def divided(self, values: PyTree) -> PyTree:
        """Give each device its share of the leading axis.

        Args:
          values: pytree of arrays.
        """
        mesh = self.client_map.mesh
        if mesh is None or mesh.size < 2:
            return values
        return self.team.put(values, NamedSharding(mesh, PartitionSpec(AXIS)))

    def models(self, params: Params, frozen: PyTree) -> tuple[Params, PyTree]:
        """Put (params, frozen weights) onto the devices, divided where the client map says so.

        Args:
          params: the first server model.
          frozen: the method's frozen weights, or ().
        """
        if self.layout is None:
            return self.copies(params), self.copies(jax.tree.map(jax.numpy.asarray, frozen))
        of_params = self.layout.shardings(self.layout.specs(params))
        of_frozen = self.layout.shardings(self.layout.frozen)
        return jax.device_put(params, of_params), jax.device_put(frozen, of_frozen)

    def state_sharding(self, shapes: FedState) -> Any:
        """The placement of a state, as ``jax.jit`` takes it for ``out_shardings``.

        Args:
          shapes: a state, or its shapes.

        Returns:
          A pytree of shardings like the state; None where one device runs everything.
        """
        server = self._shardings(shapes._replace(clients=()), None)
        if server is None:
            return None
        leading = AXIS if self.client_store == "sharded" else None
        return server._replace(clients=self._shardings(shapes.clients, leading))

    def row_sharding(self, rows: PyTree) -> Any:
        """The placement of a chunk's rows, which ``shard_map`` divides over its shares.

        Args:
          rows: pytree [M, ...], or their shapes.
        """
        return self._shardings(rows, AXIS if self.client_map.divides_rows else None)

    def left_by_programs(self, state: FedState) -> Any:
        """Where a program has to leave a state: where it was. None: it does so by itself.

        It has to be told so of a model that is divided, and of leaves without values, such as the
        rows of what is never sent: the compiler leaves these anywhere.

        Args:
          state: the state, or its shapes.

        Returns:
          As ``state_sharding``, without the rows that stay on the host.
        """
        sharding = self.state_sharding(state)
        if self.layout is None and sharding is not None:
            sharding = jax.tree.map(lambda leaf, to: None if leaf.size else to, state, sharding)
        if not jax.tree.leaves(sharding):
            return None
        return sharding._replace(clients=None) if self.client_store == "host" else sharding

    def _shardings(self, values: PyTree, leading: str | None) -> Any:
        mesh = self.client_map.mesh
        if mesh is None or mesh.size < 2:
            return None
        if self.layout is not None:
            return self.layout.shardings(self.layout.specs(values, leading))
        spec = PartitionSpec() if leading is None else PartitionSpec(leading)
        place = NamedSharding(mesh, spec)
        return jax.tree.map(lambda _: place, values)
