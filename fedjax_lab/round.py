"""One round of any method: the paper's two halves, and the plumbing between them.

Axes: N clients, S slots of the cohort, K local steps, B examples of a mini-batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.checks import check_int, is_traced
from fedjax_lab.clients.mapping import check_client_map, parse_client_map, single_device_map
from fedjax_lab.clients.planner import Plan, plan
from fedjax_lab.clients.store import put_clients, take_clients
from fedjax_lab.types import ClientBatch, Cohort, CohortBatch, FedState, Metrics, Params, PyTree

RoundFn = Callable[[FedState, CohortBatch], tuple[FedState, Metrics]]


class Phase(NamedTuple):
    """One exchange between server and cohort. Nearly every method has just one.

    Attributes:
      broadcast: (server, round) -> what clients may see of the server.
      client_update: (received, row, ``ClientBatch``) -> (message, new row, report), for one
        client. A message is a dict of trees shaped like the params; a report is a dict
        name -> (total, weight), as ``local_steps`` gives it.
      server_update: (server, messages, ``Cohort``) -> (new server, metrics). A metric
        ``communicated``, 0 or 1, says whether anything travels in this round; without it, all does.
      reduce: field of the message -> how the server receives it: "mean" (with the
        aggregation weights), "sum" (over those who take part, unweighted) or "stack"
        ([S, ...]; rows of slots that did not take part are to be ignored).
      down: how many vectors of the params' size the broadcast holds.
      once: whether it sends anything in one round of a run only (first estimates); then
        ``uplink`` and ``downlink``, which are those of every round, leave it out.
      keeps_if_nobody: whether ``server_update`` itself returns the server as it was where nobody
        takes part. Otherwise ``build_round`` sees to it, which reads all of it once more.
    """

    broadcast: Callable[[PyTree, jax.Array], PyTree]
    client_update: Callable[[PyTree, PyTree, ClientBatch], tuple[dict, PyTree, dict]]
    server_update: Callable[[PyTree, dict, Cohort], tuple[PyTree, Metrics]]
    reduce: dict[str, str]
    down: int = 1
    once: bool = False
    keeps_if_nobody: bool = False


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A federated method: how it starts, what a round does, which model it serves.

    Attributes:
      name: the factory's name.
      start: (params, N, batch or None) -> (server state, client rows [N, ...] or ()).
      phases: the exchanges of a round, in order.
      params: state -> the server model.
      gradients_per_step: gradients that a client takes in one local step.
      message_bytes: params -> bytes that a client sends per round; None: its messages,
        uncompressed.
      broadcast_bytes: params -> bytes that a client receives per round; None: the broadcasts,
        uncompressed.
      needs_first_batch: whether ``init`` makes use of round 0's batch.
      hyperparameters: what the factory was called with, as plain values for a run's config.
    """

    name: str
    start: Callable[[Params, int, CohortBatch | None], tuple[PyTree, PyTree]]
    phases: tuple[Phase, ...]
    params: Callable[[FedState], Params]
    gradients_per_step: int = 1
    message_bytes: Callable[[Params], int] | None = None
    broadcast_bytes: Callable[[Params], int] | None = None
    needs_first_batch: bool = False
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def init(self, params: Params, num_clients: int, batch: CohortBatch | None = None) -> FedState:
        """The state before round 0.

        Args:
          params: the first server model, a pytree of floating-point arrays.
          num_clients: N.
          batch: round 0's batch, for methods that begin with a first estimate.

        Raises:
          TypeError: a leaf of ``params`` is not a floating-point array.
          ValueError: ``num_clients`` is below 1, or the method needs more clients.
        """
        check_int("num_clients", num_clients, minimum=1)
        params = jax.tree.map(jnp.asarray, params)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                where = jax.tree_util.keystr(path)
                raise TypeError(f"params{where} has dtype {leaf.dtype}; it must be floating-point.")
        server, clients = self.start(params, num_clients, batch)
        return FedState(server, clients, jnp.asarray(num_clients, jnp.int32))

    @functools.cached_property
    def round_fn(self) -> RoundFn:
        """``(state, batch) -> (state, metrics)``, pure, for one device."""
        return build_round(self, single_device_map())

    def uplink(self, params: Params) -> int:
        """Bytes that one client sends in a round.

        Args:
          params: pytree of arrays or of ``jax.ShapeDtypeStruct``.
        """
        if self.message_bytes is not None:
            return self.message_bytes(params)
        return tree.nbytes(params) * sum(len(p.reduce) for p in self.phases if not p.once)

    def downlink(self, params: Params) -> int:
        """Bytes that one client receives in a round.

        Args:
          params: pytree of arrays or of ``jax.ShapeDtypeStruct``.
        """
        if self.broadcast_bytes is not None:
            return self.broadcast_bytes(params)
        return tree.nbytes(params) * sum(phase.down for phase in self.phases if not phase.once)


