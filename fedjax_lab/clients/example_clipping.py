"""DP-SGD: mini-batch gradients with per-example clipping and noise.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: Deep Learning with Differential Privacy.
CCS 2016, Algorithm 1.

Axes: B examples of a mini-batch.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.clients.metrics import apply_loss
from fedjax_lab.types import Key, LossFn, Metrics, Params, PyTree, Scalar

_NOISE = np.uint32(2**32 - 1)  # folded into a step's key; examples fold in 0, 1, 2, ...


def clipped_gradient(
    loss_fn: LossFn,
    params: Params,
    examples: PyTree,
    mask: jax.Array | None,
    key: Key,
    clip: Scalar,
    noise: Scalar | None,
) -> tuple[PyTree, jax.Array, jax.Array, Metrics, Metrics]:
    """Compute the mean of per-example gradients, each clipped to norm ``clip``, with noise.

    The loss gets each example alone, with a key of its own. All B gradients are in memory at once.
    A gradient whose norm is not finite is replaced by zeros.

    Args:
      loss_fn: (params, examples [1, ...], key) -> losses [1], or (losses, metrics).
      examples: pytree [B, ...].
      mask: bool [B], which examples are real; None: all.
      noise: standard deviation of the noise on the sum of the gradients, as a multiple of ``clip``;
        None: no noise.

    Returns:
      (gradient, mean loss, number of valid examples, scalar metrics, per-example metrics), the
      metrics averaged over the valid examples.
    """
    size = jax.tree.leaves(examples)[0].shape[0]
    mask = jnp.ones(size, bool) if mask is None else mask
    is_scalar: dict[str, bool] = {}

    def one(params, example, key, counts):
        alone = jax.tree.map(lambda leaf: leaf[None], example)
        losses, metrics = apply_loss(loss_fn, params, alone, key, counts[None])
        is_scalar.update({name: value.ndim == 0 for name, value in metrics.items()})
        return losses[0], {name: value.reshape(()) for name, value in metrics.items()}

    def clipped(example, key, counts):
        (loss, metrics), grads = jax.value_and_grad(one, has_aux=True)(params, example, key, counts)
        grads = tree.widen(grads)  # rounding to fewer digits could make the norm larger than clip
        norm = tree.norm(grads)
        grads = tree.scale(grads, jnp.where(norm > clip, clip / norm, 1))
        # A gradient that is not finite would be visible in any sum.
        grads = tree.zero_unless(jnp.isfinite(norm), grads)
        return tree.zero_unless(counts, (grads, loss, metrics))

    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(size))
    each = jax.vmap(clipped)(examples, keys, mask)
    grads, loss, metrics = jax.tree.map(lambda leaf: leaf.sum(0), each)
    if noise is not None:
        drawn = tree.normal_like(jax.random.fold_in(key, _NOISE), grads)
        grads = tree.add_scaled(grads, noise * clip, drawn)
    count = mask.sum(dtype=loss.dtype)
    share = 1 / jnp.maximum(count, 1)
    means = {name: value * share for name, value in metrics.items()}
    per_step = {name: value for name, value in means.items() if is_scalar[name]}
    per_example = {name: value for name, value in means.items() if not is_scalar[name]}
    mean = jax.tree.map(lambda g, w: g.astype(w.dtype), tree.scale(grads, share), params)
    return mean, loss * share, count, per_step, per_example
