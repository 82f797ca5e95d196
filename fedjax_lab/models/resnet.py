"""Residual networks: ResNet-18 with the stem for CIFAR or for ImageNet, and ResNet-20 for CIFAR.

Source: He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition. CVPR 2016. The norm is
GroupNorm with two groups, as in the code of FedSWA and FL-Simulator. Departure: FedSWA's variant
with BatchNorm has GroupNorm in its stem; here ``norm="batch"`` is BatchNorm throughout.

Blocks are the stem and the stages; the last one ends with the mean over all pixels.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_choice, check_int
from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import (
    Classifier,
    Conv,
    Initializer,
    Norm,
    check_norm,
)
from fedjax_lab.models.pooling import max_pool

# torchvision's initialisation of convolutions; None is PyTorch's own, uniform in +-1/sqrt(fan_in).
_KAIMING = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_STEMS: dict[str, Initializer | None] = {"cifar": None, "imagenet": _KAIMING}


class ConvNorm(nn.Module):
    """A convolution and its norm, PyTorch's padding of k // 2: [B, H, W, C] -> [B, H', W', F].

    H' = ceil(H / stride). The convolution has a bias only if no norm follows.
    """

    num_features: int
    norm: str | None
    kernel_size: int = 3
    stride: int = 1
    kernel_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolve and normalise ``x``."""
        conv = Conv(
            self.num_features,
            self.kernel_size,
            self.kernel_size // 2,
            self.stride,
            use_bias=self.norm is None,
            kernel_init=self.kernel_init,
            name="conv",
        )
        return Norm(self.norm, name="norm")(conv(x))


class Stem(nn.Module):
    """The first convolution with norm and ReLU: [B, H, W, C] -> [B, H', W', F].

    3 x 3 pixels ("cifar", H' = H), or 7 x 7 with stride 2 and a 3 x 3 max-pool with stride 2
    ("imagenet", H' = H / 4).
    """

    num_features: int
    norm: str | None
    kind: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the stem."""
        size, stride = (3, 1) if self.kind == "cifar" else (7, 2)
        first = ConvNorm(
            self.num_features, self.norm, size, stride, _STEMS[self.kind], name="conv_norm"
        )
        x = nn.relu(first(x))
        return x if self.kind == "cifar" else max_pool(x, 3, padding=1)


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + two conv3x3 of x), the first with the stride: [B, H', W', F].

    ``shortcut`` matters only if stride or width changes: "projection" is a 1 x 1 convolution with
    norm, "identity" takes every ``stride``-th pixel and appends channels of zeros.
    """

    num_features: int
    norm: str | None
    stride: int = 1
    shortcut: str = "projection"
    kernel_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the block."""
        width, norm, init = self.num_features, self.norm, self.kernel_init
        residual = ConvNorm(width, norm, 3, self.stride, init, name="conv_norm_0")(x)
        residual = ConvNorm(width, norm, 3, 1, init, name="conv_norm_1")(nn.relu(residual))
        if self.stride != 1 or x.shape[-1] != width:
            if self.shortcut == "projection":
                x = ConvNorm(width, norm, 1, self.stride, init, name="projection")(x)
            else:
                x = x[:, :: self.stride, :: self.stride]
                x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
        return nn.relu(x + residual)


class Stage(nn.Module):
    """Residual blocks of one width, the first with the stride; ``last`` adds the mean over pixels.

    float [B, H, W, C] -> [B, H', W', F], or [B, F] for the last stage.
    """

    num_blocks: int
    num_features: int
    norm: str | None
    stride: int
    shortcut: str
    kernel_init: Initializer | None
    last: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the stage."""
        for i in range(self.num_blocks):
            stride = self.stride if i == 0 else 1
            block = ResidualBlock(
                self.num_features,
                self.norm,
                stride,
                self.shortcut,
                self.kernel_init,
                name=f"block_{i}",
            )
            x = block(x)
        return x.mean(axis=(1, 2)) if self.last else x


def resnet18(
    num_classes: int = 10, *, norm: str | None = "group", stem: str = "cifar", width: int = 64
) -> Model:
    """Build ResNet-18: four stages of two blocks, 64 to 512 channels.

    float [B, H, W, C] -> logits [B, num_classes].

    Parameters for three colours, with 10, 100 and 200 classes: 11,173,962, 11,220,132 and
    11,271,432 with the stem "cifar" (FedSWA), 11,181,642, 11,227,812 and 11,279,112 with
    "imagenet" (FL-Simulator and FedSpeed, torchvision's network with other norms). BatchNorm adds
    9,600 running statistics.

    Args:
      num_classes: the number of logits.
      norm: a policy of ``layers.Norm``; None gives the convolutions biases.
      stem: "cifar" (conv3x3; PyTorch's uniform initialisation), or "imagenet" (conv7x7 and
        max-pool, each with stride 2; torchvision's normal initialisation of convolutions with
        variance 2 / fan_out).
      width: channels of the first stage; the others have 2, 4 and 8 times as many.

    Raises:
      ValueError: an argument is out of range.
      TypeError: ``width`` is no integer.
    """
    check_norm(norm)
    init = _STEMS[check_choice("stem", stem, _STEMS)]
    width = check_int("width", width, minimum=1)
    stages = [
        Stage(2, factor * width, norm, min(factor, 2), "projection", init, last=factor == 8)
        for factor in (1, 2, 4, 8)
    ]
    return from_linen(Classifier(num_classes, (Stem(width, norm, stem), *stages)))


def resnet20(
    num_classes: int = 10,
    *,
    norm: str | None = "group",
    shortcut: str = "identity",
    width: int = 16,
) -> Model:
    """Build ResNet-20: three stages of three blocks, 16 to 64 channels.

    float [B, H, W, C] -> logits [B, num_classes].

    Parameters for three colours, with 10, 100 and 200 classes: 269,722, 275,572 and 282,072, or
    with projections 272,474, 278,324 and 284,824. GradMA names ResNet-20 for Tiny-ImageNet, but
    its code has a wider network that does not run; this is the network of He et al., initialised
    as PyTorch does.

    Args:
      num_classes: the number of logits.
      norm: a policy of ``layers.Norm``; He et al. have BatchNorm. None gives the convolutions
        biases.
      shortcut: shortcut where the width changes: "identity" (zeros for new channels, option A of
        He et al.) or "projection" (1 x 1 convolution with norm, option B).
      width: channels of the first stage; the others have 2 and 4 times as many.

    Raises:
      ValueError: an argument is out of range.
      TypeError: ``width`` is no integer.
    """
    check_norm(norm)
    check_choice("shortcut", shortcut, ("identity", "projection"))
    width = check_int("width", width, minimum=1)
    stages = [
        Stage(3, factor * width, norm, min(factor, 2), shortcut, None, last=factor == 4)
        for factor in (1, 2, 4)
    ]
    return from_linen(Classifier(num_classes, (Stem(width, norm, "cifar"), *stages)))
