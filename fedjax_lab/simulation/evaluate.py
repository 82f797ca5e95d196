"""Evaluation on resident data: jitted once, in batches of fixed size, on all devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_lab import tree
from fedjax_lab.checks import check_choice, check_int, is_traced
from fedjax_lab.clients.metrics import takes_mask
from fedjax_lab.clients.model_axis import divided_over, on_mesh
from fedjax_lab.clients.sources import on_any_device
from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.dtypes import to_device
from fedjax_lab.data.streams import check_clients, check_no_stream, check_resident
from fedjax_lab.machine.compiler import mesh_of
from fedjax_lab.machine.keys import seeded
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.machine.target import LOWERINGS, tracing_with
from fedjax_lab.models.base import Apply
from fedjax_lab.models.batch_norm import recompute_statistics
from fedjax_lab.models.lowering import lowered
from fedjax_lab.signatures import other_arguments, suggest_keywords
from fedjax_lab.simulation.arguments import check_labels_of, nonfinite_data
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.storage.fingerprint import hash_arrays
from fedjax_lab.types import Params, PyTree

# (params, examples [B, ...]) -> (correct [B], losses [B]), both float; or another score, whose
# name is the function's attribute ``score``, in place of ``correct``. With frozen weights, they
# are the third argument. One that names an argument ``mask`` gets bool [B]: which are real.
CountFn = Callable[..., tuple[jax.Array, jax.Array]]


@suggest_keywords
def build_evaluation(
    count_fn: CountFn,
    test: PyTree,
    batch_size: int = 1000,
    frozen: PyTree = (),
    *,
    lowering: str = "auto",
) -> Callable[[Params], dict[str, jax.Array]]:
    """Build ``evaluate(params) -> {"accuracy", "test_loss"}`` over all of ``test``.

    Args:
      count_fn: (params, examples [B, ...]) -> (correct [B], losses [B]), such as
        ``fedjax_lab.models.accuracy_counts`` returns. Its attribute ``score``, if any, replaces the
        name "accuracy": ``fedjax_lab.models.squared_error_counts`` gives {"mean_squared_error",
        "test_loss"}. By another name than "accuracy" it counts as an error, of which less is
        better. A report ranks by "accuracy", "perplexity" or "mean_squared_error". If its attribute
        ``perplexity`` is true, as it is for ``fedjax_lab.models.token_counts``, "perplexity" is
        exp("test_loss"). The last batch is padded with other examples. A function that compares
        examples takes an argument ``mask``, bool [B], True for examples that are not padding.
      test: pytree [n, ...], copied to the device once in its storage dtype; or ``FederatedArrays``,
        of which all clients' examples are used together.
      batch_size: examples per step of the evaluation's scan.
      frozen: pytree of arrays, such as those of ``with_frozen``. ``count_fn`` is then called as
        (params, examples, frozen), and the arrays are an argument of the program.
      lowering: of the model's convolutions and poolings, as in ``simulate``.

    Raises:
      ValueError: ``batch_size`` is below 1, ``lowering`` is unknown, ``test`` has values that are
        not finite or has no examples, ``count_fn.score`` is no name or "test_loss", or (at the
        first call) a label without a logit, or ``count_fn`` returns arrays of another shape.
      TypeError: ``test`` is a stream, or ``count_fn`` is no function, takes other arguments or (at
        the first call) returns something else.
    """
    score = check_count_fn(count_fn, bool(jax.tree.leaves(frozen)))
    check_int("batch_size", batch_size, minimum=1)
    check_no_stream(test)
    keep_by_default()
    if isinstance(test, FederatedArrays):
        held = test.indices
        test = jax.tree.map(lambda leaf: leaf[held], test.examples)
    test = jax.tree.map(functools.partial(to_device, "test"), test)
    if not jax.tree.leaves(test)[0].shape[0]:
        raise ValueError("test has no examples, so there is nothing to score.")
    if not tree.all_finite(test):
        raise ValueError("test has values that are not finite, so a score would be meaningless.")
    frozen = jax.tree.map(jnp.asarray, frozen)

    def run(params, resident, mesh):
        test, _ = resident
        places = jnp.arange(jax.tree.leaves(test)[0].shape[0])
        scores, losses = _per_example(count_fn, params, resident, places, batch_size, mesh)
        found = {score: scores.mean(), "test_loss": losses.mean()}
        if getattr(count_fn, "perplexity", False):
            found["perplexity"] = jnp.exp(found["test_loss"])
        return found

    evaluate = on_all_devices(run, (test, frozen), lowering)
    return _checked_first(evaluate, count_fn, test, frozen, batch_size)


def check_count_fn(count_fn: Any, with_frozen: bool) -> str:
    """Check that an evaluation has a function that scores examples; returns the score's name.

    Args:
      with_frozen: whether it gets frozen weights as its third argument.

    Raises:
      TypeError: it is no function, or takes other arguments.
      ValueError: its score has no name, or that of the loss.
    """
    if not callable(count_fn):
        raise TypeError(
            f"count_fn is {count_fn!r}; it must be a function, such as "
            "models.accuracy_counts(model.apply)."
        )
    if found := other_arguments(count_fn, 3 if with_frozen else 2, "mask"):
        wanted = "(params, examples, frozen)" if with_frozen else "(params, examples)"
        weights = "with" if with_frozen else "without"
        raise TypeError(
            f"count_fn takes ({found}); {weights} frozen weights it must take {wanted}, and may "
            "name an argument mask."
        )
    score = getattr(count_fn, "score", "accuracy")
    taken = ["test_loss", "perplexity"] if getattr(count_fn, "perplexity", False) else ["test_loss"]
    if not isinstance(score, str) or not score or score in taken:
        raise ValueError(
            f"count_fn.score is {score!r}; it must be a name other than {' and '.join(taken)}, "
            "which the evaluation itself returns."
        )
    return score


def check_scored(clients: Any, what: str) -> None:
    """Check the clients of an evaluation.

    Raises:
      TypeError: it is something else.
      ValueError: a client has values that are not finite.
    """
    check_clients(clients)
    check_resident(clients, what)
    if found := nonfinite_data(clients):
        raise ValueError(f"{found}, so a score would be meaningless.")


def _checked_first(evaluate, count_fn, test, frozen, batch_size, held=None):
    """Wrap ``evaluate`` so that its first call checks the results of ``count_fn``."""
    is_checked = False

    def evaluate_checked(params):
        nonlocal is_checked
        if not is_checked:
            counts = functools.partial(count_batch, count_fn)
            check_labels_of(counts, params, frozen, test, batch_size, held)
            is_checked = True
        return evaluate(params)

    evaluate_checked.made_of = count_fn, test, frozen, batch_size, held  # type: ignore[attr-defined]
    return evaluate_checked


def with_recomputed_statistics(
    evaluate: Callable[[Params], dict[str, jax.Array]],
    apply: Apply,
    x: jax.Array,
    *,
    lowering: str = "auto",
) -> Callable[[Params], dict[str, jax.Array]]:
    """Add "accuracy_recomputed" to ``evaluate``, for a model with batch normalization.

    This is the accuracy with running statistics computed from ``x``, in place of those from the
    clients' steps and the server. Under label skew the latter may describe no client's data.

    Args:
      evaluate: params -> scalars with "accuracy".
      apply: the model's function ``(params, x, key=None) -> [B, ...]``.
      x: [B, ...], inputs of training examples, at least two.
      lowering: as in ``build_evaluation``.

    Raises:
      ValueError: ``lowering`` is unknown, or the params have no running statistics (at the first
        call).
    """
    check_choice("lowering", lowering, LOWERINGS)
    x = jnp.asarray(x)

    @jax.jit
    def recompute(params, x):
        with tracing_with(lowering):
            return recompute_statistics(apply, params, x, seeded(0))

    def evaluate_twice(params):
        recomputed = evaluate(recompute(params, x))["accuracy"]
        return {**evaluate(params), "accuracy_recomputed": recomputed}

    return evaluate_twice


def build_client_evaluation(
    count_fn: CountFn,
    clients: FederatedArrays,
    batch_size: int = 1000,
    frozen: PyTree = (),
    *,
    lowering: str = "auto",
) -> Callable[[Params], jax.Array]:
    """Build ``evaluate(params) -> accuracy [N]`` on each client's own examples.

    A client without data gets NaN. A client whose error is NaN gets an infinite one.

    Args:
      count_fn: as in ``build_evaluation``; the result is the mean of its first array.
      clients: the clients' training data or test data.
      batch_size: examples per step of the evaluation's scan.
      frozen, lowering: as in ``build_evaluation``.

    Raises:
      ValueError: ``batch_size`` is below 1, ``lowering`` is unknown, a client has values that are
        not finite, ``count_fn.score`` is no name or "test_loss", or (at the first call) a label
        without a logit, or ``count_fn`` returns arrays of another shape.
      TypeError: ``clients`` is no federation, or a stream; or ``count_fn`` is no function, takes
        other arguments or (at the first call) returns something else.
    """
    score = check_count_fn(count_fn, bool(jax.tree.leaves(frozen)))
    check_int("batch_size", batch_size, minimum=1)
    check_scored(clients, "build_client_evaluation")

    def run(params, resident, mesh):
        clients, frozen = resident
        held, resident = clients.indices, (clients.examples, frozen)
        correct, _ = _per_example(count_fn, params, resident, held, batch_size, mesh)
        position = jnp.arange(held.shape[0])
        owner = jnp.searchsorted(clients.starts + clients.sizes, position, side="right")
        counts = jax.ops.segment_sum(correct, owner, clients.num_clients)
        return client_score(counts, clients.sizes, score)

    frozen = jax.tree.map(jnp.asarray, frozen)
    evaluate = on_all_devices(run, (clients, frozen), lowering)
    of_clients = count_fn, clients.examples, frozen, batch_size, clients.indices
    return may_be_nan(_checked_first(evaluate, *of_clients))


def client_score(total: jax.Array, size: jax.Array, name: str) -> jax.Array:
    """Average the score of clients, so that NaN means that a client has no data.

    Args:
      total: float [...], sum over a client's examples.
      size: int [...], their number.
      name: name of the score: "accuracy" (larger is better), or that of an error.

    Returns:
      float [...]. If the total of examples is NaN, the worst score: accuracy 0, or infinity.
    """
    worst = 0.0 if name == "accuracy" else jnp.inf
    return jnp.where(size > 0, jnp.where(jnp.isnan(total), worst, total / size), jnp.nan)


def may_be_nan(evaluate: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array]:
    """Exempt a function from ``jax_debug_nans``, because its NaN means that a client has no data.

    Args:
      evaluate: params or state -> scores [N].
    """

    def evaluate_unchecked(value):
        with jax.debug_nans(False):
            return evaluate(value)

    return evaluate_unchecked


def on_all_devices(
    run: Callable[..., Any],
    resident: tuple[PyTree, PyTree],
    lowering: str = "auto",
    may_divide: Callable[[PyTree], bool] = lambda params: True,
) -> Callable[..., Any]:
    """Jit ``params -> run(params, resident, mesh)``; the mesh is None on one device.

    Batches are sharded over the mesh's first axis. Params may be on any device. If devices divide
    them, their mesh is used; the frozen weights, the second of ``resident``, keep their division or
    are divided along their longest axes. Inside another program the mesh is None, too: the
    surrounding program decides where the evaluation runs.

    Args:
      run: (params, resident, mesh) -> scores, the same on all devices; see ``over_devices``.
      may_divide: params -> whether devices share the work.

    Raises:
      ValueError: ``lowering`` is unknown; or, when they evaluate, processes have different data.
    """
    check_choice("lowering", lowering, LOWERINGS)

    @functools.partial(jax.jit, static_argnums=2)
    def scores(params, resident, mesh):
        with tracing_with(lowering):
            return run(params, resident, mesh)

    processes, devices = Processes.here(), jax.devices()
    everybody = mesh_of(tuple(devices), "batches") if len(devices) > 1 else None

    @functools.lru_cache(maxsize=1)  # a run has one mesh
    def copies_on(mesh):
        everywhere = NamedSharding(mesh, PartitionSpec())
        if processes.is_multiprocess:
            processes.meet()
            processes.agree({"the evaluation's examples": hash_arrays(processes.local(resident))})
            return processes.put(resident, everywhere)
        data, frozen = resident
        return jax.device_put(data, everywhere), on_mesh(frozen, mesh, divide=True)

    @functools.lru_cache(maxsize=4)
    def compiled_by_all(mesh, structure, kinds):
        everywhere = NamedSharding(mesh, PartitionSpec())
        leaves = [jax.ShapeDtypeStruct(*kind, sharding=everywhere) for kind in kinds]
        params = jax.tree.unflatten(structure, leaves)
        program = scores.lower(params, copies_on(mesh), mesh).compile()
        processes.meet()
        return program

    def evaluate(params):
        mesh = divided_over((params, resident[1])) or everybody
        if mesh is None or is_traced(params):
            return scores(params, resident, None)
        if not may_divide(params):
            return scores(processes.collected(params), resident, None)
        if processes.is_multiprocess:
            params = processes.put(params, NamedSharding(mesh, PartitionSpec()))
            leaves, structure = jax.tree.flatten(params)
            kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            return compiled_by_all(mesh, structure, kinds)(params, copies_on(mesh))
        return on_any_device(scores(on_mesh(params, mesh), copies_on(mesh), mesh))

    return evaluate


def count_batch(
    count_fn: CountFn, params: Params, batch: PyTree, frozen: PyTree, real: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Call ``count_fn`` on a batch; returns (correct [B], losses [B]).

    Counts are at least float32, so that sums of bool, small integers or bfloat16 are exact.

    Args:
      frozen: frozen weights, or ().
      real: bool [B], False for padding; None: no padding.

    Raises:
      ValueError: ``count_fn`` returns arrays of another shape.
      TypeError: ``count_fn`` returns something else.
    """
    third = (frozen,) if jax.tree.leaves(frozen) else ()
    named, size = {}, jax.tree.leaves(batch)[0].shape[0]
    if takes_mask(count_fn):
        named["mask"] = jnp.ones(size, bool) if real is None else real
    counts: Any = lowered(count_fn)(params, batch, *third, **named)
    if not (isinstance(counts, tuple) and len(counts) == 2):
        raise TypeError(
            f"count_fn returned {type(counts).__name__}; it must return (correct [B], losses [B]), "
            "such as models.accuracy_counts(model.apply) does."
        )
    for value in counts:
        if jnp.shape(value) not in ((size,), (size, 1)):
            raise ValueError(
                f"{getattr(count_fn, 'argument', 'count_fn')} returned an array of shape "
                f"{jnp.shape(value)} for {size} examples; it must have a number for each, shape "
                f"({size},). The library computes the mean."
            )
    values = (jnp.asarray(value).reshape(size) for value in counts)
    correct, losses = (value.astype(tree.wide_dtype(value.dtype)) for value in values)
    return correct, losses


