"""Per-example losses for training and evaluation: classes, words, and regression.

Axes: B examples, C classes; L words of a sequence, V words of the vocabulary. ``examples`` has the
fields ``x`` [B, ...] and ``y``: int [B] for classes, int [B, L] for sequences, and numbers [B, ...]
for a regression. Nothing here averages over B, because the library handles padding and masks. A
training loss takes ``mask`` bool [B], which examples are real (None: all), and passes it on to a
model that has this argument.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_lab.machine.keys import compact, plain
from fedjax_lab.models.base import Apply, Model, with_mask
from fedjax_lab.models.label_checks import mark_labels
from fedjax_lab.signatures import other_arguments, parameter_of
from fedjax_lab.tree import widen
from fedjax_lab.types import Key, LossFn, Params, PyTree

# (examples, key) -> examples of the same length; key None: evaluation, so no augmentation
Preprocess = Callable[[PyTree, Key | None], PyTree]


def classification_loss(apply: Apply, preprocess: Preprocess | None = None) -> LossFn:
    """Build the training loss of a classifier: per-example cross-entropy.

    Augmentation and dropout are on.

    Args:
      apply: ``(params, x, key) -> logits`` float [B, C], such as ``model.apply``.
      preprocess: ``(examples, key) -> examples``: scaling, augmentation. None: no preprocessing.

    Returns:
      ``loss_fn(params, examples, key, mask=None) -> float32 [B]`` (float64 of float64 logits). The
      key is split between ``preprocess`` and ``apply``. The key None gives the loss of
      ``accuracy_counts``, without augmentation and dropout.

    Raises:
      TypeError: an argument is not a function (at construction).
      ValueError: logits are not [B, C], or labels not integers [B] (when the loss is traced).
    """
    check_functions(apply, preprocess)

    def loss_fn(
        params: Params, examples: PyTree, key: Key | None, mask: jax.Array | None = None
    ) -> jax.Array:
        x, y, dropout_key = training_inputs(preprocess, examples, key)
        return cross_entropy(with_mask(apply, mask)(params, x, dropout_key), y)

    return loss_fn


def accuracy_counts(
    apply: Apply, preprocess: Preprocess | None = None
) -> Callable[[Params, PyTree], tuple[jax.Array, jax.Array]]:
    """Build the evaluation of a classifier: per-example correctness and cross-entropy.

    There is no augmentation and no dropout.

    Args:
      apply: as in ``classification_loss``; called with the key None.
      preprocess: as in ``classification_loss``; called with the key None.

    Returns:
      ``counts(params, examples) -> (correct, loss)``, both float32 [B]. ``correct`` is 1 if the
      label has the largest logit (the first of equals), else 0.

    Raises:
      TypeError, ValueError: as ``classification_loss``.
    """
    check_functions(apply, preprocess)

    def counts(params: Params, examples: PyTree) -> tuple[jax.Array, jax.Array]:
        x, y = _inputs(preprocess, examples, None)
        logits = apply(params, x, None)
        loss = cross_entropy(logits, y)
        return (jnp.argmax(logits, axis=-1) == y).astype(jnp.float32), loss

    return counts


def language_model_loss(apply: Apply) -> LossFn:
    """Build the training loss of a language model: mean cross-entropy of each sequence.

    The loss is that of predicting the next word. Dropout is on.

    Args:
      apply: ``(params, x, key) -> logits`` float [B, L, V], such as the ``apply`` of
        ``models.lstm``.

    Returns:
      ``loss_fn(params, examples, key, mask=None) -> float32 [B]``. The key is passed to ``apply``;
      with None there is no dropout.

    Raises:
      TypeError: ``apply`` is not a function (at construction).
      ValueError: logits are not [B, L, V], or targets not integers [B, L] (when traced).
    """
    check_functions(apply, None)

    def loss_fn(
        params: Params, examples: PyTree, key: Key | None, mask: jax.Array | None = None
    ) -> jax.Array:
        logits = with_mask(apply, mask)(params, examples.x, key)
        check_tokens(logits, examples.y)
        return losses_of(logits, examples.y).mean(axis=1)

    return loss_fn


def token_counts(apply: Apply) -> Callable[[Params, PyTree], tuple[jax.Array, jax.Array]]:
    """Build the evaluation of a language model: accuracy and cross-entropy of each sequence.

    There is no dropout.

    All sequences have the same length, so means over examples are means over tokens.
    ``build_evaluation`` adds "perplexity", the exponential of the mean loss.

    Args:
      apply: as in ``language_model_loss``; called with the key None.

    Returns:
      ``counts(params, examples) -> (correct, loss)``, both float32 [B]. ``correct`` is the share
      of targets that have the largest logit (the first of equals).

    Raises:
      TypeError, ValueError: as ``language_model_loss``.
    """
    check_functions(apply, None)

    def counts(params: Params, examples: PyTree) -> tuple[jax.Array, jax.Array]:
        logits = apply(params, examples.x, None)
        check_tokens(logits, examples.y)
        losses = losses_of(logits, examples.y)
        correct = (jnp.argmax(logits, axis=-1) == examples.y).astype(jnp.float32)
        return correct.mean(axis=1), losses.mean(axis=1)

    counts.perplexity = True  # type: ignore[attr-defined]
    return counts


def regression_loss(apply: Apply, preprocess: Preprocess | None = None) -> LossFn:
    """Build the training loss of a regression: squared error averaged over the outputs.

    Args:
      apply: ``(params, x, key) -> predictions`` float, of the targets' shape [B, ...]; for targets
        [B] also [B, 1].
      preprocess: ``(examples, key) -> examples``. None: no preprocessing.

    Returns:
      ``loss_fn(params, examples, key, mask=None) -> float32 [B]`` (float64 of float64 predictions).
      The key is split between ``preprocess`` and ``apply``. With the key None there is no
      augmentation and no dropout.

    Raises:
      TypeError: an argument is not a function (at construction).
      ValueError: predictions do not have the shape of the targets (when the loss is traced).
    """
    check_functions(apply, preprocess)

    def loss_fn(
        params: Params, examples: PyTree, key: Key | None, mask: jax.Array | None = None
    ) -> jax.Array:
        x, y, dropout_key = training_inputs(preprocess, examples, key)
        return _squared_error(with_mask(apply, mask)(params, x, dropout_key), y)

    return loss_fn


def squared_error_counts(
    apply: Apply, preprocess: Preprocess | None = None
) -> Callable[[Params, PyTree], tuple[jax.Array, jax.Array]]:
    """Build the evaluation of a regression: per-example squared error.

    There is no augmentation and no dropout.

    ``build_evaluation`` reports its mean as "mean_squared_error" (and as "test_loss").

    Args:
      apply: as in ``regression_loss``; called with the key None.
      preprocess: as in ``regression_loss``; called with the key None.

    Returns:
      ``counts(params, examples) -> (squared error, loss)``, float32 [B] and the same numbers.

    Raises:
      TypeError, ValueError: as ``regression_loss``.
    """
    check_functions(apply, preprocess)

    def counts(params: Params, examples: PyTree) -> tuple[jax.Array, jax.Array]:
        x, y = _inputs(preprocess, examples, None)
        error = _squared_error(apply(params, x, None), y)
        return error, error

    counts.score = "mean_squared_error"  # type: ignore[attr-defined]
    return counts


def _squared_error(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """Compute the squared error [B], averaged over the outputs, in float32 or a wider dtype."""
    if targets.ndim == 1 and predictions.shape == (*targets.shape, 1):
        predictions = predictions[:, 0]
    if predictions.shape != targets.shape or targets.ndim == 0:
        raise ValueError(
            f"apply returned predictions of shape {predictions.shape} for targets examples.y of "
            f"shape {targets.shape}; the shapes must be equal, [B, ...]."
        )
    difference = widen(predictions) - targets
    return jnp.square(difference).reshape(len(targets), -1).mean(axis=1)


def training_inputs(
    preprocess: Preprocess | None, examples: PyTree, key: Key | None
) -> tuple[jax.Array, jax.Array, Key | None]:
    """Return a model's inputs in training: x [B, ...] and y [B] after ``preprocess``, and its key.

    Args:
      preprocess: (examples, key) -> examples; None: examples are not changed.
      examples: with ``x`` [B, ...] and ``y`` [B].
      key: typed PRNG key; consumed. None: the inputs of evaluation.

    Raises:
      TypeError: examples, after ``preprocess``, lack a field.
    """
    if key is None:
        return *_inputs(preprocess, examples, None), None
    augmentation_key, dropout_key = plain(jax.random.split(compact(key)))
    return *_inputs(preprocess, examples, augmentation_key), dropout_key


def _inputs(
    preprocess: Preprocess | None, examples: PyTree, key: Key | None
) -> tuple[jax.Array, jax.Array]:
    if preprocess is not None:
        examples = preprocess(examples, key)
    if not (hasattr(examples, "x") and hasattr(examples, "y")):
        source = "preprocess returned" if preprocess is not None else "examples is"
        raise TypeError(f"{source} {type(examples).__name__}; it must have the fields x and y.")
    return examples.x, examples.y


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the cross-entropy [B] of logits [B, C], in float32 or a wider dtype.

    It is NaN for a label that has no logit.

    Args:
      logits: float [B, C].
      labels: integers [B].

    Raises:
      ValueError: logits are not [B, C], or labels not integers [B].
    """
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
    return losses_of(logits, labels)


