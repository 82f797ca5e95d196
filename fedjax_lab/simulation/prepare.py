"""What is computed: the arguments that ``simulate``, ``sweep``, ``tune`` and ``plan`` share.

A run may go on from a state: that of another run, or one that the caller has made. Some fields of a
state are not results of its rounds:

- Arguments of the method, such as who attacks: those of the new run hold. A class of states or rows
  names these fields: ``of_arguments(hyperparameters)``.
- The record of a private server's noised rounds, which ``wrappers.ledger`` continues.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.data import ClientTimes, FederatedArrays
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.data.streams import AnyClients
from fedjax_lab.round import Algorithm, check_state
from fedjax_lab.simulation.client_data import with_times, without_examples
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.host_store import with_all_rows
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.storage.fingerprint import are_the_same
from fedjax_lab.types import FedState, Params
from fedjax_lab.wrappers.ledger import key_of, resume_privately


def computation_of(
    algorithm: Algorithm,
    params: Params | None,
    clients: AnyClients,
    given: Schedule,
    times: ClientTimes | None,
    *,
    seed: int = 0,
    state: FedState | None = None,
    **settings: Any,
) -> tuple[Computation, AnyClients]:
    """Return (the computation, the clients' data with their arrays and times).

    Args:
      params: the initial global model, or its shapes; None with ``state``.
      given: the schedule; its arrays become a part of the clients' data.
      times: as in ``simulate``.
      state: as in ``simulate``; all processes call this function.
      **settings: further fields of ``Computation``.

    Raises:
      TypeError, ValueError: an argument is wrong, or ``state`` cannot be continued.
    """
    processes = Processes.here()
    schedule, clients = given.bind(clients)
    if state is None:
        model = processes.local(params)
    else:
        state = with_all_rows(state)
        model = _params_of(algorithm, state)
    run = Computation(algorithm, schedule, key=key_of(seed, state), params=model, **settings)
    clients = with_times(clients, times, algorithm, model)
    if state is not None:
        state = processes.gathered(state, everywhere=True)
        run = _going_on_from(state, run, without_examples(clients, schedule, run.eval_every))
    return run, clients


def _going_on_from(state: FedState, run: Computation, clients: FederatedArrays) -> Computation:
    """Return the computation of a run that starts from a state.

    Args:
      state: with the structure, shapes and dtypes of ``algorithm.init``, on the host.
      run: the computation from a fresh start.
      clients: the clients' data; examples may be shapes.

    Raises:
      ValueError: the state belongs to another method, model or number of clients, or it is private
        and these settings may not continue it.
    """
    algorithm = run.algorithm
    if not are_the_same(state.frozen, jax.tree.map(jnp.asarray, algorithm.frozen)):
        raise ValueError(
            f"state.frozen does not hold the frozen weights of {algorithm.name}: the state was "
            "made with others, or without any."
        )
    state = state._replace(frozen=())
    try:
        expected = run.shapes(clients)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"state is not one of {algorithm.name}: {error}.") from error
    _check_same_shapes(algorithm.name, state, expected)
    check_state(algorithm, state)
    if int(state.num_clients) != clients.num_clients:
        raise ValueError(
            f"state.num_clients is {int(state.num_clients)}; clients has {clients.num_clients}."
        )
    # With the container types of the rounds.
    state = jax.tree.unflatten(jax.tree.structure(expected), jax.tree.leaves(state))
    state = with_arguments(algorithm, state)
    state = resume_privately(algorithm, state, run.schedule, clients)
    # On the host, because it may not fit on a device.
    state = jax.tree.map(lambda leaf: np.array(leaf, leaf.dtype), state)
    return dataclasses.replace(run, params=algorithm.params(state), state=state)


def _params_of(algorithm: Algorithm, state: Any) -> Params:
    """Compute the shapes of the global model in a state given by the caller.

    Raises:
      TypeError: it is no ``FedState``.
      ValueError: it belongs to another method.
    """
    if not isinstance(state, FedState):
        raise TypeError(f"state is {type(state).__name__}; it must be a FedState, as result.state.")
    return jax.eval_shape(algorithm.params, state)


def with_arguments(algorithm: Algorithm, state: FedState) -> FedState:
    """Replace the arguments of a method in a state, such as who attacks, by this method's own."""

    def arguments_in(value: Any) -> Any:
        """Return the value with None in place of what is no argument."""
        if not hasattr(value, "_fields"):
            return None
        names = getattr(value, "of_arguments", lambda _: ())(algorithm.hyperparameters)
        fields = zip(value._fields, value, strict=True)
        return value._make(part if n in names else arguments_in(part) for n, part in fields)

    def own(params: Params) -> tuple[Any, Any]:
        server, clients = algorithm.start(params, int(state.num_clients), None)
        return arguments_in(server), arguments_in(clients)

    server, clients = jax.tree.map(
        lambda new, old: old if new is None else new,
        jax.jit(own)(algorithm.params(state)),  # it computes nothing but these fields
        (state.server, state.clients),
        is_leaf=lambda part: part is None,
    )
    return state._replace(server=server, clients=clients)


def _check_same_shapes(name: str, state: FedState, expected: FedState) -> None:
    actual, wanted = _by_path(state), _by_path(expected)
    for verb, some, others in (("lacks", wanted, actual), ("has", actual, wanted)):
        if missing := [path for path in some if path not in others]:
            raise ValueError(f"state is not one of {name}: it {verb} {', '.join(missing)}.")
    for path, leaf in wanted.items():
        kind, needed = (f"{jnp.result_type(x)}{list(np.shape(x))}" for x in (actual[path], leaf))
        if kind != needed:
            raise ValueError(f"state{path} is {kind}; it must be {needed}, as {name}.init gives.")


def _by_path(state: FedState) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
