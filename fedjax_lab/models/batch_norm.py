"""BatchNorm whose running statistics are leaves of the params, like weights.

Source: Ioffe, Szegedy: Batch Normalization: Accelerating Deep Network Training by Reducing
Internal Covariate Shift. ICML 2015; details as in PyTorch. GradMA's networks use it, and the code
of FedSWA offers it for its ResNet.

Policy. Clients and server change ``params`` only, by gradient descent. So ``running_mean`` and
``running_var`` are leaves of ``params``, and the gradient of any loss with respect to such a leaf
r is *defined* as r - s, where s is the statistic of the mini-batch. A step of SGD with rate η
moves r to (1 - η) r + η s, which is PyTorch's update with a momentum of η (PyTorch's default is
0.1), and the server averages r with the weights. This holds for every algorithm, unchanged. With
a key, the model trains and normalises with the mini-batch's statistics; no output depends on r.
Without a key, it evaluates and normalises each example with r.

Where this equals PyTorch with the full state averaged, and where it differs:

- FedAvg with local SGD: equal, for momentum = η.
- Control variates, proximal and momentum terms, extrapolating and adaptive servers act on r as
  they do on weights. Code that averages full state dictionaries does the same to some extent.
  Code such as GradMA's, which excludes the statistics from its momentum, memory and quadratic
  program, does not. A variance that such a step makes negative counts as 0.
- r - s contributes to norms and inner products of gradients: clipping, the radius of
  sharpness-aware methods, GradMA's constraints. ``hold_statistics`` makes these gradients 0, and
  ``recompute_statistics`` computes the statistics afterwards ("static" BatchNorm: Diao, Ding,
  Tarokh: HeteroFL, ICLR 2021). ``optax.masked(transform, running_statistics)`` and its inverse
  treat statistics and weights separately in a ``gradient_transform``: scaled by c, r moves with
  momentum c η.
- A loss that runs the model several times with the same params adds the r - s of all runs.
- Under label skew, the mean of the clients' variances lacks the variance between clients, so the
  averaged statistics may fit no client's data. Runs of the command line also report the accuracy
  with statistics recomputed on training examples (``accuracy_recomputed``).
- Weight decay shrinks r, unless masked out as above: with weight w towards s / (1 + w).
- **Padding does not count.** Mean, variance and the factor n / (n - 1) are those of the real
  examples of a mini-batch. A loss must pass the mask on, as those of this package do: a loss of
  your own names an argument ``mask`` and calls ``model.apply(params, x, key, mask=mask)``. Else
  masked places, which hold copies of the first real example, count as well, and a warning says so.
- **One real number of a channel**, such as one real example in a mini-batch of vectors, has no
  variance. PyTorch refuses it. Here the running statistics normalise it, and it does not change
  them: whether a last mini-batch has one example depends on the sizes of the clients.
- Statistics that stay with their client (FedBN: Li et al., ICLR 2021) need a model for each
  client: ``algorithms.fedbn``.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_lab.models.base import Apply, with_mask
from fedjax_lab.tree import path_text, wide_dtype
from fedjax_lab.types import Key, Params, PyTree

_STATISTICS = ("running_mean", "running_var")


class BatchNorm(nn.Module):
    """Normalisation of each channel over the mini-batch: float [B, ..., C] -> the same shape.

    Parameters, float32 [C]: ``scale`` (starts at 1), ``bias`` (0), ``running_mean`` (0) and
    ``running_var`` (1). Epsilon is 1e-5. The mini-batch's variance is the biased one for
    normalising and the unbiased one in the running statistics. The module trains if and only if
    there is an rng named "dropout".

    With ``example_mask``, bool [B], only the examples where it is True are in the statistics;
    ``from_linen`` passes it on from ``Model.apply``. Where these have less than two numbers per
    channel, the running statistics normalise and stay as they are. A mask of another length than
    ``x`` is not used.

    Attributes:
      frozen: normalise with the running statistics also in training, and never change them. For
        params whose statistics are known. Examples are then independent of each other.

    Raises:
      ValueError: in training, a channel of the whole mini-batch is a single number.
    """

    frozen: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, example_mask: jax.Array | None = None) -> jax.Array:
        """Normalise ``x``."""
        shape = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones_init(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), shape, jnp.float32)
        running_mean = self.param("running_mean", nn.initializers.zeros_init(), shape, jnp.float32)
        running_var = self.param("running_var", nn.initializers.ones_init(), shape, jnp.float32)
        training = not self.frozen and self.has_rng("dropout")
        leaves = (scale, bias, running_mean, running_var)
        return normalise_batch(x, *leaves, training=training, mask=example_mask)


def normalise_batch(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    running_mean: jax.Array,
    running_var: jax.Array,
    *,
    training: bool,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Normalise a mini-batch as ``BatchNorm`` does, in a module of any library.

    The module has the four arrays [C] among its parameters, under these names. A module of NNX::

        class BatchNorm(nnx.Module):
            use_running_average = False  # train() and eval() of NNX set it

            def __init__(self, size):
                zeros, ones = jnp.zeros(size), jnp.ones(size)
                self.scale, self.bias = nnx.Param(ones), nnx.Param(zeros)
                self.running_mean, self.running_var = nnx.Param(zeros), nnx.Param(ones)

            def __call__(self, x, mask=None):
                names = ("scale", "bias", "running_mean", "running_var")
                leaves = (getattr(self, name)[...] for name in names)
                return normalise_batch(x, *leaves, training=not self.use_running_average, mask=mask)

    Args:
      x: float [B, ..., C].
      scale, bias: factor and summand of each channel, float [C].
      running_mean, running_var: running statistics, float [C].
      training: normalise with the mini-batch's statistics, and let the running ones follow them.
        False: with the running statistics, which do not change.
      mask: bool [B], which examples are in the statistics; None: all.

    Returns:
      Like ``x``, at least of the dtype of ``scale``.

    Raises:
      ValueError: in training, a channel of the whole mini-batch is a single number.
    """
    dtype = jnp.promote_types(x.dtype, scale.dtype)
    x = x.astype(wide_dtype(dtype))  # float32 statistics of bfloat16
    if not training:
        mean, var = map(jax.lax.stop_gradient, (running_mean, running_var))
        return _normalise(x, mean, jnp.maximum(var, 0), scale, bias).astype(dtype)
    count = x.size // x.shape[-1]
    if count < 2:
        raise ValueError(
            f"x has shape {x.shape}: BatchNorm has no variance of one number per channel; "
            "train with mini-batches of at least 2 examples, or with norm='group'."
        )
    axes = tuple(range(x.ndim - 1))
    if mask is None or len(mask) != len(x):
        mean, var = x.mean(axes), x.var(axes)
        new_mean, new_var = mean, var * (count / (count - 1))
    else:
        real = mask.reshape(-1, *(1,) * (x.ndim - 1))
        number = mask.sum(dtype=x.dtype) * (count // len(x))

        def average(values):  # not values * mask: padding may be infinite
            return jnp.where(real, values, 0).sum(axes) / jnp.maximum(number, 1)

        mean = average(x)
        var = average(jnp.square(x - mean.reshape((1,) * len(axes) + mean.shape)))
        several = number > 1
        new_mean = jnp.where(several, mean, running_mean)
        new_var = jnp.where(several, var * (number / jnp.maximum(number - 1, 1)), running_var)
        held_mean, held_var = map(jax.lax.stop_gradient, (running_mean, running_var))
        mean = jnp.where(several, mean, held_mean)
        var = jnp.where(several, var, jnp.maximum(held_var, 0))
    normalised = _normalise(x, mean, var, scale, bias)
    normalised = _with_pull(normalised, running_mean, new_mean)
    normalised = _with_pull(normalised, running_var, new_var)
    return normalised.astype(dtype)


def _normalise(x, mean, var, scale, bias):
    factor = jax.lax.rsqrt(var + 1e-5) * scale
    mean, factor, bias = (v.reshape((1,) * (x.ndim - 1) + v.shape) for v in (mean, factor, bias))
    return (x - mean) * factor + bias


def running_statistics(params: Params) -> PyTree:
    """Return a tree of bools, True for the leaves of ``params`` that are running statistics.

    Args:
      params: a model's parameters.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_text(path).rpartition("/")[2] in _STATISTICS, params
    )


def hold_statistics(apply: Apply) -> Apply:
    """Wrap ``apply`` so that gradients with respect to the running statistics are 0.

    Call ``recompute_statistics`` before a model trained in this way is evaluated.

    Args:
      apply: ``(params, x, key=None) -> [B, ...]``, such as ``model.apply``.
    """

    def held(
        params: Params,
        x: jax.Array,
        key: Key | None = None,
        /,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        hold = lambda is_statistic, leaf: jax.lax.stop_gradient(leaf) if is_statistic else leaf  # noqa: E731
        params = jax.tree.map(hold, running_statistics(params), params)
        return with_mask(apply, mask)(params, x, key)

    return held


def recompute_statistics(apply: Apply, params: Params, x: jax.Array, key: Key) -> Params:
    """Replace the running statistics in ``params`` by those of one mini-batch ``x`` [B, ...].

    Args:
      apply: of a model with ``norm="batch"`` (not through ``hold_statistics``).
      params: its params.
      x: inputs for the statistics, at least two examples; more give better statistics.
      key: consumed by dropout, if the model has any.

    Raises:
      TypeError: ``key`` is None, with which a model evaluates, and has no statistics.
      ValueError: ``params`` have no running statistics.
    """
    if key is None:
        raise TypeError(
            "key is None; the statistics are those of training, which needs a PRNG key."
        )
    is_statistic = running_statistics(params)
    if not any(jax.tree.leaves(is_statistic)):
        raise ValueError('params have no running statistics; the model needs norm="batch".')
    # By definition, the gradient with respect to a statistic is r - s.
    pull = jax.grad(lambda params: apply(params, x, key).sum())(params)
    return jax.tree.map(lambda yes, r, g: r - g if yes else r, is_statistic, params, pull)


@jax.custom_vjp
def _with_pull(x: jax.Array, running: jax.Array, target: jax.Array) -> jax.Array:
    """Return ``x``; in the backward pass, the gradient of ``running`` is running - target."""
    return x


def _with_pull_forward(x, running, target):
    return x, (running, target)


def _with_pull_backward(residuals, gradient):
    running, target = residuals
    return gradient, (running - target).astype(running.dtype), jnp.zeros_like(target)


_with_pull.defvjp(_with_pull_forward, _with_pull_backward)
