"""Metrics of a local step in addition to its loss: metrics of the loss function, and measures.

Axes: B examples of a mini-batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors

from fedjax_lab import tree
from fedjax_lab.checks import no_real_number
from fedjax_lab.models.lowering import lowered
from fedjax_lab.signatures import parameter_of
from fedjax_lab.types import ClientBatch, Key, LossFn, Metrics, Params, PyTree

# (params, gradient) -> scalar
Measure = Callable[[Params, PyTree], Any]
# Metrics that every round has, even one without participants.
OF_EVERY_ROUND = frozenset(
    {
        *("round_seconds", "available_clients", "dropped_clients"),
        *("communicated", "clip_norm", "server_updates", "client_lr"),
    }
)
# Metrics of the server's step. A round in which the server takes none has ``server_updates`` 0.
OF_SERVER_STEP = frozenset(
    {
        *("delta_norm", "momentum_norm", "effective_steps", "server_step", "staleness"),
        *("server_qp_residual", "server_qp_active", "server_qp_iterations"),
        *("saturated", "vanished", "too_few_for_rule", "server_lr"),
    }
)
# What a run itself enters in its rows. No method may report a metric of these names.
OF_RUN = frozenset(
    {
        *("round", "seconds", "compile_seconds", "simulated_seconds", "run", "diverged"),
        *("gradients", "participants", "nonfinite_clients", "bytes_up", "bytes_down", "epsilon"),
    }
)
# Before the names of numbers of each slot, [S], which are no metrics of a row.
PER_CLIENT = "per_client/"
IS_KNOWN = "/is_known"  # after the name of such a number, whether a client has it
# Ending of a metric -> the share of the participants that lie below it.
UPDATE_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
_OF_UPDATES = ("update_norm", "update_cosine", "cosine_to_last", "client_drift")
# Reserved names of metrics, which a loss function may not use.
OWN_METRICS = frozenset(
    {
        *OF_EVERY_ROUND,
        *OF_SERVER_STEP,
        *OF_RUN,
        *("loss", "local_steps", "local_params", "finite_clients"),
        *("message_parts", "message_sq", "error_sq", "change_sq"),
        *("client_qp_residual", "client_qp_active", "mixing"),
        *("clipped_clients", "clipped_steps", "overflow", "gradient_diversity"),
        *_OF_UPDATES,
        *(f"{name}_{ending}" for name in _OF_UPDATES for ending in UPDATE_QUANTILES),
    }
)
_OWN = ", ".join(sorted(OWN_METRICS))
# Parts of flax's messages about variables that are no parameters.
_OF_FLAX = (
    errors.ScopeCollectionNotFound,
    errors.ModifyScopeVariableError,
    errors.TraceContextError,
)


def takes_mask(function: Callable[..., Any]) -> bool:
    """Return True if a function has an argument named ``mask``."""
    return parameter_of(function, "mask") is not None


def mask_argument(
    function: Callable[..., Any], mask: jax.Array | None, size: int
) -> dict[str, jax.Array | None]:
    """Return the keyword arguments that tell a function which examples are real.

    Args:
      mask: bool [B]; None: all examples are real.

    Returns:
      {} for a function without an argument ``mask``. Else {"mask": bool [B]}; if all examples are
      real and the argument's default is None, {"mask": None}.
    """
    named = parameter_of(function, "mask")
    if named is None:
        return {}
    if mask is None and named.default is not None:
        mask = jnp.ones(size, bool)
    return {"mask": mask}


def original_of(loss_fn: LossFn) -> Callable[..., Any]:
    """Return the caller's own function of a loss that a wrapper has made of it."""
    return getattr(loss_fn, "original", loss_fn)


def needs_constants(function: Callable[..., Any]) -> bool:
    """Return True if a function has an argument named ``constants`` without a default."""
    named = parameter_of(function, "constants")
    return named is not None and named.default is named.empty


def constants_argument(function: Callable[..., Any], constants: PyTree) -> dict[str, PyTree]:
    """Return the keyword arguments that pass a client's constants to a loss.

    Args:
      constants: the client's constants; without leaves: there are none.

    Returns:
      {"constants": constants} for a function with an argument of this name, else {}.

    Raises:
      ValueError: the function needs constants, and there are none.
    """
    if jax.tree.leaves(constants):
        return {"constants": constants} if parameter_of(function, "constants") else {}
    if needs_constants(function):
        raise ValueError(
            "loss_fn has an argument constants, and there are no constants of the clients: pass "
            "client_constants, a pytree of arrays [N, ...], to simulate, sweep, tune or draw_batch."
        )
    return {}


def with_constants(loss_fn: LossFn, constants: PyTree) -> LossFn:
    """Return a loss of (params, examples, key) that has a client's constants.

    Args:
      loss_fn: a loss; without an argument ``constants`` it is returned unchanged.

    Raises:
      ValueError: as ``constants_argument``.
    """
    named = constants_argument(loss_fn, constants)
    if not named:
        return loss_fn
    bound: Any = functools.partial(loss_fn, **named)
    bound.original = original_of(loss_fn)
    return bound


