"""Evaluation of personalised methods, which have a model for each client."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.checks import LAST_SEED, check_choice, check_int, is_traced, warn
from fedjax_lab.clients.metrics import original_of
from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.cohort import check_constants
from fedjax_lab.data.streams import check_clients, check_resident
from fedjax_lab.machine.keys import seeded
from fedjax_lab.round import Algorithm, check_algorithm
from fedjax_lab.signatures import parameter_of
from fedjax_lab.simulation.arguments import check_labels_of
from fedjax_lab.simulation.evaluate import (
    CountFn,
    check_count_fn,
    check_scored,
    client_score,
    count_batch,
    count_in_batches,
    in_batches,
    may_be_nan,
    on_all_devices,
    over_devices,
)
from fedjax_lab.simulation.host_store import with_all_rows
from fedjax_lab.types import ClientBatch, FedState, Metrics, Params

WORST = 0.1  # share of the clients with the lowest scores, whose mean is also reported

ModelOf = Callable[[FedState, jax.Array], Params]


def client_models(
    algorithm: Algorithm,
    train: FederatedArrays | None = None,
    batch_size: int = 16,
    seed: int = 0,
    client_constants: Any = None,
) -> ModelOf:
    """Build the function that returns each client's model, for ``build_personal_evaluation``.

    If a method has no model for each client, it returns the global model. If a method fine-tunes,
    each client first takes ``personal.steps`` steps on mini-batches of its own training data, drawn
    with replacement; a client without data takes no steps.

    Args:
      algorithm: any method.
      train: the clients' training data, whose names ``build_personal_evaluation`` then compares
        with those of the test data; required if the method fine-tunes.
      batch_size: examples in a mini-batch for fine-tuning.
      seed: seed of these mini-batches, which are the same in every evaluation.
      client_constants: of ``train``'s clients, as in ``simulate``, for the loss of the fine-tuning.

    Returns:
      (state, int32 id) -> that client's params; both arguments may be traced.

    Raises:
      TypeError: ``algorithm`` is no ``Algorithm``; ``train`` is neither a federation nor None; or
        the method fine-tunes, and ``train`` is None or a stream.
      ValueError: ``batch_size`` or ``seed`` is out of range, or an array of ``client_constants``
        has another leading axis.
    """
    check_algorithm(algorithm)
    if train is not None:
        check_clients(train, "train")
    check_int("batch_size", batch_size, minimum=1)
    check_int("seed", seed, minimum=0, maximum=LAST_SEED)
    personal = algorithm.personal
    if personal is None:
        return lambda state, client_id: algorithm.params(_checked_state(state))
    tune, steps = personal.fine_tune, personal.steps
    if tune is None or not steps:
        return _NamedModels(personal.params, None if train is None else train.names)
    if train is None:
        raise TypeError(
            f"train is None; {algorithm.name} fine-tunes on each client's training data: pass it."
        )
    check_resident(train, "client_models")
    constants = ()
    if client_constants is not None:
        constants = check_constants(client_constants, train.num_clients)
    elif (loss_fn := algorithm.loss_fn) and parameter_of(original_of(loss_fn), "constants"):
        warn(
            f"the loss of {algorithm.name} has an argument constants; if the run has "
            "client_constants, pass them to client_models, too: fine-tuning is without them."
        )

    def model_of(state, client_id):
        key = jax.random.fold_in(seeded(seed), client_id)
        draw_key, step_key = jax.random.split(key)
        size = train.sizes[client_id]
        drawn = jax.random.randint(
            draw_key, (steps, batch_size), 0, jnp.maximum(size, 1), jnp.int32
        )
        rows = jnp.take(train.indices, train.starts[client_id] + drawn, mode="clip")
        batch = ClientBatch(
            examples=rows,
            example_mask=None,
            step_mask=jnp.full(steps, size > 0),
            num_steps=jnp.where(size > 0, steps, 0).astype(jnp.int32),
            key=step_key,
            round=jnp.zeros((), jnp.int32),
            full_examples=None,
            full_mask=None,
            source=train.examples,
            frozen=state.frozen,
            client_id=client_id,
            constants=jax.tree.map(lambda table: table[client_id], constants),
        )
        return tune(personal.params(state, client_id), batch)

    return _NamedModels(model_of, train.names)


@dataclasses.dataclass(frozen=True)
class _NamedModels:
    """A ``ModelOf`` that knows the clients' ids."""

    model_of: ModelOf
    names: tuple[str, ...] | None

    def __call__(self, state: FedState, client_id: jax.Array) -> Params:
        return self.model_of(_checked_state(state), client_id)


