"""Vision transformers: a small one for images of CIFAR's size, and ViT-Base/16.

Sources: Dosovitskiy et al.: An Image is Worth 16x16 Words: Transformers for Image Recognition at
Scale. ICLR 2021; FedSWA fine-tunes ViT-Base/16 on Tiny-ImageNet. The small one has the width and
heads of DeiT-Ti (Touvron et al., ICML 2021), half its layers and patches of 4 x 4 pixels.

Departures: FedSWA starts from weights trained on ImageNet-21k. Here weights are random: normal with
standard deviation 0.02, cut off at two of them, biases 0, and the last layer as in every model of
this package. There is one dropout rate, after the position embedding and after each half of a
layer.

Axes: B images, T tokens (one per patch, and the class token in front), F features.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_int, check_number
from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import Classifier, check_float

_NORMAL = nn.initializers.truncated_normal(0.02)


class PatchEmbedding(nn.Module):
    """Images to tokens with positions: float [B, H, W, C] -> [B, T, F], T = 1 + H W / patch^2.

    The patch embedding of the papers, a convolution whose stride is its size, is an affine map
    of each patch; the kernel's rows are in the order H, W, C of a patch's pixels.

    Raises:
      ValueError: ``x`` is not a batch of images, or patches do not divide it.
    """

    num_features: int
    patch_size: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Embed ``x``."""
        check_float(x)
        size = self.patch_size
        if x.ndim != 4 or x.shape[1] % size or x.shape[2] % size:
            raise ValueError(
                f"x has shape {x.shape}; it must be images [B, H, W, C] with H and W multiples of "
                f"patch_size={size}."
            )
        batch, height, width, channels = x.shape
        rows, columns = height // size, width // size
        x = x.reshape(batch, rows, size, columns, size, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, size * size * channels)
        x = nn.Dense(self.num_features, kernel_init=_NORMAL, name="patches")(x)
        first = self.param("class_token", _NORMAL, (1, 1, self.num_features), jnp.float32)
        x = jnp.concatenate([jnp.broadcast_to(first, (batch, 1, self.num_features)), x], axis=1)
        x = x + self.param("positions", _NORMAL, (1, *x.shape[1:]), jnp.float32)
        return nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(x)


class EncoderLayer(nn.Module):
    """Self-attention and a two-layer perceptron, each on normalised input and added to it.

    float [B, T, F] -> [B, T, F].
    """

    num_heads: int
    mlp_width: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the layer."""
        drop = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads, kernel_init=_NORMAL, attention_fn=_attention, name="attention"
        )
        x = x + drop(attention(nn.LayerNorm(epsilon=1e-6, name="norm_0")(x)))
        y = nn.LayerNorm(epsilon=1e-6, name="norm_1")(x)
        y = nn.Dense(self.mlp_width, kernel_init=_NORMAL, name="dense_0")(y)
        y = nn.gelu(y, approximate=False)
        return x + drop(nn.Dense(x.shape[-1], kernel_init=_NORMAL, name="dense_1")(y))


def _attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute attention [B, T, heads, F] without dropout; the softmax is at least float32."""
    is_narrow = jnp.finfo(query.dtype).bits < 32
    weights = nn.dot_product_attention_weights(
        query, key, deterministic=True, force_fp32_for_softmax=is_narrow
    )
    return jnp.einsum("...hqk,...khd->...qhd", weights.astype(value.dtype), value)


class ClassToken(nn.Module):
    """The first token, normalised: float [B, T, F] -> [B, F]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Read the class token of ``x``."""
        return nn.LayerNorm(epsilon=1e-6, name="norm")(x[:, 0])


def vit(
    num_classes: int = 10,
    *,
    patch_size: int = 4,
    width: int = 192,
    depth: int = 6,
    num_heads: int = 3,
    mlp_width: int | None = None,
    dropout: float = 0.0,
) -> Model:
    """Build a vision transformer: float [B, H, W, C] -> logits [B, num_classes].

    2,693,578 parameters for 32 x 32 x 3 and 10 classes. Params fit images of one size, because each
    position has its own embedding.

    Args:
      num_classes: the number of logits.
      patch_size: height and width of a patch; it must divide H and W.
      width: F, a multiple of ``num_heads``.
      depth: the number of layers.
      num_heads: number of attention heads.
      mlp_width: width of each perceptron's hidden layer; None: four times ``width``.
      dropout: dropout rate in training.

    Raises:
      ValueError: an argument is out of range.
      TypeError: a size is not an integer.
    """
    patch_size = check_int("patch_size", patch_size, minimum=1)
    width = check_int("width", width, minimum=1)
    depth = check_int("depth", depth, minimum=1)
    num_heads = check_int("num_heads", num_heads, minimum=1)
    if width % num_heads:
        raise ValueError(f"width is {width}; it must be a multiple of num_heads={num_heads}.")
    mlp_width = 4 * width if mlp_width is None else check_int("mlp_width", mlp_width, minimum=1)
    check_number("dropout", dropout, minimum=0.0, maximum=1.0)
    layers = [EncoderLayer(num_heads, mlp_width, dropout) for _ in range(depth)]
    blocks = (PatchEmbedding(width, patch_size, dropout), *layers, ClassToken())
    return from_linen(Classifier(num_classes, blocks))


def vit_base(num_classes: int = 200, *, dropout: float = 0.0) -> Model:
    """Build ViT-Base/16: patches of 16 x 16, width 768, 12 layers of 12 heads.

    float [B, H, W, C] -> logits [B, num_classes]. 85,952,456 parameters for 224 x 224 x 3 and 200
    classes, of which the last layer has 153,800.

    Args:
      num_classes: the number of logits.
      dropout: as for ``vit``.

    Raises:
      ValueError: ``dropout`` is out of range.
    """
    return vit(num_classes, patch_size=16, width=768, depth=12, num_heads=12, dropout=dropout)