def build_round(algorithm: Algorithm, client_map: str = "auto") -> RoundFn:
    """Build ``round_fn(state, batch) -> (state, metrics)`` for one way of mapping clients.

    The result is pure: jit, vmap and scan go through it. Each client's randomness comes from
    the batch's key, the phase and the client's id, never from its slot or device. A client
    without a valid step (K_i = 0) takes no part, and a round in which nobody takes part
    leaves the state as it was.

    Args:
      algorithm: the method.
      client_map: "vmap", "scan", "chunk:n", "pmap", "shard_map" (see
        ``fedjax_lab.clients.mapping``), or "auto": the planner chooses when the round is traced.

    Raises:
      ValueError: the client map is unknown, or "measure", which is for ``simulate``.
    """
    if check_client_map(client_map) == "measure":
        raise ValueError("client_map is 'measure'; a round function is not run, only simulate is.")
    fixed = None if client_map == "auto" else parse_client_map(client_map)

    def round_fn(state: FedState, batch: CohortBatch) -> tuple[FedState, Metrics]:
        cohort_map = fixed or parse_client_map(plan_round(algorithm, state, batch).client_map)
        cohort, mapped = _complete(batch, state.num_clients, cohort_map.multiple)
        server, clients = state.server, state.clients
        metrics: Metrics = {}
        for index, phase in enumerate(algorithm.phases):
            key = jax.random.fold_in(batch.key, index)
            received = phase.broadcast(server, cohort.round)
            messages, clients, report = _run_clients(
                phase, cohort_map, received, clients, cohort, mapped, key, batch.source
            )
            server, server_metrics = phase.server_update(server, messages, cohort)
            metrics = {**metrics, **report, **server_metrics}
        if not all(phase.keeps_if_nobody for phase in algorithm.phases):
            server = tree.where(cohort.participates.any(), server, state.server)
        state = state._replace(server=server, clients=clients)
        participants = cohort.participates.sum(dtype=cohort.weights.dtype)
        params = algorithm.params(state)
        senders = participants * metrics.get("communicated", 1)
        return state, {
            **metrics,
            "participants": participants,
            "bytes_up": senders * algorithm.uplink(params),
            "bytes_down": senders * algorithm.downlink(params),
        }

    return round_fn


def plan_round(algorithm: Algorithm, state: FedState, batch: CohortBatch) -> Plan:
    """What the planner chooses for a state and a batch, of which only the shapes count.

    Args:
      algorithm: the method.
      state: its state, or the shapes of it.
      batch: a round's batch, or the shapes of it.
    """
    return plan(functools.partial(build_round, algorithm), state, batch)


def _run_clients(phase, cohort_map, received, clients, cohort, mapped, key, source):
    """Run the cohort. Returns the messages as the server receives them, rows and report."""
    slots = cohort.client_ids.shape[0]
    extra = -slots % cohort_map.multiple

    def pad(leaf, value=0):
        padding = jnp.full((extra, *leaf.shape[1:]), value, leaf.dtype)
        return jnp.concatenate([leaf, padding]) if extra else leaf

    ids = pad(cohort.client_ids, cohort.num_clients)
    participates = pad(cohort.participates)
    coefficients = {
        "mean": pad(cohort.weights),
        "sum": participates.astype(cohort.weights.dtype),
    }
    mapped = jax.tree.map(pad, mapped)
    mapped["key"] = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)
    lengths = order = None
    if mapped["step_mask"] is not None:
        numbers = jnp.arange(1, mapped["step_mask"].shape[1] + 1)
        lengths = jnp.where(mapped["step_mask"], numbers[None], 0).max(1)
        if cohort_map.sort is not None:
            order = cohort_map.sort(lengths)
            ids, participates, coefficients, mapped, lengths = jax.tree.map(
                lambda leaf: leaf[order], (ids, participates, coefficients, mapped, lengths)
            )

    def one_client(shared, client, longest):
        received, round, source = shared
        row, fields = client
        batch = ClientBatch(**fields, round=round, source=source, longest=longest)
        message, row, report = phase.client_update(received, row, batch)
        if message.keys() != phase.reduce.keys():
            raise ValueError(f"message has fields {sorted(message)}, not {sorted(phase.reduce)}.")
        mean, total, stack = (
            {name: message[name] for name, how in phase.reduce.items() if how == rule}
            for rule in ("mean", "sum", "stack")
        )
        return {"mean": mean, "sum": (total, report)}, (row, stack)

    sums, (rows, stack) = cohort_map.run(
        one_client,
        (received, cohort.round, source),
        (take_clients(clients, ids), mapped),
        coefficients,
        lengths,
    )
    total, report = sums["sum"]
    if order is not None:
        back = jnp.argsort(order)
        stack = jax.tree.map(lambda leaf: leaf[back], stack)
    stack = jax.tree.map(lambda leaf: leaf[:slots], stack)
    report = {name: tree.safe_divide(value, weight) for name, (value, weight) in report.items()}
    clients = put_clients(clients, ids, rows, participates)
    return {**sums["mean"], **total, **stack}, clients, report