def _checked_state(state: Any) -> FedState:
    if not isinstance(state, FedState):
        raise TypeError(
            f"state is {type(state).__name__}, not a FedState; pass the state of the method, such "
            "as result.state."
        )
    return state


def personal_scores(
    scores: jax.Array, sizes: jax.Array, name: str = "accuracy", *, mode: str | None = None
) -> Metrics:
    """Summarise the clients' scores on their own examples.

    Args:
      scores: float [N], result of ``build_personal_evaluation``.
      sizes: int [N], number of examples of each client; clients without examples are excluded. A
        client with examples whose score is not finite is one of the worst, and the means that
        include it are not finite.
      name: name of the score.
      mode: "max" if a large score is good, "min" if a small one is; None: "max" for "accuracy",
        and "min" by any other name, which is taken for that of an error.

    Returns:
      Three means, NaN if no client has examples:

      - ``personal_NAME``: each client counts once;
      - ``personal_NAME_weighted``: each example counts once;
      - ``personal_NAME_worst``: the worst tenth of the clients, ceil(n / 10) of the n clients with
        examples.

    Raises:
      ValueError: ``scores`` and ``sizes`` are not of one length, or ``mode`` is unknown.
    """
    if mode is None:
        mode = "max" if name == "accuracy" else "min"
    check_choice("mode", mode, ("max", "min"))
    sign = 1 if mode == "max" else -1
    scores, sizes = jnp.asarray(scores), jnp.asarray(sizes)
    if scores.ndim != 1 or scores.shape != sizes.shape:
        raise ValueError(
            f"scores has shape {scores.shape} and sizes {sizes.shape}; both must be [N], with a "
            "number for each client."
        )
    held = sizes > 0
    weights = jnp.where(held, sizes, 0).astype(scores.dtype)
    values = jnp.where(held, scores, 0)
    # The worst first, clients without examples last.
    quality = jnp.where(jnp.isfinite(values), sign * values, -jnp.inf)
    order = jnp.sort(jnp.where(held, quality, jnp.inf))
    worst = jnp.ceil(WORST * held.sum()).astype(jnp.int32)
    mean_of_worst = jnp.where(jnp.arange(len(order)) < worst, order, 0).sum() / worst
    return {
        f"personal_{name}": values.sum() / held.sum(),
        f"personal_{name}_weighted": (weights * values).sum() / weights.sum(),
        f"personal_{name}_worst": sign * mean_of_worst,
    }


