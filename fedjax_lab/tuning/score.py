"""The score of a point on validation examples: by default its loss, as in evaluation."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.checks import check_choice
from fedjax_lab.clients.metrics import apply_loss, needs_constants, original_of, with_frozen_weights
from fedjax_lab.machine.keys import seeded
from fedjax_lab.machine.trace_once import used_inputs, used_operations
from fedjax_lab.round import Algorithm
from fedjax_lab.types import LossFn, Params, PyTree

# (params, examples [B, ...]) -> a score of each example, [B]
ScoreFn = Callable[[Params, PyTree], jax.Array]
_DRAWS = re.compile(r"\b(random_bits|random_gamma|rng_bit_generator|rng_uniform)\b")


def check_score(score: ScoreFn | None, mode: str) -> None:
    """Check ``tune``'s arguments ``score`` and ``mode``.

    Raises:
      TypeError: ``score`` is neither None nor a function.
      ValueError: ``mode`` is unknown, or "max" for the loss.
    """
    check_choice("mode", mode, ("max", "min"))
    if score is not None and not callable(score):
        raise TypeError(
            f"score is {score!r}; it must be None (the loss) or a function (params, examples) -> "
            "scores [B], such as lambda p, e: models.accuracy_counts(model.apply)(p, e)[0]."
        )
    if score is None and mode == "max":
        raise ValueError(
            "mode is 'max' and score None: the score is then the loss, of which less is better. "
            "Give a score, or leave mode at 'min'."
        )


def by_score(score: ScoreFn) -> Callable[..., Any]:
    """Build the evaluation of points by a function of the caller's."""

    def count(params, examples):
        return _counted(score(params, examples))

    return _named(count)


def by_loss(algorithm: Algorithm, key: Any) -> Callable[..., Any]:
    """Build the evaluation of points by the loss of a method."""
    loss_fn = _loss_of(algorithm)

    def count(params, examples, mask):
        return _counted(apply_loss(loss_fn, params, examples, key, mask)[0])

    return _named(count)


def evaluation_key(algorithm: Algorithm, params: Params, examples: PyTree) -> tuple[Any, bool]:
    """Find the key with which a method's loss is evaluated: None, wherever the loss takes it.

    The key None means evaluation throughout the package: no dropout, no augmentation, and running
    statistics. The package's losses take it, and so does a loss that passes its key on to them, to
    ``Model.apply`` or to ``preprocess``.

    Returns:
      (key, whether the loss is that of evaluation). If the loss fails with None, or draws numbers
      nevertheless, the key is a fixed one. This is a loss of evaluation only if it ignores its key.

    Raises:
      ValueError: the method has no loss.
      TypeError, ValueError: as ``apply_loss``.
    """
    loss_fn = _loss_of(algorithm)
    rows = tree.with_rows(examples, 2)

    def losses(params, rows, key):
        return apply_loss(loss_fn, params, rows, key)[0]

    try:
        without = used_operations(jax.make_jaxpr(losses)(params, rows, None))
        if not _DRAWS.search(str(without)):  # but for unused ones, as NNX's initializers draw
            return None, True
    except Exception:  # of the caller's own function; it is called with a key next
        pass
    key = seeded(0)
    return key, not used_inputs(jax.make_jaxpr(losses)(params, rows, key))[-1]


def _loss_of(algorithm: Algorithm) -> LossFn:
    if algorithm.loss_fn is None:
        raise ValueError(f"{algorithm.name} takes a model and no loss; set score to tune it.")
    if needs_constants(original_of(algorithm.loss_fn)):
        raise ValueError(
            f"the loss of {algorithm.name} has an argument constants without a default, and "
            "validation examples have no client: set score to tune it."
        )
    return with_frozen_weights(algorithm.loss_fn, algorithm.frozen)


def _counted(values: Any) -> tuple[jax.Array, jax.Array]:
    values = jnp.asarray(values[0] if isinstance(values, tuple) else values, jnp.float32)
    return values, values


def _named(count: Any) -> Callable[..., Any]:
    count.score = count.argument = "score"
    return count
