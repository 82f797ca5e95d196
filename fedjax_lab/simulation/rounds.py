"""Many rounds as one compiled program: scan over (draw the cohort, run the round)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab.clients.mapping import parse_client_map, shares_of
from fedjax_lab.clients.model_axis import ParamsSharding, on_mesh
from fedjax_lab.clients.resident import flatten_examples
from fedjax_lab.clients.store import AXIS, Rows, sharded_rows, window_rows
from fedjax_lab.data import Devices, FederatedArrays, draw_batch
from fedjax_lab.data.cohort import CohortSampler
from fedjax_lab.data.cyclic import cyclic_slots
from fedjax_lab.data.poisson import poisson_slots
from fedjax_lab.machine.target import Target, here
from fedjax_lab.round import Algorithm, build_round
from fedjax_lab.simulation.processes import put, several
from fedjax_lab.types import CohortBatch, FedState, Key, Metrics


class Schedule(NamedTuple):
    """How a round's batch is drawn; see ``fedjax_lab.data.draw_batch``.

    Attributes:
      cohort_size: clients per round, S; with "poisson", expected ones; with "cyclic", at most.
      batch_size: examples per mini-batch, B.
      local_steps: local steps per client, K; or None.
      local_epochs: passes over a client's data; or None. Exactly one of the two is given.
      replace: draw mini-batches with replacement.
      weights: "uniform" or "examples".
      full_examples: put each client's whole data set into the batch.
      devices: unequal numbers of local steps and drop-outs; None: every client does its work.
      sample_cohort: (key, round) -> ids [S]; None: uniform.
      sampling: "without_replacement", "poisson" or "cyclic".
    """

    cohort_size: int
    batch_size: int
    local_steps: int | None = None
    local_epochs: int | None = None
    replace: bool = False
    weights: str = "uniform"
    full_examples: bool = False
    devices: Devices | None = None
    sample_cohort: CohortSampler | None = None
    sampling: str = "without_replacement"

    def record(self) -> dict[str, Any]:
        """What config.json says of it; a sampler is a hash among the run's contents."""
        devices = None if self.devices is None else dataclasses.asdict(self.devices)
        kept = {name: v for name, v in self._asdict().items() if name != "sample_cohort"}
        if self.sampling == "without_replacement":  # older run directories do not say so
            del kept["sampling"]
        return {**kept, "devices": devices}

    def slots(self, clients: FederatedArrays) -> int:
        """S, the slots of a cohort.

        Args:
          clients: the clients' data.
        """
        if self.sampling == "poisson":
            return poisson_slots(self.cohort_size, clients.num_available)
        if self.sampling == "cyclic":
            return cyclic_slots(self.cohort_size, clients.num_available)
        return self.cohort_size

    def draw(self, clients: FederatedArrays, key: Key, round: jax.Array) -> CohortBatch:
        """The batch of one round; a function of (key, round) and the client ids only.

        Args:
          clients: the clients' data.
          key: the run's key.
          round: int32 scalar, counted from 0.

        Returns:
          ``CohortBatch`` with indices [S, K, B].
        """
        return draw_batch(clients, key, round, **self._asdict())

    def round_seconds(self, key: Key, batch: CohortBatch) -> jax.Array:
        """Simulated seconds that the devices of a round take; a float scalar.

        Args:
          key: the run's key.
          batch: what ``draw`` gave.
        """
        assert self.devices is not None
        assert batch.num_steps is not None
        steps, reports = batch.num_steps, batch.participates
        reports = jnp.ones(batch.client_ids.shape, bool) if reports is None else reports
        return self.devices.round_seconds(key, batch.client_ids, steps, reports)


