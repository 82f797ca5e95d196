"""Personal leaves of any method with one phase: they stay on their client.

``algorithms.personal_layers`` has the papers that do this with FedAvg: ``fedper`` is FedAvg with a
personal head, ``lg_fedavg`` FedAvg with a personal body. FedRep is FedPer whose local steps first
train only the head, then only the body (``personal_first``).
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_lab import tree
from fedjax_lab.checks import check_int, is_traced
from fedjax_lab.clients.host_table import HostTable
from fedjax_lab.clients.leaves import exact_mean, one_after_the_other, paths_of
from fedjax_lab.clients.local import LOCAL_PARAMS
from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.descriptions import describe
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import other_arguments, suggest_keywords
from fedjax_lab.types import FedState, Params, Personal, PyTree
from fedjax_lab.wrappers.base import State, Wrapper

IsPersonal = Callable[[str], bool]
_CLIENTS = 4096  # number of clients when a method is analysed before its start


class PersonalRow(NamedTuple):
    """A client's row.

    Attributes:
      inner: row of the method inside the wrapper. Of its values for personal leaves, only those of
        a model are used.
      personal: the client's personal leaves, in the order of the params.
    """

    inner: PyTree
    personal: tuple[jax.Array, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Plan:
    """The structure of a method's params, broadcast and rows; as a pytree it has no leaves.

    Attributes:
      structure: structure of the params.
      is_own: for each leaf, whether it is personal.
      heard: for each vector of the broadcast, whether it is a model (otherwise, a correction).
      kept: for each vector of a row, likewise.
    """

    structure: Any
    is_own: tuple[bool, ...]
    heard: tuple[bool, ...] = ()
    kept: tuple[bool, ...] = ()


def _check_predicate(is_personal: Any) -> None:
    allowed = "it must be a function of a leaf's path, such as lambda path: path.startswith('head')"
    if not callable(is_personal):
        raise TypeError(f"is_personal is {is_personal!r}; {allowed}.")
    if found := other_arguments(is_personal, 1):
        raise TypeError(f"is_personal takes ({found}); {allowed}.")


@suggest_keywords
def with_personal(algorithm: Algorithm, is_personal: IsPersonal) -> Algorithm:
    """Make some leaves of the model personal: they never leave their client.

    A client trains its personal leaves together with the shared ones, and stores them until it
    participates again. All clients start with the leaves of the initial model. The method's
    corrections (control variates, duals, momenta) are applied to the shared leaves only; they are 0
    for personal leaves. Bytes count shared leaves.

    In ``algorithm.params(state)``, personal leaves are replaced by their mean over all clients.
    ``client_params`` returns the model of one client.

    Args:
      algorithm: a method with one phase and without other wrappers.
      is_personal: path of a leaf, such as "blocks_0/dense/kernel" -> whether it is personal.

    Raises:
      TypeError: ``is_personal`` is no function of a path.
      ValueError: the method has several phases, another wrapper or a model for each client; or
        (when it is started) no leaf is personal, or all are: use ``algorithms.local_only``.
    """
    wrapper = Wrapper(algorithm, "personal")
    _check_predicate(is_personal)
    if algorithm.personal is not None:
        raise ValueError(
            f"algorithm is {algorithm.name}, which has a model for each client already; "
            "with_personal requires a method with one global model."
        )
    phase = wrapper.only_phase()
    plans: dict[Any, _Plan] = {}

    def plan_of(params: Params, num_clients: int = _CLIENTS) -> _Plan:
        structure = jax.tree.structure(params)
        if structure not in plans:
            plans[structure] = _plan(algorithm, phase, is_personal, structure, num_clients)
        return plans[structure]

    def around(params, num_clients, server, rows):
        own = _own(plan_of(params, num_clients), params)
        return server, PersonalRow(rows, one_row_per_client(own, num_clients))

    def params_of(state):
        params = wrapped.params(state)
        return _with_own(plan_of(params), params, exact_mean(state.clients.personal))

    def params_of_client(state, client):
        own = jax.tree.map(lambda table: table[client][None], state.clients.personal)
        return params_of(state._replace(clients=state.clients._replace(personal=own)))

    def change(phase, place):
        return _personal(phase, algorithm, plan_of)

    wrapped = wrapper.wrap(
        "personal",
        change,
        state=State(around, row=PersonalRow, first_batch=True),
        hyperparameters={"is_personal": describe(is_personal)},
    )
    return dataclasses.replace(wrapped, params=params_of, personal=Personal(params_of_client))


def _personal(phase: Phase, algorithm: Algorithm, plan_of: Callable[[Params], _Plan]) -> Phase:
    """Wrap a phase so that personal leaves are neither broadcast nor sent."""

    def broadcast(server, round):
        plan = plan_of(_server_params(algorithm, server))
        received = phase.broadcast(server, round)
        return plan, _each_vector(plan, received, lambda _, v: _without_own(plan, v))

    def client_update(received, row, batch):
        plan, received = received
        nothing = jax.tree.map(jnp.zeros_like, row.personal)
        before = _vectors(plan, row.inner)

        def complete(index, vector):
            return _with_own(plan, vector, row.personal if plan.heard[index] else nothing)

        def keep(index, vector):
            of = vector if plan.kept[index] else before[index]
            return _with_own(plan, vector, _own(plan, of))

        received = _each_vector(plan, received, complete)
        message, new_row, report = phase.client_update(received, row, batch)
        inner = _each_vector(plan, new_row.inner, keep)
        message = _each_vector(plan, message, lambda _, v: _without_own(plan, v))
        return message, PersonalRow(inner, _own(plan, _local_params(algorithm, report))), report

    def server_update(server, messages, cohort):
        params = _server_params(algorithm, server)
        plan, cohort_axis = plan_of(params), cohort.client_ids.shape

        def fill(name, field):
            axes = cohort_axis if phase.reduce[name] == "stack" else ()
            own = _own(plan, params)
            nothing = tuple(jnp.zeros((*axes, *leaf.shape), leaf.dtype) for leaf in own)
            return _each_vector(plan, field, lambda _, v: _with_own(plan, v, nothing))

        filled = {name: fill(name, field) for name, field in messages.items()}
        return phase.server_update(server, filled, cohort)

    def message(params):
        plan, zeros = plan_of(params), tree.zeros_like(phase.message_like(params))
        return _each_vector(plan, zeros, lambda _, v: _without_own(plan, v))

    def received_bytes(received, params):
        return phase.costs.down(received[1], params)

    return phase._replace(
        broadcast=broadcast,
        client_update=client_update,
        server_update=server_update,
        message=message,
        costs=phase.costs._replace(down=received_bytes),
    )


def _local_params(algorithm: Algorithm, report: dict[str, Any]) -> Params:
    """Return the local params after the last step, from the client's report."""
    if LOCAL_PARAMS not in report:
        raise ValueError(
            f"algorithm is {algorithm.name}, whose clients' report has no entry {LOCAL_PARAMS!r}; "
            "with_personal requires a client_update that returns the report of local_steps; it may "
            "add entries."
        )
    return report[LOCAL_PARAMS]


