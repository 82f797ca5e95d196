"""Common layers of the models: channels-last, with PyTorch's initialization.

Axes: B examples, H x W pixels, C channels, F features. The papers' models are PyTorch models. So
unless a model says otherwise, the weights and biases of a layer start uniform in +-1/sqrt(fan_in),
and the scales of a norm at 1 and its biases at 0. Images are flattened in H, W, C order (PyTorch:
C, H, W), which only permutes the rows of the next layer's kernel.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from fedjax_lab.checks import check_channels_last, check_int
from fedjax_lab.models.batch_norm import BatchNorm
from fedjax_lab.models.convolution import convolution
from fedjax_lab.models.pooling import max_pool
from fedjax_lab.types import Key

Activation = Callable[[jax.Array], jax.Array]
# (key, shape, dtype) -> a kernel, as in jax.nn.initializers
Initializer = Callable[..., jax.Array]

NORMS = ("group", "batch", "frozen_batch")


def uniform(bound: float) -> Initializer:
    """Return the initializer that draws numbers uniformly in +-``bound``."""

    def draw(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw


def flatten(x: jax.Array) -> jax.Array:
    """Flatten all axes but the first: [B, ...] -> [B, F].

    Args:
      x: [B, ...].
    """
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))  # -1 is unknown of no example


class Conv(nn.Module):
    """A convolution: float [B, H, W, C] -> [B, H', W', F].

    Parameters as ``flax.linen.Conv``: ``kernel`` [h, w, C, F] and, with ``use_bias``, ``bias``
    [F], float32. ``stride`` and ``lowering`` are those of ``convolution``. ``padding`` is its
    "VALID" or "SAME", or a number of zeros on every side, as in PyTorch. (With a stride, "SAME" may
    put zeros at the end only.) ``kernel_init`` replaces the uniform distribution of kernels.

    Raises:
      TypeError: a size is not an integer; a kernel has as many rows as columns.
      ValueError: a size is below 1, or ``x`` is not a batch of images, or is smaller than the
        kernel without padding.
    """

    num_features: int
    kernel_size: int = 5
    padding: str | int = "VALID"
    stride: int | tuple[int, int] = 1
    lowering: str = "auto"
    use_bias: bool = True
    kernel_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolve ``x``."""
        x = _floats(self, x)
        size = check_int("kernel_size", self.kernel_size, minimum=1)
        num_features = check_int("num_features", self.num_features, minimum=1)
        shape = (size, size, x.shape[-1], num_features)
        kernel, bias = _parameters(self, shape, self.use_bias, self.kernel_init)
        x, kernel, bias = promote_dtype(x, kernel, bias)
        features = convolution(x, kernel, self.padding, stride=self.stride, lowering=self.lowering)
        return features if bias is None else features + bias.reshape(1, 1, 1, -1)


class Dense(nn.Module):
    """An affine map: float [B, C] -> [B, F].

    Parameters as ``flax.linen.Dense``: ``kernel`` [C, F], ``bias`` [F], float32.
    """

    num_features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map ``x``."""
        x = _floats(self, x)
        kernel, bias = _parameters(self, (x.shape[-1], self.num_features))
        x, kernel, bias = promote_dtype(x, kernel, bias)
        return x @ kernel + bias.reshape(1, -1)


class Norm(nn.Module):
    """A norm over the channels, the last axis, by the name of its policy.

    - "group": GroupNorm with two groups and epsilon 1e-5, as in the code of FedSWA and
      FL-Simulator. It normalises each example separately.
    - "batch": BatchNorm over the mini-batch. Its running statistics are params that follow the
      mini-batches and are averaged like weights; see ``batch_norm`` for the consequences.
    - "frozen_batch": the same params, but the running statistics normalise in training, too.
    - None: no norm.

    Federated learning cannot assume that the mini-batches of different clients are alike. So
    "group" is the default of models with a norm.

    Raises:
      ValueError: the groups do not divide the channels.
    """

    kind: str | None
    num_groups: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise ``x`` [B, ..., C]; the shape stays the same."""
        if self.kind is None:
            return x
        if self.kind != "group":
            return BatchNorm(frozen=self.kind == "frozen_batch", name="batch")(x)
        if x.shape[-1] % self.num_groups:
            raise ValueError(
                f"x has shape {x.shape} where a norm needs a last axis that {self.num_groups} "
                "groups divide; choose another width or norm=None."
            )
        return GroupNorm(self.num_groups, name="group")(x)


