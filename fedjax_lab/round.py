"""One communication round of any method: the paper's two halves, and the code that joins them.

A round has five stages: complete the batch, then for each phase take the clients' rows, map the
clients to devices, put the new rows, and serve, which is the server's half.

Axes: N clients, S slots of the cohort, K local steps, B examples of a mini-batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_lab import tree, types
from fedjax_lab.checks import check_choice, check_int, is_traced, no_real_number
from fedjax_lab.clients.batch import check_values, complete_batch, note_count
from fedjax_lab.clients.costs import Costs, Traffic
from fedjax_lab.clients.finite import is_cohort_finite, is_finite, run_until_finite
from fedjax_lab.clients.host_devices import WaitingCalls
from fedjax_lab.clients.local import metrics_of
from fedjax_lab.clients.mapping import (
    ClientMap,
    collect,
    divide,
    parse_client_map,
    single_device_map,
)
from fedjax_lab.clients.model_axis import (
    ParamsSharding,
    divides_models,
    held_layout,
    hold_layout,
    model_layout,
)
from fedjax_lab.clients.planner import MapChoice, choose_map
from fedjax_lab.clients.results import (
    check_kept,
    check_message,
    check_names,
    check_parts,
    check_report,
    check_rows,
    check_served,
    check_update,
)
from fedjax_lab.clients.sources import Sources, on_devices
from fedjax_lab.clients.store import Rows
from fedjax_lab.machine.keys import fold_in, threefry
from fedjax_lab.machine.target import LOWERINGS, Target, platform_of, tracing_for, tracing_with
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import (
    ClientBatch,
    Cohort,
    CohortBatch,
    FedState,
    LossFn,
    Metrics,
    Params,
    PyTree,
)

MANY_CLIENTS = 2**20  # number of clients for computing shapes; no shape depends on it

# Policies for clients whose message or row is not finite.
ON_NONFINITE = ("exclude", "keep")
# How a field of the clients' messages is aggregated.
REDUCE = ("mean", "sum", "stack")
# The server state after a round in which no client participates.
IF_NOBODY = ("restored", "unchanged", "updated")

RoundFn = Callable[[FedState, CohortBatch], tuple[FedState, Metrics]]


class Phase(NamedTuple):
    """One exchange between the server and the cohort; nearly every method has a single phase.

    Attributes:
      broadcast: (server state, round) -> the part of the server state that the clients receive;
        None: the phase would change nothing from now on, and the round leaves it out.
      client_update: (received, row, ``ClientBatch``) -> (message, new row, report), for one client.
        A message is a dict of pytrees. A report is a dict name -> (total, weight), as in
        ``LocalResult.report``; its entry ``LOCAL_PARAMS`` has the local params, for wrappers, and
        ``local_steps`` the number of steps, by which ``simulate`` counts gradients.
      server_update: (server state, aggregated messages, ``Cohort``) -> (new server state, metrics).
        Rows of the history average metrics over the rounds with participants. If the server does
        not take a step in each of these, it reports ``server_updates`` (1 or 0), and its
        ``delta_norm`` is averaged over the rounds with a step. If the method sends nothing in
        some rounds, the server reports ``communicated`` (1 or 0), a factor of the round's bytes.
        Names under which a run enters its own numbers, such as ``round``, are refused.
      reduce: field of the message -> how the clients' fields are aggregated:

        - "mean": mean with the aggregation weights;
        - "sum": unweighted sum over the clients that participate; of integers of less than 32
          bits, as int32;
        - "stack": [S, ...], not aggregated; ignore the rows of slots that do not participate.
      message: params -> a message, of which only the shapes are used. None: every field has the
        shapes of the params.
      costs: what the exchange costs a client.
      once: True if the phase sends something in only one round of a run, such as first estimates.
        ``uplink`` and ``downlink`` then do not count it, because they are bytes of every round.
      if_nobody: the server state after a round in which no client participates:

        - "restored": ``build_round`` restores the state from before the round.
        - "unchanged": ``server_update`` itself returns its state unchanged. ``build_round`` then
          does not read the state again, which matters for a server that stores a hundred models.
        - "updated": the result of ``server_update`` is used, such as added noise.
    """

    broadcast: Callable[[PyTree, jax.Array], PyTree]
    client_update: Callable[[PyTree, PyTree, ClientBatch], tuple[dict, PyTree, dict]]
    server_update: Callable[[PyTree, dict, Cohort], tuple[PyTree, Metrics]]
    reduce: dict[str, str]
    message: Callable[[Params], dict[str, PyTree]] | None = None
    costs: Costs = Costs()
    once: bool = False
    if_nobody: str = "restored"

    def message_like(self, params: Params) -> dict[str, PyTree]:
        """Compute the shapes of a message.

        Args:
          params: pytree of arrays or of ``jax.ShapeDtypeStruct``.
        """
        if self.message is not None:
            return jax.eval_shape(self.message, params)
        return dict.fromkeys(self.reduce, jax.eval_shape(lambda: params))


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A federated method: its initial state, the phases of a round, and its global model.

    Attributes:
      name: name of the factory.
      start: (params, N, batch or None) -> (server state, client rows [N, ...] or ()).
      phases: the phases of a round, in order.
      params: state -> the global model; by default the server state's ``params``. A state of
        another method is a ValueError.
      hyperparameters: arguments of the factory, as plain values for a run's config.
      loss_fn: the loss that clients minimize, or one with the same labels. With frozen weights it
        is called as (params, examples, key, frozen). None: unknown.
      frozen: pytree of arrays that the loss reads in addition to the params (see ``with_frozen``);
        () if there are none.
      wrappers: names of the wrappers around the method, the innermost first; see
        ``fedjax_lab.wrappers``.
      personal: how the method makes a model for each client; None: all clients use the global
        model.
    """

    name: str
    start: Callable[[Params, int, CohortBatch | None], tuple[PyTree, PyTree]]
    phases: tuple[Phase, ...]
    params: Callable[[FedState], Params] = lambda state: state.server.params
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_fn: LossFn | None = dataclasses.field(default=None, repr=False, compare=False)
    frozen: PyTree = dataclasses.field(default=(), repr=False, compare=False)
    wrappers: tuple[str, ...] = ()
    personal: types.Personal | None = None

    def __post_init__(self):
        if isinstance(self.phases, Phase) or not all(isinstance(p, Phase) for p in self.phases):
            raise TypeError(f"phases of {self.name} must be a tuple of Phase, such as (phase,).")
        object.__setattr__(self, "phases", tuple(map(_checked_halves, self.phases)))
        find = getattr(self.params, "unchecked", self.params)  # ``replace`` calls this again

        @functools.wraps(find)
        def params(state: FedState) -> Params:
            try:
                return find(state)
            except (AttributeError, TypeError) as error:
                raise ValueError(f"state is not one of {self.name}: {error}.") from error

        params.unchecked = find  # type: ignore[attr-defined]
        object.__setattr__(self, "params", params)

    def init(self, params: Params, num_clients: int, batch: CohortBatch | None = None) -> FedState:
        """Create the state before round 0.

        Args:
          params: the initial global model, a pytree of floating-point arrays.
          num_clients: N.
          batch: the batch of round 0, for methods that start from a first estimate.

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
        frozen = jax.tree.map(jnp.asarray, self.frozen)
        if batch is not None:
            batch = batch._replace(frozen=frozen, key=threefry(batch.key))
        started = self.start(params, num_clients, batch)
        server, clients = check_parts("start", started, "server state", "clients' state")
        check_rows(clients, num_clients)
        return FedState(server, clients, jnp.asarray(num_clients, jnp.int32), frozen)

    @functools.cached_property
    def round_fn(self) -> RoundFn:
        """Round on one device: a pure function ``(state, batch) -> (state, metrics)``."""
        return build_round(self, single_device_map())

    def uplink(self, params: Params) -> int:
        """Compute the number of bytes that one client sends in a round.

        Args:
          params: pytree of arrays or of ``jax.ShapeDtypeStruct``.
        """
        return self.traffic(params).up

    def downlink(self, params: Params) -> int:
        """Compute the number of bytes that one client receives in a round.

        Args:
          params: pytree of arrays or of ``jax.ShapeDtypeStruct``.
        """
        return self.traffic(params).down

    def traffic(self, params: Params) -> Traffic:
        """Add up the bytes of the phases that send something in every round.

        Args:
          params: pytree of arrays or of ``jax.ShapeDtypeStruct``.
        """
        server, _ = jax.eval_shape(lambda params: self.start(params, MANY_CLIENTS, None), params)
        round = jax.ShapeDtypeStruct((), jnp.int32)
        up, down, extra, extra_down, parts = 0, 0, 0, 0, None
        for phase in self.phases:
            if not phase.once:
                costs = phase.costs
                sent = costs.sent(phase.message_like(params))
                received = costs.down(jax.eval_shape(phase.broadcast, server, round), params)
                up, down = up + sent, down + received
                extra += sent if "up" in costs.whole else costs.extra
                extra_down += received if "down" in costs.whole else 0
                parts = costs.parts
        return Traffic(up, down) if parts is None else Traffic(up, down, parts, extra, extra_down)

    @property
    def gradients_per_step(self) -> int:
        """Gradients that a client computes in one local step."""
        return max(phase.costs.gradients for phase in self.phases)


def _checked_halves(phase: Phase) -> Phase:
    """Check what each half returns before a wrapper reads it, which would end less clearly."""
    client_update, server_update, reduce = phase.client_update, phase.server_update, phase.reduce
    if not isinstance(reduce, Mapping):
        raise TypeError(
            f"reduce is {reduce!r}; it must be a dict from each field of the message to one of "
            f"{', '.join(REDUCE)}."
        )
    return phase._replace(
        client_update=_checking(client_update, lambda returned: check_update(returned, reduce)),
        server_update=_checking(server_update, check_served),
    )


def _checking(half: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a half of a phase that checks what it returns; one that does stays as it is."""
    if getattr(half, "checks", None) is half:
        return half

    @functools.wraps(half)
    def checking(*given):
        return check(half(*given))

    checking.checks = checking  # type: ignore[attr-defined]
    return checking