def client_params(algorithm: Algorithm, state: FedState, client_id: jax.Array | int) -> Params:
    """Return the model of one client, such as the shared leaves with its personal ones.

    Args:
      algorithm: result of ``with_personal``, or a personalised method of the catalogue, with or
        without further wrappers. If the method fine-tunes, the result is the model before that.
      state: state of the method.
      client_id: int32 scalar, in [0, N); may be traced, and is then not checked.

    Raises:
      TypeError: ``client_id`` is not an integer.
      ValueError: the method has no model for each client, or ``client_id`` is out of range.
    """
    if algorithm.personal is None:
        raise ValueError(
            f"algorithm is {algorithm.name}, which has no model for each client; all clients use "
            "algorithm.params(state)."
        )
    if not is_traced(client_id):
        is_array = isinstance(client_id, (np.ndarray, jax.Array))
        last = None if is_traced(state.num_clients) else int(state.num_clients) - 1
        number = np.asarray(client_id)[()] if is_array else client_id
        check_int("client_id", number, minimum=0, maximum=last)
        state = state._replace(clients=_with_row(state.clients, number, state.num_clients))
    return algorithm.personal.params(state, jnp.asarray(client_id))


def _with_row(rows: PyTree, client_id: Any, num_clients: Any) -> PyTree:
    """Return client rows [N, ...]; of those on the host, one client's row is read for all."""
    if not isinstance(rows, HostTable):
        return rows
    own = rows.read([client_id])
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (num_clients, *leaf.shape[1:])), own)