def check_tokens(logits: jax.Array, targets: jax.Array) -> None:
    """Check the logits and the targets of rows of tokens.

    Args:
      logits: float [B, L, V].
      targets: integers [B, L].

    Raises:
      ValueError: logits are not [B, L, V], or targets not integers [B, L].
    """
    if targets.ndim != 2 or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"examples.y has shape {targets.shape} and dtype {targets.dtype}; it must be the next "
            "words of sequences, integers [B, L]."
        )
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        batch, length = targets.shape
        raise ValueError(
            f"apply returned logits of shape {logits.shape} for targets of shape {targets.shape}; "
            f"they must be [B, L, V] = [{batch}, {length}, number of words]."
        )


def losses_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the cross-entropy [...] of logits [..., C]; NaN for a label that has no logit.

    Args:
      logits: float [..., C].
      labels: integers [...].
    """
    labels = mark_labels(logits.shape[-1], labels)
    wide = widen(logits)
    return jax.nn.logsumexp(wide, axis=-1) - pick(wide, labels)


@jax.custom_jvp
def pick(values: jax.Array, indices: jax.Array) -> jax.Array:
    """Return the value at each index, [...]; NaN for an index that has none.

    The gradient of indexing would add to an array of zeros, place by place. This one compares all
    places with the index, in the same kernel as the gradient of a softmax.

    Args:
      values: float [..., C].
      indices: integers [...], from 0.
    """
    number, indices = values.shape[-1], _without_overflow(indices)
    # -1 would be the last one, and 2^32 the first.
    indices = jnp.where((indices < 0) | (indices > number), number, indices)
    picked = jnp.take_along_axis(
        values, indices[..., None], axis=-1, mode="fill", fill_value=jnp.nan
    )
    return picked[..., 0]


@pick.defjvp
def _pick_jvp(primals, tangents):
    (values, indices), (tangent, _) = primals, tangents
    indices = _without_overflow(indices)
    places = jax.lax.broadcasted_iota(indices.dtype, values.shape, values.ndim - 1)
    at_index = jnp.where(places == indices[..., None], tangent, 0)
    return pick(values, indices), at_index.sum(axis=-1)


def _without_overflow(indices: jax.Array) -> jax.Array:
    """Convert to a signed dtype in which an index that is too large does not become a valid one."""
    return indices.astype(jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32)


def check_functions(apply: Any, preprocess: Any) -> None:
    """Check the arguments of ``classification_loss``.

    Args:
      preprocess: a function or None.

    Raises:
      TypeError: one of them is not a function, or ``apply`` does not take (params, x, key).
    """
    if not callable(apply):
        raise TypeError(
            f"apply is {'a Model' if isinstance(apply, Model) else repr(apply)}; it must be a "
            "function (params, x, key) -> logits [B, C], such as model.apply."
        )
    module = getattr(apply, "__self__", None)
    if isinstance(module, nn.Module) and parameter_of(type(module).__call__, "key") is None:
        raise TypeError(
            f"apply is the apply of {type(module).__name__}, which would take the key for another "
            "argument of the module's call; use models.from_linen(module).apply."
        )
    if found := other_arguments(apply, 3):
        raise TypeError(
            f"apply takes ({found}); it is called with (params, x, key). A model that draws "
            "nothing takes a key and ignores it."
        )
    if preprocess is not None and not callable(preprocess):
        raise TypeError(
            f"preprocess is {preprocess!r}; it must be None or a function (examples, key) -> "
            "examples."
        )
