"""Checks of a simulation's arguments, before anything is compiled."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.checks import MOST_ROUNDS, check_int, check_tilde, warn
from fedjax_lab.clients.metrics import apply_loss, with_constants, with_frozen_weights
from fedjax_lab.data import FederatedArrays, FederatedStream
from fedjax_lab.data.heterogeneity import targets_of
from fedjax_lab.machine.keys import seeded
from fedjax_lab.machine.target import tracing_with
from fedjax_lab.machine.trace_once import used_inputs
from fedjax_lab.models.label_checks import check_labels
from fedjax_lab.round import check_algorithm
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.storage.run_dir import CLIENTS
from fedjax_lab.storage.run_path import check_run_dir
from fedjax_lab.types import Params, PyTree

_NAMED = 10  # clients, or examples, in a warning
_OF = {
    **{"evaluate": "the params", "diagnose": "the state", "stop_when": "a row"},
    "score_clients": "the params",
}


def check_lengths(rounds: int, eval_every: int, checkpoint_every: int | None) -> int:
    """Check the lengths of a run and its parts; returns the rounds between checkpoints.

    Raises:
      ValueError: a number is below 1, or exceeds the largest number of rounds.
    """
    check_int("rounds", rounds, minimum=1, maximum=MOST_ROUNDS)
    check_int("eval_every", eval_every, minimum=1)
    if checkpoint_every is None:
        return -(-rounds // 10)
    return check_int("checkpoint_every", checkpoint_every, minimum=1)


def check_functions(**functions: Any) -> None:
    """Check that arguments are functions or None.

    Args:
      **functions: values by the names of the arguments, which are keys of ``_OF``.

    Raises:
      TypeError: a value is neither a function nor None.
    """
    for argument, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(
                f"{argument} is {function!r}; it must be a function of {_OF[argument]}."
            )


def check_outputs(run_dir: Any, profile_dir: Any, config: Any, score_clients: Any = None) -> None:
    """Check where a run writes, and the caller's entries of config.json.

    Raises:
      TypeError: a folder is no path, or ``config`` is no mapping of text to JSON values.
      ValueError: checkpoints cannot have the path, ``profile_dir`` begins with a ~, a number in
        ``config`` is not finite, or ``score_clients`` is given without a ``run_dir``.
    """
    check_run_dir(run_dir)
    if score_clients is not None and run_dir is None:
        raise ValueError(
            f"score_clients is {score_clients!r} and run_dir None; its results go to {CLIENTS} of "
            "run_dir: give one."
        )
    if not (profile_dir is None or isinstance(profile_dir, (str, os.PathLike))):
        raise TypeError(f"profile_dir is {profile_dir!r}; it must be a path or None.")
    check_tilde("profile_dir", profile_dir)
    _check_config(config)


def _check_config(config: Any) -> None:
    """Check the caller's entries of config.json: text -> JSON values, or None."""
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise TypeError(f"config is a {type(config).__name__}; it must be a dict of JSON values.")
    for name, value in config.items():
        if not isinstance(name, str):
            raise TypeError(f"config has the name {name!r}; names must be text.")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, RecursionError) as error:
            raise TypeError(f"config[{name!r}] is no JSON value: {error}.") from error
        except ValueError as error:  # NaN, or a list that holds itself
            raise ValueError(f"config[{name!r}] is no JSON value: {error}.") from error


def check_simulate(
    algorithm: Any, params: Any, clients: Any, state: Any = None, only_shapes: bool = False
) -> None:
    """Check the types of ``simulate``'s first three arguments, and that there is a start.

    Args:
      state: given instead of ``params``, or None.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: both ``params`` and ``state`` are given, or ``params`` has no array.
    """
    check_algorithm(algorithm)
    if not isinstance(clients, (FederatedArrays, FederatedStream)):
        swapped = isinstance(params, (FederatedArrays, FederatedStream))
        hint = "it comes after params" if swapped else "see fedjax_lab.data.partition"
        raise TypeError(f"clients is {type(clients).__name__}, not FederatedArrays; {hint}.")
    if params is None and state is None:
        raise TypeError("params is None; pass the initial global model, or a state.")
    if params is not None and state is not None:
        raise ValueError("params and state are both given; with a state, params must be None.")
    if state is None and not jax.tree.leaves(params):
        raise ValueError(f"params is {params!r}, without any array; there is nothing to train.")
    shapes = (jax.ShapeDtypeStruct,) if only_shapes else ()
    frozen = jax.tree.leaves(algorithm.frozen)
    if not shapes and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in frozen):
        raise TypeError("the frozen weights are shapes, which fedjax_lab.plan takes alone.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, *shapes)):
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"params{where} is {type(leaf).__name__}, not an array; params is the initial "
                "global model, such as model.init(key, x) gives. A number becomes one by "
                "jnp.asarray."
            )