def apply_loss(
    loss_fn: LossFn, params: Params, examples: PyTree, key: Key, mask: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """Call a loss function and check its result; returns (losses [B], metrics).

    A metric is either a number for each example, averaged over examples like the loss, or one
    number for the mini-batch, averaged over steps. It is converted to the dtype of the losses,
    which is float32 at least.

    Args:
      loss_fn: (params, examples, key) -> losses, float [B], or (losses, {name: [B] or scalar}). If
        it has an argument named ``mask``, it gets bool [B], True for real examples; with None as
        its default, it gets None if all examples are real.
      examples: pytree [B, ...].
      mask: bool [B], passed to the loss; None: all examples are real. Losses are not masked here.

    Raises:
      TypeError: the result has the wrong type.
      ValueError: an array has the wrong shape, a metric has a reserved name, or a flax module has
        variables in addition to its parameters.
    """
    size = jax.tree.leaves(examples)[0].shape[0]
    named = mask_argument(loss_fn, mask, size)
    try:
        losses: Any = lowered(loss_fn)(params, examples, key, **named)
    except _OF_FLAX as error:
        said = str(error).partition(" (http")[0].rstrip(".")
        raise ValueError(
            f"loss_fn: {said}. The running statistics of flax's own BatchNorm are not among the "
            "parameters. Use fedjax_lab.models.batch_norm.BatchNorm, which stores them there, or "
            "GroupNorm, which has none. A module of flax NNX must be built from its parameters "
            "inside loss_fn, as fedjax_lab.models.nnx.from_nnx does."
        ) from error
    metrics: Mapping[str, Any] = {}
    if isinstance(losses, tuple) and len(losses) == 2 and isinstance(losses[1], Mapping):
        losses, metrics = losses
    if not isinstance(losses, (jax.Array, np.ndarray)):
        raise TypeError(
            f"loss_fn returned {type(losses).__name__}; it must return one loss per example, "
            f"an array of shape ({size},), or (losses, dict of metrics)."
        )
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise TypeError(f"loss_fn returned {losses.dtype}; losses must be floating-point.")
    if jnp.shape(losses) != (size,):
        raise ValueError(
            f"loss_fn returned an array of shape {jnp.shape(losses)}; it must return one loss "
            f"per example, shape ({size},). The library computes the mean."
        )
    # Counts and rates that go with them have their dtype, and bfloat16 has 8 bits.
    losses = tree.widen(jnp.asarray(losses))
    return losses, {name: _metric(name, value, losses) for name, value in metrics.items()}


def _metric(name: Any, value: Any, losses: jax.Array) -> jax.Array:
    if not isinstance(name, str):
        raise TypeError(f"loss_fn returned a metric called {name!r}; a name must be a string.")
    if is_reserved(name):
        raise ValueError(
            f"loss_fn returned a metric called {name!r}; this name is reserved, like {_OWN} and "
            f"names that begin with {PER_CLIENT}. Choose another name."
        )
    if kind := no_real_number(value):
        raise TypeError(
            f"loss_fn returned the metric {name!r}, a {kind}; it must be a real number, or an "
            "array with one for each example."
        )
    if jnp.shape(value) not in ((), losses.shape):
        raise ValueError(
            f"loss_fn returned the metric {name!r} of shape {jnp.shape(value)}; it must be a "
            f"scalar, or have a number for each example, shape {losses.shape}."
        )
    return jnp.asarray(value, losses.dtype)


def is_reserved(name: str) -> bool:
    """Return True for a name of the library's own metrics."""
    return name in OWN_METRICS or name.startswith(PER_CLIENT)


def with_frozen_weights(loss_fn: LossFn, frozen: PyTree) -> LossFn:
    """Convert the loss of an ``Algorithm`` to a function of (params, examples, key).

    Args:
      frozen: frozen weights for the loss; () if there are none.
    """
    return functools.partial(loss_fn, frozen=frozen) if jax.tree.leaves(frozen) else loss_fn


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Measures:
    """Metrics of each gradient of a client, in addition to its loss.

    They are passed from ``ClientBatch`` to ``Step``. In a pytree they have no leaves.

    Attributes:
      named: pairs (name of the metric, function (params, gradient) -> scalar).
    """

    named: tuple[tuple[str, Measure], ...]

    def of(self, params: Params, grads: PyTree, loss: jax.Array, taken: Set[str]) -> Metrics:
        """Compute the measures of one gradient, in the dtype of the loss.

        Raises:
          TypeError: a measure is no real number.
          ValueError: a name is in ``taken``, or a measure is no scalar.
        """
        found: Metrics = {}
        for name, measure in self.named:
            if name in taken:
                raise ValueError(f"loss_fn and measures both have a metric called {name!r}.")
            value = measure(params, grads)
            if kind := no_real_number(value):
                raise TypeError(
                    f"the measure {name!r} returned a {kind}; it must return a real number."
                )
            if jnp.shape(value) != ():
                raise ValueError(
                    f"the measure {name!r} returned an array of shape {jnp.shape(value)}; it must "
                    "return a scalar."
                )
            found[name] = jnp.asarray(value, loss.dtype)
        return found


def add_measures(batch: ClientBatch, measures: Mapping[str, Measure]) -> ClientBatch:
    """Add measures to a batch; of two with one name the batch's stays, that of an outer wrapper.

    Args:
      measures: name -> measure.
    """
    known = {} if batch.measures is None else dict(batch.measures.named)
    return batch._replace(measures=Measures(tuple({**measures, **known}.items())))