def build_personal_evaluation(
    count_fn: CountFn,
    model_of: ModelOf,
    clients: FederatedArrays,
    batch_size: int = 1000,
    *,
    lowering: str = "auto",
) -> Callable[[FedState], jax.Array]:
    """Build ``evaluate(state) -> accuracy [N]``: each client's own model on its own examples.

    A client without data gets NaN. A client whose model or error is not finite gets the worst
    score: accuracy 0, or an infinite error. The clients are evaluated one after the other; devices
    that all have a copy of the state share them.

    Args:
      count_fn: as in ``build_evaluation``. Its third argument, if it is called frozen or has no
        default, gets the state's frozen weights, those of ``with_frozen``.
      model_of: (state, int32 id) -> that client's params, traced: ``client_models(algorithm)``,
        or a function of your own.
      clients: the clients' examples, such as held-out parts of their own data. If it has names, and
        so has the ``train`` of ``client_models``, each client is scored with the model of that
        name; some clients may be left out. Otherwise client i is the one of the state's row i.
      batch_size: largest number of examples in a step of the evaluation.
      lowering: as in ``build_evaluation``.

    Returns:
      state -> accuracy [N] in the order of ``clients``.

    Raises:
      ValueError: ``batch_size`` is below 1; ``lowering`` is unknown; a client has values that are
        not finite; ``count_fn.score`` is no name or "test_loss"; ``clients`` has a name that the
        training data lack; or, when a state is evaluated, it has another number of clients and
        these have no names, a label has no logit, or ``count_fn`` returns arrays of another shape.
      TypeError: ``clients`` is no federation, or a stream; ``count_fn`` or ``model_of`` is no
        function; ``count_fn`` takes other arguments; or, when it is evaluated, the state of
        ``client_models`` is no ``FedState``, or ``count_fn`` returns something else.
    """
    reads_frozen = callable(count_fn) and _reads_frozen(count_fn)
    score = check_count_fn(count_fn, reads_frozen)
    _check_model_of(model_of)
    check_scored(clients, "build_personal_evaluation")
    check_int("batch_size", batch_size, minimum=1)
    numbers = in_batches(max(1, clients.max_size), batch_size)
    rows_of = _rows_of(model_of, clients)

    def of_client(state, clients, client_id):
        params = model_of(state, client_id if rows_of is None else rows_of[client_id])
        start, held = clients.starts[client_id], clients.sizes[client_id]
        rows = clients.indices[start + jnp.minimum(numbers, held - 1)], numbers < held
        resident = clients.examples, state.frozen if reads_frozen else ()
        correct, _ = count_in_batches(count_fn, params, resident, rows)
        total = jnp.where(rows[1], correct, 0).sum(1).sum()
        total = jnp.where(tree.all_finite(params), total, jnp.nan)
        return client_score(total, held, score)

    def all_clients(state, resident, mesh):
        def one_by_one(shared, ids):
            state, clients = shared
            return jax.lax.map(lambda client_id: of_client(state, clients, client_id), ids)

        clients, _ = resident
        return over_devices(one_by_one, (state, clients), jnp.arange(clients.num_clients), mesh)

    scored = may_be_nan(on_all_devices(all_clients, (clients, ()), lowering, _is_everywhere))

    is_checked = not clients.indices.size

    def evaluate(state: FedState) -> jax.Array:
        nonlocal is_checked
        state = with_all_rows(state)
        if not (is_checked or is_traced(state)):
            params = jax.eval_shape(model_of, state, jnp.zeros((), jnp.int32))
            frozen = state.frozen if reads_frozen else ()
            counts, size = functools.partial(count_batch, count_fn), numbers.shape[1]
            check_labels_of(counts, params, frozen, clients.examples, size, clients.indices)
            is_checked = True
        by_number = isinstance(model_of, _NamedModels) and rows_of is None
        if by_number and not is_traced(state.num_clients):
            _check_number(int(state.num_clients), clients.num_clients)
        return scored(state)

    evaluate.made_of = count_fn, model_of, clients, batch_size  # type: ignore[attr-defined]
    return evaluate


def _check_model_of(model_of: Any) -> None:
    if not callable(model_of):
        name = model_of.name if isinstance(model_of, Algorithm) else repr(model_of)
        raise TypeError(
            f"model_of is {name}; it must be a function of a state and a client's id, such as "
            "client_models(algorithm)."
        )


def _reads_frozen(count_fn: Callable[..., Any]) -> bool:
    """Return True if a function takes frozen weights as its third argument."""
    try:
        parameters = inspect.signature(count_fn).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return False
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(placed) < 3 or placed[2].name == "mask":
        return False
    return placed[2].default is inspect.Parameter.empty or placed[2].name == "frozen"


def _is_everywhere(state: FedState) -> bool:
    """Return True if each device has a copy of the state, so that none has to be sent."""
    return all(
        leaf.is_fully_replicated and len(leaf.devices()) == jax.device_count()
        for leaf in jax.tree.leaves(state)
        if isinstance(leaf, jax.Array)
    )


def _rows_of(model_of: ModelOf, clients: FederatedArrays) -> jax.Array | None:
    """Return the state's row for each client, int32 [N]; None if it is the client's own number."""
    names = getattr(model_of, "names", None)
    if names is None or clients.names is None or names == clients.names:
        return None
    places = {name: place for place, name in enumerate(names)}
    unknown = [name for name in clients.names if name not in places]
    if unknown:
        raise ValueError(
            f"clients has {unknown[0]!r}, which is no client of the training data and so has no "
            f"model; these have {', '.join(map(repr, names[:10]))}{', ...' * (len(names) > 10)}."
        )
    return jnp.array([places[name] for name in clients.names], jnp.int32)


def _check_number(of_state: int, of_clients: int) -> None:
    if of_state != of_clients:
        raise ValueError(
            f"clients has {of_clients} clients and the state {of_state}. Pass the same clients; or "
            "give both federations names, and client_models the training data."
        )