def nonfinite_data(clients: FederatedArrays) -> str:
    """Describe the examples with NaN or infinite values; an empty text if there are none."""
    broken = are_broken(clients.examples)[np.asarray(clients.indices)]
    if not broken.any():
        return ""
    owners = np.repeat(np.arange(clients.num_clients), np.asarray(clients.sizes))
    ids = np.unique(owners[broken]).tolist()
    named = ids if clients.names is None else [clients.names[i] for i in ids]
    return (
        f"{broken.sum()} examples of the clients {some_of(named)} have values that are not finite"
    )


def are_broken(examples: PyTree) -> np.ndarray:
    """Return which examples [n, ...], in NumPy or on a device, are not finite: bool [n]."""
    broken = np.zeros(jax.tree.leaves(examples)[0].shape[0], bool)
    for leaf in jax.tree.leaves(examples):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            finite = (np if isinstance(leaf, np.ndarray) else jnp).isfinite(leaf)
            broken |= ~np.asarray(finite.reshape(len(broken), -1).all(1))
    return broken


def some_of(names: Sequence[Any]) -> str:
    """List the first ten names, and say how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(map(str, names[:_NAMED]))}{more}"


def _warn_of_statistics(params: Any) -> None:
    """Warn if the params contain running statistics of flax's own batch normalization."""
    found = [
        tree.path_text(path)
        for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_statistic)
        if _is_statistic(node) or "batch_stats" in map(str, (getattr(p, "key", p) for p in path))
    ]
    if found:
        warn(
            f"params holds running statistics ({', '.join(found[:_NAMED])}), which have no "
            "gradient and would not follow the data. Use "
            "fedjax_lab.models.batch_norm.BatchNorm, whose statistics do.",
        )


def _is_statistic(node: Any) -> bool:
    return type(node).__name__ == "BatchStat"  # of flax NNX


def check_labels_of(
    function: Callable[[Params, PyTree, PyTree], Any],
    params: Params,
    frozen: PyTree,
    examples: PyTree,
    batch_size: int,
    places: jax.Array | np.ndarray | None = None,
    must_fit: bool = True,
) -> bool:
    """Check that the labels that a function compares with logits are in range.

    Args:
      function: (params, examples [B, ...], frozen) -> anything.
      examples: pytree [n, ...] of arrays, or of shapes where labels do not depend on the values.
      places: int [m], the examples to check; None: all.
      must_fit: whether the function takes these params. If not, and it raises, nothing is checked.

    Returns:
      Whether the function's results depend on the params.

    Raises:
      ValueError: a label is out of range.
    """
    if places is None:
        places = np.arange(jax.tree.leaves(examples)[0].shape[0])
    places = np.asarray(places)
    size = min(batch_size, len(places))
    batch = tree.with_rows(examples, size)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, frozen))
    try:
        with tracing_with("lax"):  # operations as they are written are the easiest to follow
            traced = jax.make_jaxpr(lambda batch, of: function(of[0], batch, of[1]))(batch, shapes)
    except Exception:
        if must_fit:
            raise
        return True
    check_labels(traced, examples, places, size)
    first, number = len(jax.tree.leaves(batch)), len(jax.tree.leaves(params))
    return any(used_inputs(traced)[first : first + number])


def check_model(run: Computation, clients: FederatedArrays | FederatedStream) -> None:
    """Check the params, and the loss if it is known: all clients' labels, and that it uses params.

    Only the targets of a stream are read. Params that would not train, and a loss that does not use
    its params, are warned of. What the loss raises, the rounds raise as well, unless the method
    gives it other params (one of many models).

    Raises:
      ValueError: a label is out of range.
    """
    _warn_of_statistics(run.params)
    algorithm, batch_size = run.algorithm, run.schedule.batch_size
    loss_fn: Any = algorithm.loss_fn
    if loss_fn is None:
        return
    while hasattr(loss_fn, "lower") and hasattr(loss_fn, "__wrapped__"):  # of jax.jit
        loss_fn = loss_fn.__wrapped__
    if isinstance(clients, FederatedStream):
        shapes, targets = clients.examples.shapes, clients.examples.targets
        of_targets, index = targets_of(shapes), clients.index
        examples = jax.tree.map(lambda leaf: targets if leaf is of_targets else leaf, shapes)
    else:
        index, examples = clients, clients.examples

    of_client = jax.tree.map(lambda table: jnp.zeros(table.shape[1:], table.dtype), index.constants)

    def losses(params, batch, frozen):
        own = with_constants(with_frozen_weights(loss_fn, frozen), of_client)
        return apply_loss(own, params, batch, seeded(0))

    held = clients.indices
    if not check_labels_of(losses, run.params, run.frozen, examples, batch_size, held, False):
        warn(
            f"the losses of {algorithm.name} do not depend on its params, which no step can "
            "improve: loss_fn(params, examples, key) has to use the params that it is given. Does "
            "it close over others, or has the model no place for these (adapters)?"
        )
