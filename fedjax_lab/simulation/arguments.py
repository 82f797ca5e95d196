"""What a simulation is given by mistake, told in one sentence before anything is compiled."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.data import FederatedArrays, FederatedStream
from fedjax_lab.round import Algorithm

_NAMED = 10  # clients in a warning


def check_algorithm(algorithm: Any, argument: str = "algorithm") -> None:
    """Check that a method is given, and not its factory.

    Args:
      algorithm: what was given.
      argument: the argument's name, for the error.

    Raises:
      TypeError: it is something else.
    """
    if isinstance(algorithm, Algorithm):
        return
    name = getattr(algorithm, "__name__", type(algorithm).__name__)
    hint = f"call {name}(loss_fn, client_lr=...) first" if callable(algorithm) else "see algorithms"
    raise TypeError(f"{argument} is {name}, not an Algorithm; {hint}.")


def check_stop_when(stop_when: Any) -> None:
    """Check that it is a function or None.

    Args:
      stop_when: as of ``simulate``.

    Raises:
      TypeError: it is not.
    """
    if stop_when is not None and not callable(stop_when):
        raise TypeError(f"stop_when is {stop_when!r}; it must be a function of a row.")


def check_simulate(
    algorithm: Any, params: Any, clients: Any, state: Any = None, only_shapes: bool = False
) -> None:
    """Check the kinds of ``simulate``'s first three arguments, and that it starts from something.

    Args:
      algorithm: should be an ``Algorithm``.
      params: should be a pytree of arrays.
      clients: should be ``FederatedArrays`` or ``FederatedStream``.
      state: given instead of ``params``, or None.
      only_shapes: whether nothing is run, so that shapes do in place of arrays.

    Raises:
      TypeError: one of them is something else.
      ValueError: both ``params`` and ``state`` are given.
    """
    check_algorithm(algorithm)
    if not isinstance(clients, (FederatedArrays, FederatedStream)):
        swapped = isinstance(params, (FederatedArrays, FederatedStream))
        hint = "it comes after params" if swapped else "see fedjax_lab.data.partition"
        raise TypeError(f"clients is {type(clients).__name__}, not FederatedArrays; {hint}.")
    if params is None and state is None:
        raise TypeError("params is None; give the first server model, or a state.")
    if params is not None and state is not None:
        raise ValueError("params and state are both given; with a state, params must be None.")
    shapes = (jax.ShapeDtypeStruct,) if only_shapes else ()
    if not shapes and any(map(_is_shape, jax.tree.leaves(algorithm.frozen))):
        raise TypeError("the frozen weights are shapes, which fedjax_lab.plan takes alone.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, *shapes)):
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"params{where} is {type(leaf).__name__}, not an array; params is the first server "
                "model, such as model.init(key, x) gives."
            )


def warn_of_nonfinite_data(clients: FederatedArrays) -> None:
    """Warn of clients whose examples hold NaN or infinite values, with their ids or names.

    Args:
      clients: the clients' data.
    """
    leaves = [x for x in jax.tree.leaves(clients.examples) if jnp.issubdtype(x.dtype, jnp.floating)]
    broken = np.zeros(clients.indices.shape[0], bool)
    for leaf in leaves:
        finite = jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(1)
        broken |= ~np.asarray(finite)[np.asarray(clients.indices)]
    if not broken.any():
        return
    owners = np.repeat(np.arange(clients.num_clients), np.asarray(clients.sizes))
    ids = np.unique(owners[broken]).tolist()
    named = ids if clients.names is None else [clients.names[i] for i in ids]
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    warnings.warn(
        f"{broken.sum()} examples of the clients {', '.join(map(str, named[:_NAMED]))}{more} hold "
        "values that are not finite; where they are drawn, on_nonfinite decides.",
        UserWarning,
        stacklevel=4,
    )


def warn_of_statistics(params: Any) -> None:
    """Warn of running statistics of flax's own batch normalisation among the params.

    Args:
      params: the first server model.
    """
    found = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_statistic)
        if _is_statistic(node) or "batch_stats" in map(str, (getattr(p, "key", p) for p in path))
    ]
    if found:
        warnings.warn(
            f"params holds running statistics ({', '.join(found[:_NAMED])}), which no gradient is "
            "made for: they would not follow the data. fedjax_lab.models.batch_norm.BatchNorm has "
            "some that do.",
            UserWarning,
            stacklevel=3,
        )


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_statistic(node: Any) -> bool:
    return type(node).__name__ == "BatchStat"  # of flax NNX