def check_algorithm(algorithm: Any, argument: str = "algorithm") -> None:
    """Check that a value is an ``Algorithm``, and not its factory.

    Args:
      algorithm: the value to check.
      argument: name of the argument, for the error.

    Raises:
      TypeError: it is no ``Algorithm``.
    """
    if isinstance(algorithm, Algorithm):
        return
    name = getattr(algorithm, "__name__", type(algorithm).__name__)
    hint = f"call {name}(loss_fn, client_lr=...) first" if callable(algorithm) else "see algorithms"
    raise TypeError(f"{argument} is {name}, not an Algorithm; {hint}.")


@suggest_keywords
def build_round(
    algorithm: Algorithm,
    client_map: str | ClientMap = "auto",
    on_nonfinite: str = "exclude",
    target: Target | None = None,
    rows: Rows | None = None,
    params_sharding: ParamsSharding = None,
    lowering: str = "auto",
) -> RoundFn:
    """Build the communication round of a method: ``round_fn(state, batch) -> (state, metrics)``.

    The result is a pure function, so it can be transformed by ``jit``, ``vmap`` and ``scan``.
    Called outside of them, it compiles once.

    On a CPU, XLA ends the process if more than 32 calls of a program for several devices wait. A
    round that is called outside of ``jit`` waits for earlier rounds in time; in a program of your
    own it cannot. So "auto" is one device there, and one for a round so small that one core
    computes it sooner; with a client map on several devices, wait for a result every few calls
    (``jax.block_until_ready``).

    - Each client's randomness depends on the batch's key, the phase and the client's id, never on
      its slot or device.
    - A client without a valid step (K_i = 0) does not participate. A round without participants
      leaves the state unchanged, unless the method says otherwise (``Phase.if_nobody``), as private
      rounds of Poisson cohorts do. Its metrics of clients and messages have no value, and are 0:
      leave rounds whose ``participants`` are 0 out of a mean.
    - Values in padded slots, masked examples and absent clients never enter a sum, even if they
      are NaN.

    Args:
      algorithm: the method.
      on_nonfinite: policy for clients whose message or new row has a NaN or an infinity. "exclude"
        leaves such a client out of this phase and the later ones of the round; the metric
        ``nonfinite_clients`` counts these clients. "keep" aggregates it like the others.
      client_map: how clients are mapped to devices: "vmap", "scan", "chunk:n", "pmap", "shard_map"
        (see ``fedjax_lab.clients.mapping``). With "auto" the planner chooses when the round is
        traced.
      target: the machine that the round is for; None: the current machine.
      rows: how client rows are read and written, such as ``sharded_rows``. None: each device that
        runs clients has the full table.
      params_sharding: as in ``simulate``; place the state accordingly before you call the round.
      lowering: as in ``simulate``.

    Raises:
      TypeError: ``algorithm`` is no ``Algorithm``, such as a factory that was not called; or (when
        the round is called) the state is no ``FedState``.
      ValueError: ``client_map`` is unknown, or "measure", which only ``simulate`` accepts;
        ``on_nonfinite`` or ``lowering`` is unknown; or ``params_sharding`` does not fit the client
        map or (when the round is traced) the params, or the state is one of another method.
    """
    check_algorithm(algorithm)
    exclude = check_choice("on_nonfinite", on_nonfinite, ON_NONFINITE) == "exclude"
    if not isinstance(client_map, ClientMap):
        client_map = parse_client_map(client_map, target)
    asked: ClientMap = client_map
    if asked.name == "measure":
        raise ValueError("client_map is 'measure'; a round function is not run, only simulate is.")
    for phase in algorithm.phases:
        check_choice("if_nobody", phase.if_nobody, IF_NOBODY)
        for name, how in phase.reduce.items():
            check_choice(f"reduce[{name!r}]", how, REDUCE)
    check_choice("lowering", lowering, LOWERINGS)
    table, is_planned = rows or Rows(), asked.is_planned
    is_divided = divides_models(asked.mesh, params_sharding)
    chosen: dict[Any, ClientMap] = {}  # by the planner, for each of the arguments' shapes

    def map_of(state: FedState, batch: CohortBatch) -> ClientMap:
        if not is_planned:
            return asked
        if (shapes := _shapes(state, batch)) not in chosen:
            planned = plan_round(algorithm, state, batch, target).client_map
            chosen[shapes] = parse_client_map(planned, target)
        return chosen[shapes]

    def round_fn(state: FedState, batch: CohortBatch) -> tuple[FedState, Metrics]:
        check_state(algorithm, state)
        with tracing_for(target), tracing_with(lowering):
            if not is_divided:
                return one_round(state, batch)
            params = jax.eval_shape(algorithm.params, state)
            layout = model_layout(params, asked.mesh, params_sharding, state.frozen)
            assert layout is not None
            with hold_layout(layout):
                state, metrics = one_round(state, batch)
        return layout.constrain(state._replace(frozen=()))._replace(frozen=state.frozen), metrics

    def one_round(state: FedState, batch: CohortBatch) -> tuple[FedState, Metrics]:
        cohort_map = map_of(state, batch)
        batch = batch._replace(key=threefry(batch.key))
        cohort, slots = complete_batch(batch, state.num_clients, cohort_map)
        if jax.tree.leaves(batch.constants):
            constants = table.take_constants(batch.constants, slots.client_ids)
            slots = slots._replace(fields={**slots.fields, "constants": constants})
        server, clients = state.server, state.clients
        params, expected = algorithm.params(state), cohort.participates
        metrics: Metrics = {}
        for index, phase in enumerate(_checked(phase, params) for phase in algorithm.phases):
            received = phase.broadcast(server, cohort.round)
            if received is None:
                continue
            taken = table.take(clients, slots.client_ids)
            shared = (received, cohort.round, batch.source, state.frozen)
            keys = jax.vmap(fold_in, in_axes=(None, 0))(fold_in(batch.key, index), slots.client_ids)
            sums, new = _map_clients(phase, cohort_map, shared, taken, keys, slots, cohort, exclude)
            clients = table.put(clients, slots.client_ids, new.rows, new.counts)
            stack, counts = slots.restore((new.stack, new.counts))
            if exclude:
                cohort, sums = _of_those(counts, cohort, sums)
            server, of_phase = _serve(phase, server, sums, stack, cohort)
            metrics = {**metrics, **of_phase}
        participants = cohort.participates.sum(dtype=cohort.weights.dtype)
        if any(phase.if_nobody == "restored" for phase in algorithm.phases):
            server = tree.where(participants > 0, server, state.server)
        state = state._replace(server=server, clients=clients)
        if exclude:
            left_out = (expected & ~cohort.participates).sum(dtype=participants.dtype)
            nobody = (left_out > 0) & (participants == 0)
            for name in ("loss", "delta_norm"):  # NaN, unlike the 0 of a round without clients
                if name in metrics:
                    metrics[name] = jnp.where(nobody, jnp.nan, metrics[name])
            metrics["nonfinite_clients"] = left_out
        sent = algorithm.traffic(params).of_round(cohort, metrics)
        return state, {**metrics, "participants": participants, **sent}

    def mesh_of(state: FedState, batch: CohortBatch) -> Mesh | None:
        client_map = asked if jax.device_count() == 1 else map_of(state, batch)
        return client_map.mesh if client_map.kind == "shard_map" else None

    def in_program(state: FedState, batch: CohortBatch) -> tuple[FedState, Metrics]:
        if not is_planned or target is not None or platform_of(None) != "cpu":
            return round_fn(state, batch)
        one_device = single_device_map()
        return build_round(algorithm, one_device, on_nonfinite, None, rows, None, lowering)(
            state, batch
        )

    return _compiled_alone(round_fn, in_program, mesh_of)