def personal_first(is_personal: IsPersonal, steps: int) -> optax.GradientTransformation:
    """Build FedRep's ``step_transform``: the first steps of a round train only personal leaves.

    The later steps train only the shared leaves.

    Args:
      is_personal: as in ``with_personal``.
      steps: number of steps that train personal leaves, at least 1.

    Raises:
      TypeError, ValueError: ``steps`` is no such number.
    """
    check_int("steps", steps, minimum=1)
    return one_after_the_other(is_personal, steps, None)


def _plan(algorithm, phase, is_personal, structure, num_clients) -> _Plan:
    """Analyse a method on params of single numbers; vectors that change with them are models."""
    ones = jax.tree.unflatten(structure, [1.0] * structure.num_leaves)
    paths = paths_of(ones)
    is_own = tuple(bool(is_personal(path)) for path in paths)
    if all(is_own) or not any(is_own):
        raise ValueError(
            f"is_personal is true for {'all' if all(is_own) else 'no'} leaves of the params; some "
            f"must be personal and some shared. The leaves are {', '.join(paths)}."
        )
    plan = _Plan(structure, is_own)

    def look(params):
        server, rows = algorithm.start(params, num_clients, None)
        received = phase.broadcast(server, jnp.zeros((), jnp.int32))
        return _vectors(plan, received), _vectors(plan, rows)

    with jax.ensure_compile_time_eval():
        ones = jax.tree.map(jnp.asarray, ones)
        _, changes = jax.jvp(look, (ones,), (ones,))
        heard, kept = (
            tuple(any(bool(leaf.any()) for leaf in jax.tree.leaves(v)) for v in vectors)
            for vectors in changes
        )
    return dataclasses.replace(plan, heard=heard, kept=kept)


def _server_params(algorithm: Algorithm, server: PyTree) -> Params:
    return algorithm.params(FedState(server, (), jnp.zeros((), jnp.int32)))


def _is_vector(plan: _Plan) -> Callable[[PyTree], bool]:
    return lambda part: jax.tree.structure(part) == plan.structure


def _vectors(plan: _Plan, value: PyTree) -> list[Params]:
    """Return the parts of a tree that have the structure of the params, in order."""
    parts = jax.tree.leaves(value, is_leaf=_is_vector(plan))
    return [part for part in parts if _is_vector(plan)(part)]


def _each_vector(plan: _Plan, value: PyTree, change: Callable[[int, Params], Params]) -> PyTree:
    """Change the vectors of a tree; ``change`` gets the number and the vector."""
    is_vector, numbers = _is_vector(plan), itertools.count()
    parts, outside = jax.tree.flatten(value, is_leaf=is_vector)
    changed = [change(next(numbers), part) if is_vector(part) else part for part in parts]
    return jax.tree.unflatten(outside, changed)


def _own(plan: _Plan, vector: Params) -> tuple[jax.Array, ...]:
    """Return the personal leaves of a vector."""
    leaves = plan.structure.flatten_up_to(vector)
    return tuple(leaf for leaf, own in zip(leaves, plan.is_own, strict=True) if own)


def _with_own(plan: _Plan, vector: Params, own: tuple[jax.Array, ...]) -> Params:
    """Insert personal leaves into a vector."""
    remaining, leaves = iter(own), plan.structure.flatten_up_to(vector)
    leaves = [
        next(remaining) if is_own else leaf
        for leaf, is_own in zip(leaves, plan.is_own, strict=True)
    ]
    return jax.tree.unflatten(plan.structure, leaves)


def _without_own(plan: _Plan, vector: Params) -> Params:
    """Remove the personal leaves of a vector."""
    return _with_own(plan, vector, tuple(leaf.ravel()[:0] for leaf in _own(plan, vector)))