def in_batches(count: int, batch_size: int) -> jax.Array:
    """Number examples in batches: int [batches, B] from 0; numbers from ``count`` on are padding.

    Args:
      count: number of examples, at least 1.
      batch_size: the largest B.
    """
    size = min(batch_size, count)
    return jnp.arange(-(-count // size) * size).reshape(-1, size)


def count_in_batches(
    count_fn: CountFn, params: Params, resident: tuple[PyTree, PyTree], rows: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """Compute (correct, losses), both [batches, B], one batch after the other.

    Args:
      resident: (examples [n, ...], frozen weights or ()).
      rows: (places of the examples, bool: which are no padding), both [batches, B].
    """
    examples, frozen = resident

    def one_batch(rows):
        places, real = rows
        batch = jax.tree.map(lambda leaf: leaf[places], examples)
        return count_batch(count_fn, params, batch, frozen, real)

    return jax.lax.map(one_batch, rows)


def over_devices(
    run: Callable[[PyTree, PyTree], PyTree], shared: PyTree, rows: PyTree, mesh: Mesh | None
) -> PyTree:
    """Compute ``run(shared, rows)`` [n, ...] with the rows divided over the first axis of a mesh.

    Args:
      run: (shared, rows [m, ...]) -> results [m, ...], row by row.
      shared: values that each device has.
      rows: [n, ...].
      mesh: the mesh; None: one device.
    """
    if mesh is None:
        return run(shared, rows)
    axis = mesh.axis_names[0]
    count = jax.tree.leaves(rows)[0].shape[0]
    padded = jnp.arange(count + -count % mesh.shape[axis]) % count

    def on_device(shared, rows):
        # Put together, so that means of the results are added up on each device alike.
        found = run(shared, rows)
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, axis, tiled=True), found)

    divided = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(axis)),
        out_specs=PartitionSpec(),
        axis_names={axis},
        check_vma=False,
    )
    found = divided(shared, jax.tree.map(lambda leaf: leaf[padded], rows))
    return jax.tree.map(lambda leaf: leaf[:count], found)


def _per_example(count_fn, params, resident, places, batch_size, mesh):
    """Compute (correct [m], losses [m]) of the examples at ``places`` [m]; the first ones pad."""
    total = places.shape[0]
    numbers = in_batches(total, batch_size)
    rows = places[numbers % total], numbers < total

    def run(shared, rows):
        params, resident = shared
        return count_in_batches(count_fn, params, resident, rows)

    counts = over_devices(run, (params, resident), rows, mesh)
    return tuple(leaf.reshape(-1)[:total] for leaf in counts)