def _complete(batch: CohortBatch, num_clients: jax.Array, multiple: int):
    """Check the batch, and say who takes part.

    Returns the ``Cohort`` and the fields of each slot's ``ClientBatch``. Where it is known
    that all steps are taken there is no step mask, and no step is wrapped in a condition.
    """
    slots, max_steps = _batch_shape(batch)
    _check_concrete(batch, num_clients, max_steps)
    participates = batch.client_ids < num_clients
    step_mask, num_steps = None, jnp.full(slots, max_steps, jnp.int32)
    optional = (batch.num_steps, batch.example_mask, batch.participates)
    if slots % multiple or any(value is not None for value in optional):
        if batch.participates is not None:
            participates = participates & batch.participates
        step_mask = jnp.broadcast_to(participates[:, None], (slots, max_steps))
        if batch.num_steps is not None:
            step_mask = step_mask & (jnp.arange(max_steps)[None] < batch.num_steps[:, None])
        if batch.example_mask is not None:
            step_mask = step_mask & batch.example_mask.any(-1)
        num_steps = step_mask.sum(-1, dtype=jnp.int32)
        participates = participates & (num_steps > 0)
    weights = jnp.ones(slots) if batch.weights is None else batch.weights
    weights = jnp.where(participates, weights, 0).astype(jnp.result_type(float))
    weights = tree.safe_divide(weights, weights.sum())
    cohort = Cohort(
        batch.client_ids,
        participates,
        weights,
        batch.round,
        num_clients,
        max_steps,
        num_steps,
        batch.key,
    )
    return cohort, {
        "examples": batch.examples,
        "example_mask": batch.example_mask,
        "step_mask": step_mask,
        "num_steps": num_steps,
        "full_examples": batch.full_examples,
        "full_mask": batch.full_mask,
    }


def _batch_shape(batch: CohortBatch) -> tuple[int, int]:
    """(S, K), after checking every field's shape against them."""
    leaves = jax.tree.leaves(batch.examples)
    if not leaves or any(leaf.ndim < 3 for leaf in leaves):
        raise ValueError("examples must be a pytree of arrays [S, K, B, ...].")
    slots, steps, size = leaves[0].shape[:3]
    if batch.source is not None and not all(
        jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves
    ):
        raise ValueError("with source, examples must be integer indices into it.")
    expected = {
        "client_ids": (slots,),
        "example_mask": (slots, steps, size),
        "num_steps": (slots,),
        "weights": (slots,),
        "participates": (slots,),
    }
    for name, shape in expected.items():
        value = getattr(batch, name)
        if value is not None and jnp.shape(value) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(value)}; it must be {shape}.")
    for leaf in leaves:
        if leaf.shape[:3] != (slots, steps, size):
            raise ValueError(
                f"examples has leaves of shapes {leaves[0].shape} and {leaf.shape}; "
                "all must begin with the same [S, K, B]."
            )
    if 0 in (slots, steps, size):
        raise ValueError(f"examples begins with [S, K, B] = {[slots, steps, size]}; none may be 0.")
    if (batch.full_examples is None) != (batch.full_mask is None):
        raise ValueError("full_examples and full_mask must be given together.")
    return slots, steps


def _check_concrete(batch: CohortBatch, num_clients, max_steps: int) -> None:
    """Check the numbers that are known: client ids, step counts, weights."""
    if not is_traced((batch.client_ids, num_clients)):
        ids = np.asarray(batch.client_ids)
        if ids.min() < 0 or ids.max() > num_clients:
            raise ValueError(
                f"client_ids is {ids.tolist()}; ids must lie between 0 and {int(num_clients) - 1} "
                f"(or be {int(num_clients)} for a padded slot)."
            )
        real = ids[ids < num_clients]
        if np.unique(real).size != real.size:
            raise ValueError(f"client_ids is {ids.tolist()}; ids must be distinct in a round.")
    if batch.num_steps is not None and not is_traced(batch.num_steps):
        counts = np.asarray(batch.num_steps)
        if counts.min() < 0 or counts.max() > max_steps:
            raise ValueError(
                f"num_steps is {counts.tolist()}; each must lie between 0 and {max_steps}."
            )
    if batch.weights is not None and not is_traced(batch.weights):
        weights = np.asarray(batch.weights)
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError(f"weights is {weights.tolist()}; each must be finite and at least 0.")