class GroupNorm(nn.GroupNorm):
    """``flax.linen.GroupNorm`` with PyTorch's epsilon of 1e-5 and an exact variance.

    Statistics are computed in float32; the result has the dtype of ``x``, of integers float32.
    """

    epsilon: float = 1e-5
    use_fast_variance: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise ``x`` [B, ..., C]; C is a multiple of ``num_groups``."""
        normalised = super().__call__(x, mask=mask)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return normalised.astype(x.dtype) if is_float else normalised


class ConvBlock(nn.Module):
    """Convolution, norm, activation, max-pool: float [B, H, W, C] -> [B, H'', W'', F].

    ``activation`` must be non-decreasing. ``lowering`` is that of ``convolution``, ``padding`` that
    of ``Conv``. ``pool`` False omits the max-pool.
    """

    num_features: int
    norm: str | None = None
    padding: str | int = "VALID"
    kernel_size: int = 5
    activation: Activation = nn.relu
    lowering: str = "auto"
    pool: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the block."""
        conv = Conv(
            self.num_features, self.kernel_size, self.padding, lowering=self.lowering, name="conv"
        )
        x = Norm(self.norm, name="norm")(conv(x))
        # A non-decreasing function and a maximum commute: pooling first saves 3/4 of the work.
        return self.activation(max_pool(x) if self.pool else x)


class DenseBlock(nn.Module):
    """Flatten, affine map, norm, activation, dropout: float [B, ...] -> [B, F].

    Dropout is on if and only if there is an rng named "dropout".
    """

    num_features: int
    norm: str | None = None
    dropout: float = 0.0
    activation: Activation = nn.relu

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the block."""
        x = Dense(self.num_features, name="dense")(flatten(x))
        x = self.activation(Norm(self.norm, name="norm")(x))
        return nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(x)


class Classifier(nn.Module):
    """A sequence of blocks, then a dense layer: float [B, ...] -> logits [B, C].

    Parameters: one entry ``blocks_i`` per block and ``classifier``.

    Attributes:
      num_classes: C.
      blocks: modules that map [B, ...] to [B, ...]; may be empty.
      activation: activation of the logits; None: none.

    Raises:
      TypeError: ``num_classes`` is not an integer (at construction); or ``x`` holds integers and
        the first layer is one of this package (except at initialisation, where values do not
        matter).
      ValueError: ``num_classes`` is below 1 (at construction); ``x`` has no axis besides B; or it
        is images with channels first, and the first block is not dense.
    """

    num_classes: int
    blocks: Sequence[nn.Module] = ()
    activation: Activation | None = None

    def __post_init__(self) -> None:
        """Check the number of classes."""
        check_int("num_classes", self.num_classes, minimum=1)
        super().__post_init__()

    def setup(self) -> None:
        """Create the last layer, which is not one of the blocks."""
        self.classifier = Dense(self.num_classes)

    def features(self, x: jax.Array) -> jax.Array:
        """Compute the representation [B, F]: the output of the last block, flattened.

        Args:
          x: float [B, ...].

        Raises:
          TypeError: ``x`` holds integers.
        """
        if x.ndim < 2:
            raise ValueError(f"x has shape {x.shape}; it must be a batch [B, ...].")
        if self.blocks and not isinstance(self.blocks[0], DenseBlock):
            check_channels_last("x", x.shape)
        if self.is_initializing():
            x = jnp.zeros(x.shape, jnp.float32)
        for block in self.blocks:
            x = block(x)
        return flatten(x)

    def head(self, representation: jax.Array) -> jax.Array:
        """Compute logits [B, C] from a representation [B, F], or from the last block's output.

        Args:
          representation: float [B, F].
        """
        logits = self.classifier(flatten(representation))
        return logits if self.activation is None else self.activation(logits)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute logits [B, C]."""
        return self.head(self.features(x))


def check_widths(argument: str, widths: Sequence[int]) -> list[int]:
    """Check that ``widths`` are those of layers, and return them.

    Raises:
      TypeError: it is not a sequence, or a width is not an integer.
      ValueError: a width is below 1.
    """
    if not isinstance(widths, (Sequence, np.ndarray)) or isinstance(widths, str):
        raise TypeError(f"{argument} is {widths!r}; it must be a sequence of integers.")
    return [check_int(argument, width, minimum=1) for width in widths]


def check_norm(norm: str | None) -> str | None:
    """Check that ``norm`` is a policy of ``Norm``, and return it.

    Args:
      norm: name of a policy, or None.

    Raises:
      ValueError: it is neither None nor one of ``NORMS``.
    """
    if norm is not None and norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; it must be one of {', '.join(NORMS)}, or None.")
    return norm


def check_float(x: jax.Array) -> None:
    """Check that the input of a model's first layer is floating point.

    Args:
      x: [B, ...].

    Raises:
      TypeError: ``x`` holds integers.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"x has dtype {x.dtype}; the model takes floats. Scale stored images first, for "
            "instance by the preprocess argument of classification_loss."
        )


def _floats(module: nn.Module, x: jax.Array) -> jax.Array:
    """Return ``x`` as floats; accept integers at initialisation, where values do not matter."""
    if module.is_initializing() and not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float32)
    check_float(x)
    return x


def _parameters(
    module: nn.Module,
    shape: tuple[int, ...],
    use_bias: bool = True,
    kernel_init: Initializer | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Create a kernel and its bias, by default both uniform in +-1/sqrt(fan_in)."""
    start = uniform(1.0 / math.sqrt(math.prod(shape[:-1])))
    kernel = module.param("kernel", kernel_init or start, shape, jnp.float32)
    bias = module.param("bias", start, shape[-1:], jnp.float32) if use_bias else None
    return kernel, bias