def check_state(algorithm: Algorithm, state: FedState) -> None:
    """Check that a state is made of the kinds of values that the method's ``init`` gives.

    Shapes are not compared, because a program may have the rows of some clients only.

    Raises:
      ValueError: it is a state of another method.
    """
    expected = jax.eval_shape(
        lambda params: algorithm.start(params, MANY_CLIENTS, None), algorithm.params(state)
    )
    parts = zip(("server", "clients"), (state.server, state.clients), expected, strict=True)
    for name, own, wanted in parts:
        if unlike := _unlike(own, wanted):
            found, needed = (
                "array" if jax.tree_util.all_leaves([value]) else type(value).__name__
                for value in unlike
            )
            raise ValueError(
                f"state is not one of {algorithm.name}: its {name} has {found} in place of "
                f"{needed}. Another method starts from the model: init(params, num_clients)."
            )


def _unlike(own: Any, wanted: Any) -> tuple[Any, Any] | None:
    """Return the first named tuple (or whole) of ``wanted`` for which ``own`` has another type."""
    if type(own) is not type(wanted) and not jax.tree_util.all_leaves((own, wanted)):
        return own, wanted
    fields = zip(own, wanted, strict=True) if hasattr(wanted, "_fields") else ()
    found = (_unlike(a, b) for a, b in fields if hasattr(b, "_fields"))
    return next(filter(None, found), None)


