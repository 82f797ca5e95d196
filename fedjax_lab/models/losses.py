"""Per-example losses of a classifier: what algorithms descend and what evaluation counts.

Axes: B examples, C classes. ``examples`` is anything with the fields ``x`` [B, ...] and ``y``
int [B]. Padding and masks are the library's business: nothing here averages over B.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_lab.models.base import Apply
from fedjax_lab.types import Key, LossFn, Params, PyTree

# (examples, key) -> examples of the same length; key None: evaluation, so no augmentation
Preprocess = Callable[[PyTree, Key | None], PyTree]


def classification_loss(apply: Apply, preprocess: Preprocess | None = None) -> LossFn:
    """Cross-entropy of every example, for training: augmentation and dropout are on.

    Args:
      apply: ``(params, x, key) -> logits`` float [B, C], such as ``model.apply``.
      preprocess: ``(examples, key) -> examples``: scaling, augmentation. None: taken as they are.

    Returns:
      ``loss_fn(params, examples, key) -> float32 [B]``. The key is split between ``preprocess``
      and ``apply``.

    Raises:
      TypeError: an argument is no function (at construction).
      ValueError: logits are not [B, C], or labels not integers [B] (when the loss is traced).
    """
    _check_functions(apply, preprocess)

    def loss_fn(params: Params, examples: PyTree, key: Key) -> jax.Array:
        augmentation_key, dropout_key = jax.random.split(key)
        x, y = _inputs(preprocess, examples, augmentation_key)
        return _cross_entropy(apply(params, x, dropout_key), y)

    return loss_fn


def accuracy_counts(
    apply: Apply, preprocess: Preprocess | None = None
) -> Callable[[Params, PyTree], tuple[jax.Array, jax.Array]]:
    """Correctness and cross-entropy of every example, for evaluation: nothing is random.

    Args:
      apply: as for ``classification_loss``; gets the key None.
      preprocess: as for ``classification_loss``; gets the key None.

    Returns:
      ``counts(params, examples) -> (correct, loss)``, both float32 [B]; ``correct`` is 1 where
      the largest logit (the first of equals) is the label's, else 0.

    Raises:
      TypeError, ValueError: as ``classification_loss``.
    """
    _check_functions(apply, preprocess)

    def counts(params: Params, examples: PyTree) -> tuple[jax.Array, jax.Array]:
        x, y = _inputs(preprocess, examples, None)
        logits = apply(params, x, None)
        loss = _cross_entropy(logits, y)
        return (jnp.argmax(logits, axis=-1) == y).astype(jnp.float32), loss

    return counts


def _inputs(
    preprocess: Preprocess | None, examples: PyTree, key: Key | None
) -> tuple[jax.Array, jax.Array]:
    if preprocess is not None:
        examples = preprocess(examples, key)
    return examples.x, examples.y


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy, float32 [B], of logits [B, C] (of whatever float dtype)."""
    if labels.ndim != 1 or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"examples.y has shape {labels.shape} and dtype {labels.dtype}; it must be integer "
            "class labels [B]."
        )
    if logits.ndim != 2 or logits.shape[0] != labels.shape[0]:
        raise ValueError(
            f"apply returned logits of shape {logits.shape} for {labels.shape[0]} examples; they "
            f"must be [B, C] = [{labels.shape[0]}, number of classes]."
        )
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _check_functions(apply: Any, preprocess: Any) -> None:
    if not callable(apply):
        raise TypeError(
            f"apply is {apply!r}; it must be a function (params, x, key) -> logits [B, C], such "
            "as model.apply."
        )
    if preprocess is not None and not callable(preprocess):
        raise TypeError(
            f"preprocess is {preprocess!r}; it must be None or a function (examples, key) -> "
            "examples."
        )
