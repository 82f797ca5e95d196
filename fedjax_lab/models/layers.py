"""Layers that several models share; channels-last, weights initialised as PyTorch does.

Axes: B examples, H x W pixels, C channels, F features. The papers' models are PyTorch models:
every weight and bias of a layer starts uniform in +-1/sqrt(fan_in), scales of a norm at 1 and its
biases at 0. Images are flattened in H, W, C order (PyTorch: C, H, W), which permutes the rows of
the next layer's kernel and changes nothing else.
"""

import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from fedjax_lab.models.convolution import convolution
from fedjax_lab.types import Key

Activation = Callable[[jax.Array], jax.Array]


def max_pool(x: jax.Array) -> jax.Array:
    """The maximum of every 2 x 2 pixels: [B, H, W, C] -> [B, H // 2, W // 2, C].

    Written with slices, which are several times faster on CPU than a window reduction, forward
    and backward. Equal pixels share the gradient equally (PyTorch gives it to the first one).
    """
    # In the layout of the convolutions on CPU: XLA then cancels the transposes between the two.
    x = x.transpose(1, 3, 2, 0)[: x.shape[1] // 2 * 2, :, : x.shape[2] // 2 * 2]
    rows = jnp.maximum(x[0::2], x[1::2])
    return jnp.maximum(rows[:, :, 0::2], rows[:, :, 1::2]).transpose(3, 0, 2, 1)


def flatten(x: jax.Array) -> jax.Array:
    """[B, ...] -> [B, F]."""
    return x.reshape(x.shape[0], -1)


class Conv(nn.Module):
    """A convolution with bias: float [B, H, W, C] -> [B, H', W', F].

    Parameters as ``flax.linen.Conv``: ``kernel`` [h, w, C, F], ``bias`` [F], float32.
    ``stride`` and ``lowering`` are those of ``convolution``.

    Raises:
      ValueError: ``x`` is no batch of images, or smaller than the kernel without padding.
    """

    num_features: int
    kernel_size: int = 5
    padding: str = "VALID"
    stride: int | tuple[int, int] = 1
    lowering: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolve ``x``."""
        size = self.kernel_size
        kernel, bias = _parameters(self, (size, size, x.shape[-1], self.num_features))
        x, kernel, bias = promote_dtype(x, kernel, bias)
        features = convolution(x, kernel, self.padding, stride=self.stride, lowering=self.lowering)
        return features + bias.reshape(1, 1, 1, -1)


class Dense(nn.Module):
    """An affine map: float [B, C] -> [B, F].

    Parameters as ``flax.linen.Dense``: ``kernel`` [C, F], ``bias`` [F], float32.
    """

    num_features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map ``x``."""
        kernel, bias = _parameters(self, (x.shape[-1], self.num_features))
        x, kernel, bias = promote_dtype(x, kernel, bias)
        return x @ kernel + bias.reshape(1, -1)


class Norm(nn.Module):
    """The norm policy: GroupNorm ("group") or nothing (None), over the last axis' channels.

    No BatchNorm: its running statistics are not parameters, and mini-batches of one client are
    what federated learning cannot assume to be alike. GroupNorm has two groups and epsilon 1e-5,
    as in the code of FedSWA and FL-Simulator.

    Raises:
      ValueError: the groups do not divide the channels.
    """

    kind: str | None
    num_groups: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise each example of ``x`` [B, ..., C] alone; the shape stays."""
        if self.kind is None:
            return x
        if x.shape[-1] % self.num_groups:
            raise ValueError(
                f"x has shape {x.shape} where a norm needs a last axis that {self.num_groups} "
                "groups divide; choose another width or norm=None."
            )
        return nn.GroupNorm(num_groups=self.num_groups, epsilon=1e-5, name="group")(x)


class ConvBlock(nn.Module):
    """Convolution, norm, activation, max-pool: float [B, H, W, C] -> [B, H'', W'', F].

    ``activation`` must not decrease. ``lowering`` is that of ``convolution``.
    """

    num_features: int
    norm: str | None = None
    padding: str = "VALID"
    kernel_size: int = 5
    activation: Activation = nn.relu
    lowering: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the block."""
        conv = Conv(
            self.num_features, self.kernel_size, self.padding, lowering=self.lowering, name="conv"
        )
        # The maximum of what does not decrease: pooling first leaves a quarter of the work.
        return self.activation(max_pool(Norm(self.norm, name="norm")(conv(x))))


class DenseBlock(nn.Module):
    """Flatten, affine map, norm, activation, dropout: float [B, ...] -> [B, F].

    Dropout is on if, and only if, there is an rng named "dropout".
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
    """Blocks one after the other, then a last dense layer: float [B, ...] -> logits [B, C].

    Parameters: one entry ``blocks_i`` per block and ``classifier``.

    Attributes:
      num_classes: C.
      blocks: modules that map [B, ...] to [B, ...]; may be empty.
      activation: of the logits; None for logits as they are.

    Raises:
      TypeError: ``x`` holds integers (except at initialisation, where values do not matter).
      ValueError: ``x`` has no axis besides B.
    """

    num_classes: int
    blocks: Sequence[nn.Module] = ()
    activation: Activation | None = None

    def setup(self) -> None:
        """Name the last layer, which is not one of the blocks."""
        self.classifier = Dense(self.num_classes)

    def features(self, x: jax.Array) -> jax.Array:
        """The representation [B, F]: what the last block returns, flattened."""
        if x.ndim < 2:
            raise ValueError(f"x has shape {x.shape}; it must be a batch [B, ...].")
        if self.is_initializing():
            x = jnp.zeros(x.shape, jnp.float32)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"x has dtype {x.dtype}; the model takes floats. Scale stored images first, for "
                "instance by the preprocess argument of classification_loss."
            )
        for block in self.blocks:
            x = block(x)
        return flatten(x)

    def head(self, representation: jax.Array) -> jax.Array:
        """Logits [B, C] of a representation [B, F]."""
        logits = self.classifier(representation)
        return logits if self.activation is None else self.activation(logits)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [B, C]."""
        return self.head(self.features(x))


def check_norm(norm: str | None) -> str | None:
    """Return ``norm`` if it is a policy that ``Norm`` knows.

    Raises:
      ValueError: it is neither "group" nor None.
    """
    if norm not in ("group", None):
        raise ValueError(
            f"norm is {norm!r}; it must be 'group' or None. (BatchNorm's running statistics are "
            "not parameters.)"
        )
    return norm


def _parameters(module: nn.Module, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """A kernel of ``shape`` and its bias, both uniform in +-1/sqrt(fan_in)."""
    bound = 1.0 / math.sqrt(math.prod(shape[:-1]))

    def uniform(key: Key, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return module.param("kernel", uniform, shape), module.param("bias", uniform, shape[-1:])