def _shapes(state: FedState, batch: CohortBatch) -> Any:
    leaves, structure = jax.tree.flatten((state, batch))
    return structure, tuple(
        (jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves
    )


def _compiled_alone(
    round_fn: RoundFn, in_program: RoundFn, mesh_of: Callable[..., Mesh | None]
) -> RoundFn:
    """Compile a round that is called outside of a traced function, once for all its calls.

    Args:
      round_fn: the round.
      in_program: the round as a part of a traced function.
      mesh_of: (state, batch) -> its devices.
    """
    compiled, sources, waiting = jax.jit(round_fn), Sources(), WaitingCalls()

    @functools.wraps(round_fn)
    def pure(state: FedState, batch: CohortBatch) -> tuple[FedState, Metrics]:
        if not isinstance(state, FedState):
            kind = type(state).__name__
            raise TypeError(f"state is {kind}; it must be a FedState, as algorithm.init returns.")
        if is_traced((state, batch)):
            return in_program(state, batch)
        check_values(batch, state.num_clients)
        mesh = mesh_of(state, batch)
        if batch.source is not None:
            batch = batch._replace(source=sources.on_all(mesh, batch.source))
        after, metrics = compiled(*on_devices(mesh, (state, batch)))
        if is_traced((after, metrics)):  # the method closes over traced values
            return after, metrics
        note_count(after.num_clients, state.num_clients)
        waiting.add(metrics["participants"])
        return after, metrics

    return pure


def plan_round(
    algorithm: Algorithm, state: FedState, batch: CohortBatch, target: Target | None = None
) -> MapChoice:
    """Choose the client map of a round; only the shapes of state and batch are used.

    Args:
      algorithm: the method.
      state: state of the method, or its shapes.
      batch: batch of a round, or its shapes.
      target: the machine; None: the current machine.
    """
    round_of = functools.partial(build_round, algorithm, target=target)
    model = jax.eval_shape(algorithm.params, state), state.frozen
    return choose_map(round_of, state, batch, target=target, model=model)


class _OfClients(NamedTuple):
    """Results of a phase's clients, [T, ...].

    Attributes:
      rows: their new rows.
      stack: fields of their messages that are not aggregated.
      counts: bool [T], whether the client participates and, if others are left out, is finite.
    """

    rows: PyTree
    stack: dict[str, PyTree]
    counts: jax.Array


def _map_clients(phase, client_map, shared, rows, keys, slots, cohort, exclude):
    """Run the clients of a phase; returns ({rule: sums over the cohort}, ``_OfClients``)."""
    participates, weights = slots.place((cohort.participates, cohort.weights))
    coefficients = {"mean": weights, "sum": participates.astype(weights.dtype)}
    weighs = None if exclude else weights > 0
    clients = (rows, {**slots.fields, "key": keys}, participates, weighs)

    def one_client(shared, client, longest):
        (received, round, source, frozen), look = shared
        row, fields, counts, weighs = client
        batch = ClientBatch(**fields, round=round, source=source, longest=longest, frozen=frozen)
        message, row, report = phase.client_update(received, row, batch)
        if look is not None:
            counts = counts & is_finite((message, row), look)
        if (layout := held_layout()) is not None:
            message, row = layout.constrain((message, row))
        message, report = tree.zero_unless(counts, (message, tree.Joined.of(metrics_of(report))))
        mean, total, stack = (
            {name: message[name] for name, how in phase.reduce.items() if how == rule}
            for rule in REDUCE
        )
        if weighs is not None:
            mean = tree.zero_unless(weighs, mean)
        mean, total = tree.widen((mean, total))  # a sum over many in bfloat16 would stop to grow
        return {"mean": mean, "sum": (total, report)}, _OfClients(row, stack, counts)

    def run(look):
        return client_map.run(one_client, (shared, look), clients, coefficients, slots.lengths)

    def are_finite(results):
        sums, new = results
        return is_cohort_finite((sums["mean"], sums["sum"][0]), (new.rows, new.stack))

    sums, new = run_until_finite(run, are_finite) if exclude else run(None)
    new = divide(new, client_map.mesh)
    stack, counts = collect((new.stack, new.counts), client_map.mesh)
    return sums, new._replace(stack=stack, counts=counts)


def _serve(phase, server, sums, stack, cohort):
    """Run the server's half; returns (new server state, metrics of clients and server)."""
    total, report = sums["sum"]
    server, metrics = phase.server_update(server, {**sums["mean"], **total, **stack}, cohort)
    named = report.separate().items()
    report = {name: tree.safe_divide(value, weight) for name, (value, weight) in named}
    if twice := report.keys() & metrics.keys():
        raise ValueError(f"the clients and the server both report {', '.join(twice)}.")
    return server, {**report, **metrics}


def _of_those(counts: jax.Array, cohort: Cohort, sums: dict) -> tuple[Cohort, dict]:
    """Return the cohort of the clients that count, bool [S], and the sums with its weights."""
    weights = jnp.where(counts, cohort.weights, 0)
    rest = jnp.where((counts == cohort.participates).all(), 1, weights.sum())  # exactly 1 if all
    mean = jax.tree.map(lambda s: tree.safe_divide(s, rest.astype(s.dtype)), sums["mean"])
    cohort = cohort._replace(
        participates=counts,
        weights=tree.safe_divide(weights, rest),
        total_weight=cohort.total_weight * rest,
        num_steps=jnp.where(counts, cohort.num_steps, 0),
    )
    return cohort, {**sums, "mean": mean}


def _check_metrics(metrics: dict[str, Any]) -> None:
    """Check that the server's metrics are numbers under names.

    Raises:
      ValueError: one is something else, such as None, which a program takes for no value at all.
    """
    for name, value in metrics.items():
        is_several = isinstance(value, list | tuple)  # each would be a number of its own
        kind = type(value).__name__ if is_several else no_real_number(value)
        if kind or not isinstance(name, str):
            raise ValueError(
                f"server_update reports {name!r}: {kind or 'a number'}; a metric must be a real "
                "number, or an array of such, under a name that is text."
            )


def _counted(summand: PyTree) -> PyTree:
    """Convert integers of less than 32 bits, such as signs in int8, whose sum would wrap around."""

    def one(leaf):
        is_narrow = jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.dtype.itemsize < 4
        return leaf.astype(jnp.int32) if is_narrow else leaf

    return jax.tree.map(one, summand)


def _in_dtype_of(aggregate: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Convert a mean or a sum to the dtype of the message, but no sum of integers."""
    return aggregate if jnp.issubdtype(like.dtype, jnp.integer) else aggregate.astype(like.dtype)


def _checked(phase: Phase, params: Params) -> Phase:
    """Wrap a phase so that tracing checks the results of its two halves.

    The server gets sums and means in the dtypes of the messages; of narrow integers, int32.
    """
    expected = phase.message_like(params)

    def client_update(received, row, batch):
        message, new_row, report = phase.client_update(received, row, batch)
        check_report(metrics_of(report))
        check_names(report, "client_update")
        check_message(message, expected, phase.reduce)
        check_kept("client_update", "row", new_row, row)
        sums = {name: _counted(message[name]) for name, how in phase.reduce.items() if how == "sum"}
        return {**message, **sums}, new_row, report

    def server_update(server, messages, cohort):
        messages = {
            name: jax.tree.map(_in_dtype_of, value, expected[name])
            if phase.reduce[name] != "stack"
            else value
            for name, value in messages.items()
        }
        new_server, metrics = phase.server_update(server, messages, cohort)
        check_names(metrics, "server_update")
        _check_metrics(metrics)
        check_kept("server_update", "server state", new_server, server)
        return new_server, metrics

    return phase._replace(client_update=client_update, server_update=server_update)