def build_rounds(
    algorithm: Algorithm,
    schedule: Schedule,
    client_map: str,
    on_nonfinite: str = "exclude",
    target: Target | None = None,
    client_store: str = "device",
    params_sharding: ParamsSharding = None,
) -> Callable[..., tuple[FedState, Metrics]]:
    """Build ``run_rounds(state, clients, key, first_round, length, frozen=())``.

    It returns (state, metrics), the metrics of its rounds stacked [length]; with ``devices`` or
    ``clients.times`` they include ``round_seconds``, the simulated time of a round. ``length`` is a
    Python int, ``frozen`` what the states, which travel without it, have as ``state.frozen``.

    Args:
      algorithm: the method.
      schedule: how batches are drawn.
      client_map: see ``fedjax_lab.clients.mapping``.
      on_nonfinite: as of ``build_round``.
      target: the machine; None: the running one.
      client_store: "device", "sharded" or "host"; see ``fedjax_lab.simulation.stores``. With
        "host", ``run_rounds`` takes the ids of the rows that the state holds as ``window``.
      params_sharding: as of ``simulate``.
    """
    rows = Rows()
    if client_store != "device" and is_shardable(client_map, target):
        mesh = parse_client_map(client_map, target).mesh
        assert mesh is not None
        rows = sharded_rows(mesh)
    round_of = functools.partial(
        build_round,
        algorithm,
        client_map,
        on_nonfinite,
        target,
        params_sharding=params_sharding,
    )
    whole = round_of(rows=rows)

    def run_rounds(state, clients, key, first_round, length, frozen=(), window=None):
        round_fn = whole if window is None else round_of(rows=window_rows(window, rows))
        if (here() if target is None else target).platform == "tpu":
            examples = flatten_examples(clients.examples)
            clients = dataclasses.replace(clients, examples=examples)

        def body(state, round):
            batch = schedule.draw(clients, key, round)
            measured = dict(batch.measured or {})
            if schedule.devices is not None and clients.times is None:
                measured["round_seconds"] = schedule.round_seconds(key, batch)
            state, metrics = round_fn(state._replace(frozen=frozen), batch)
            if batch.expected_size is not None:
                measured["overflow"] = jnp.isnan(batch.expected_size)
            # Where a method waits for others than the round's clients, its own time counts.
            return state._replace(frozen=()), {**measured, **metrics}

        return jax.lax.scan(body, state, first_round + jnp.arange(length, dtype=jnp.int32))

    return run_rounds


def build_chunk(
    algorithm: Algorithm,
    schedule: Schedule,
    client_map: str,
    on_nonfinite: str = "exclude",
    target: Target | None = None,
    client_store: str = "device",
    params_sharding: ParamsSharding = None,
    state_sharding: Any = None,
) -> jax.stages.Wrapped:
    """``build_rounds`` as a program: jitted, with the state donated and ``length`` static.

    The data and the frozen weights are arguments, never constants of the program.

    Args:
      algorithm: the method.
      schedule: how batches are drawn.
      client_map: see ``fedjax_lab.clients.mapping``.
      on_nonfinite: as of ``build_round``.
      target: the machine; None: the running one.
      client_store, params_sharding: as of ``build_rounds``.
      state_sharding: where the state's parts are left; None: where the compiler leaves them.
    """
    run_rounds = build_rounds(
        algorithm, schedule, client_map, on_nonfinite, target, client_store, params_sharding
    )
    options: dict[str, Any] = {"static_argnames": "length", "donate_argnums": 0}
    if state_sharding is not None:
        options["out_shardings"] = state_sharding, None
    return jax.jit(run_rounds, **options)


def is_shardable(client_map: str, target: Target | None = None) -> bool:
    """Whether rows can be sharded over the devices of a client map.

    Args:
      client_map: see ``fedjax_lab.clients.mapping``.
      target: the machine; None: the running one.
    """
    return shares_of(client_map, target) > 1


def place(values: Any, client_map: str, split: bool = False) -> Any:
    """Copy ``values`` to every device that the client map uses, once, before the run.

    A model that its devices divide stays as it is.

    Args:
      values: pytree of arrays.
      client_map: see ``fedjax_lab.clients.mapping``.
      split: give each device its share of the leading axis instead.
    """
    mesh = parse_client_map(client_map).mesh
    if mesh is None or mesh.size < 2:
        return values
    if split or several():
        spec = PartitionSpec(AXIS) if split else PartitionSpec()
        return put(values, NamedSharding(mesh, spec))
    return on_mesh(values, mesh)
