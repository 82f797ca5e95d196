"""Losses of token rows in which only some tokens are scored, such as answers.

Axes: B rows, T places of a row, V tokens of the vocabulary. ``examples`` has ``x``, the model's
input (such as ``Tokens``), and ``y`` int [B, T], the next token of each place, or -1 for a place
that is not scored, as ``data.pack`` returns them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_number
from fedjax_lab.models.base import Apply, with_mask
from fedjax_lab.models.losses import check_functions, check_tokens, losses_of
from fedjax_lab.types import Key, LossFn, Params, PyTree


def answer_loss(apply: Apply, tokens_per_row: float | None = None) -> LossFn:
    """Build the training loss: cross-entropy of the scored tokens of each row, with dropout.

    Args:
      apply: ``(params, x, key) -> logits`` float [B, T, V], such as the ``apply`` of
        ``models.decoder``.
      tokens_per_row: None: the loss is the mean over a row's scored tokens, so each row has the
        same weight. A number: the loss is their sum divided by it, so each token has the same
        weight. With ``data.scored_per_row``, the mean over rows is the mean over tokens.

    Returns:
      ``loss_fn(params, examples, key, mask=None) -> float32 [B]``; 0 for a row without scored
      tokens. With the key None there is no dropout.

    Raises:
      TypeError: ``apply`` is not a function (at construction).
      ValueError: ``tokens_per_row`` is out of range; logits are not [B, T, V], or targets not
        integers [B, T] (when traced).
    """
    _check(apply, tokens_per_row)

    def loss_fn(
        params: Params, examples: PyTree, key: Key | None, mask: jax.Array | None = None
    ) -> jax.Array:
        logits = with_mask(apply, mask)(params, examples.x, key)
        losses, scored = _losses(logits, examples.y)
        return _per_row(losses, scored, tokens_per_row)

    return loss_fn


def answer_counts(
    apply: Apply, tokens_per_row: float | None = None
) -> Callable[[Params, PyTree], tuple[jax.Array, jax.Array]]:
    """Build the evaluation: accuracy and cross-entropy of the scored tokens of each row.

    There is no dropout.

    With ``tokens_per_row`` from ``data.scored_per_row``, the mean loss of a set is the mean over
    its tokens, and ``build_evaluation`` adds its exponential as "perplexity". A part of the set,
    such as one client's rows, has another number of tokens in a row: there the mean is not one over
    tokens. Divide the sums of ``tokens_per_row=1`` by the number of its tokens.

    Args:
      apply: as in ``answer_loss``; called with the key None.
      tokens_per_row: as in ``answer_loss``.

    Returns:
      ``counts(params, examples) -> (correct, loss)``, both float32 [B].

    Raises:
      TypeError, ValueError: as ``answer_loss``.
    """
    _check(apply, tokens_per_row)

    def counts(params: Params, examples: PyTree) -> tuple[jax.Array, jax.Array]:
        logits = apply(params, examples.x, None)
        losses, scored = _losses(logits, examples.y)
        right = (jnp.argmax(logits, axis=-1) == examples.y).astype(jnp.float32)
        return _per_row(right, scored, tokens_per_row), _per_row(losses, scored, tokens_per_row)

    counts.perplexity = tokens_per_row is not None  # type: ignore[attr-defined]
    return counts


def _losses(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the cross-entropy [B, T], in float32 or wider, and the scored places, bool [B, T]."""
    check_tokens(logits, targets)
    scored = targets >= 0
    losses = losses_of(logits, jnp.where(scored, targets, 0))
    return jnp.where(scored, losses, 0), scored


def _per_row(values: jax.Array, scored: jax.Array, tokens_per_row: float | None) -> jax.Array:
    sums = jnp.where(scored, values, 0).sum(axis=1)
    if tokens_per_row is not None:
        return sums / tokens_per_row
    return sums / jnp.maximum(scored.sum(axis=1), 1)


def _check(apply: Any, tokens_per_row: float | None) -> None:
    check_functions(apply, None)
    if tokens_per_row is not None:
        check_number("tokens_per_row", tokens_per_row, minimum=0, exclusive_minimum=True)
