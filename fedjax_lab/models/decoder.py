"""Decoder-only transformers for pretrained Llama and Qwen2 weights.

Sources: Touvron et al.: LLaMA: Open and Efficient Foundation Language Models. 2023; Grattafiori et
al.: The Llama 3 Herd of Models. 2024; Yang et al.: Qwen2 Technical Report. 2024. RMSNorm (Zhang,
Sennrich, NeurIPS 2019) before each half of a layer, rotary positions (Su et al.: RoFormer, 2021) on
queries and keys, grouped-query attention (Ainslie et al., EMNLP 2023), and a perceptron whose
hidden layer is silu(gate) * up (Shazeer, 2020).

Rotary positions rotate number i of a head's D numbers together with number i + D / 2, as in the
weight files of ``transformers``.

Layers are scanned: their params are stacked along a first axis, so many layers compile as fast as
one. Norms, rotations, the softmax and the logits are float32 for any dtype of the weights.

Axes: B sequences, T tokens, V tokens of the vocabulary, F features, N heads of queries, K of keys
and values, D features of a head, L layers, r the rank of an adapter.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_flag, check_number
from fedjax_lab.data.packing import Tokens
from fedjax_lab.machine.keys import seeded
from fedjax_lab.machine.target import traced_for
from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.decoder_config import DecoderConfig
from fedjax_lab.tree import wide_dtype
from fedjax_lab.types import PyTree

DTYPES = ("float32", "bfloat16", "float16", "float64")


def decoder(
    config: DecoderConfig,
    *,
    dtype: Any = "float32",
    remat: bool = False,
    adapter_dropout: float = 0.0,
) -> Model:
    """Build a decoder-only transformer: tokens int [B, T], or ``Tokens`` -> float32 [B, T, V].

    The results are the logits of each next token. The model computes in the dtype of its params.
    Kernels may have adapters, also of another dtype: see ``attach_adapters``.

    Args:
      config: configuration, for example from ``read_decoder_config``.
      dtype: dtype of the params of ``init``.
      remat: recompute each layer in the backward pass to save memory.
      adapter_dropout: dropout rate of the adapters' inputs in training.

    Raises:
      TypeError: ``config`` is not a ``DecoderConfig``, or ``remat`` not a truth value.
      ValueError: ``dtype`` or ``adapter_dropout`` is out of range; when called: tokens are not
        integers [B, T] or longer than ``config.max_length``, or segments have another shape.
    """
    if not isinstance(config, DecoderConfig):
        raise TypeError(f"config is a {type(config).__name__}; it must be a DecoderConfig.")
    name = dtype if isinstance(dtype, str) or dtype is None else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype is {name}; it must be one of {', '.join(DTYPES)}.")
    check_number("adapter_dropout", adapter_dropout, minimum=0, maximum=1, exclusive_maximum=True)
    return from_linen(Decoder(config, name, check_flag("remat", remat), adapter_dropout))


def params_shapes(model: Model) -> PyTree:
    """Return the shapes and dtypes of a decoder's params."""
    return jax.eval_shape(model.init, seeded(0), jnp.zeros((1, 1), jnp.int32))


class Decoder(nn.Module):
    """See ``decoder``.

    Parameters: ``embedding`` [V, F], ``layers`` (of ``Layer``, each with a first axis L), ``norm``,
    and ``head`` unless the embedding is tied to it.
    """

    config: DecoderConfig
    dtype: str
    remat: bool
    adapter_dropout: float

    @nn.compact
    def __call__(self, x: jax.Array | Tokens) -> jax.Array:
        """Compute the logits of each next token."""
        config = self.config
        tokens, segments = _parts(x, config.max_length)
        init = nn.initializers.normal(config.init_std)
        embedding = self.param("embedding", init, (config.vocab_size, config.width), self.dtype)
        # A token beyond the vocabulary makes its sequence NaN, instead of counting as another one.
        vectors = jnp.asarray(embedding).at[tokens]
        h = vectors.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        positions = _positions(tokens.shape, segments)
        turn = _turn(config, positions)
        mask = None if segments is None else _mask(segments)

        layer: Any = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=config.num_layers,
        )
        h, _ = layers(config, self.dtype, self.adapter_dropout, name="layers")(h, (turn, mask))
        h = RMSNorm(config.norm_epsilon, self.dtype, name="norm")(h)
        if config.tie:
            return jnp.einsum(
                "btf,vf->btv", h, embedding, preferred_element_type=wide_dtype(h.dtype)
            )
        head = Projection(config.vocab_size, False, self.dtype, config.init_std, 0.0, name="head")
        return head(h, wide=True)


class Layer(nn.Module):
    """Attention and a gated perceptron, each with a pre-norm and a residual connection.

    (float [B, T, F], (cos and sin, mask)) -> (float [B, T, F], None), as ``nn.scan`` expects.
    """

    config: DecoderConfig
    dtype: str
    adapter_dropout: float

    @nn.compact
    def __call__(self, h: jax.Array, shared: tuple) -> tuple[jax.Array, None]:
        """Run the layer."""
        config, (turn, mask) = self.config, shared

        def project(name: str, size: int, bias: bool) -> Projection:
            std = config.init_std
            return Projection(size, bias, self.dtype, std, self.adapter_dropout, name=name)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.norm_epsilon, self.dtype, name=name)

        def heads(name: str, count: int) -> jax.Array:
            found = project(name, count * config.head_width, config.qkv_bias)(x)
            return found.reshape(*x.shape[:2], count, config.head_width)

        x = norm("attention_norm")(h)
        query = _rotate(heads("query", config.num_heads), turn)
        key = _rotate(heads("key", config.num_kv_heads), turn)
        value = heads("value", config.num_kv_heads)
        x = _attention(query, key, value, mask)
        x = x.reshape(*x.shape[:2], config.num_heads * config.head_width)
        h = h + project("out", config.width, config.out_bias)(x)

        x = norm("mlp_norm")(h)
        gate = project("gate", config.mlp_width, config.mlp_bias)(x)
        up = project("up", config.mlp_width, config.mlp_bias)(x)
        return h + project("down", config.width, config.mlp_bias)(nn.silu(gate) * up), None


def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Attend to earlier tokens, of each group of heads: [B, T, N, D], [B, T, K, D] -> [B, T, N, D].

    A CPU has no product of float16 with sums of float32, which JAX asks for.
    """
    dtype = query.dtype
    if dtype == jnp.float16 and traced_for().platform == "cpu":
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    x = jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=mask is None)
    return x.astype(dtype)


class RMSNorm(nn.Module):
    """Normalisation x / sqrt(mean(x^2) + epsilon) * scale, in float32, of the same shape and dtype.

    Parameter: ``scale`` [F].
    """

    epsilon: float
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise ``x`` [B, T, F]."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], self.dtype)
        wide = x.astype(wide_dtype(x.dtype))
        power = jnp.square(wide).mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(power + self.epsilon)
        return (wide * scale.astype(wide.dtype).reshape(1, 1, -1)).astype(x.dtype)


class Projection(nn.Module):
    """An affine map [B, T, m] -> [B, T, n], with an optional adapter.

    Parameters: ``kernel`` [m, n], and ``bias`` [n] if it has one. ``attach_adapters`` adds
    ``adapter_down`` [m, r] and ``adapter_up`` [r, n], which are used in their own dtype.
    """

    size: int
    use_bias: bool
    dtype: str
    init_std: float
    adapter_dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, wide: bool = False) -> jax.Array:
        """Map ``x``; with ``wide`` the result is float32."""
        shape = (x.shape[-1], self.size)
        kernel = self.param("kernel", nn.initializers.normal(self.init_std), shape, self.dtype)
        y = jnp.matmul(x, kernel, preferred_element_type=wide_dtype(x.dtype) if wide else None)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.size,), self.dtype)
            y = y + bias.reshape(1, 1, -1)
        if not self.has_variable("params", "adapter_down"):
            return y
        down: jax.Array = self.get_variable("params", "adapter_down")
        up: jax.Array = self.get_variable("params", "adapter_up")
        x = x.astype(jnp.promote_types(x.dtype, down.dtype))
        drop = nn.Dropout(self.adapter_dropout, deterministic=not self.has_rng("dropout"))
        # The product is small compared with y: it is added before rounding, so as not to be lost.
        return (y + (drop(x) @ down) @ up).astype(y.dtype)


def _parts(x: jax.Array | Tokens, longest: int) -> tuple[jax.Array, jax.Array | None]:
    """Check and return the tokens and their segments."""
    tokens, segments = x if isinstance(x, Tokens) else (x, None)
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"x has tokens of shape {tokens.shape} and dtype {tokens.dtype}; they must be integers "
            "[B, T]."
        )
    if tokens.shape[1] > longest:
        raise ValueError(
            f"x has {tokens.shape[1]} tokens in a sequence; config.max_length is {longest}."
        )
    if segments is not None and jnp.shape(segments) != tokens.shape:
        raise ValueError(
            f"x has segments of shape {jnp.shape(segments)}; they must be [B, T] = "
            f"{list(tokens.shape)}, as the tokens."
        )
    return tokens, segments


def _positions(shape: tuple[int, ...], segments: jax.Array | None) -> jax.Array:
    """Compute positions within each segment, int [B, T]; [1, T] for whole sequences."""
    places = jnp.arange(shape[1]).reshape(1, -1)
    if segments is None:
        return places
    begins = segments[:, 1:] != segments[:, :-1]
    starts = jnp.where(jnp.pad(begins, ((0, 0), (1, 0))), jnp.broadcast_to(places, shape), 0)
    return places - jax.lax.cummax(starts, axis=1)


def _mask(segments: jax.Array) -> jax.Array:
    """Compute the attention mask, bool [B, 1, T, T]: earlier tokens of the segment, and itself."""
    places = jnp.arange(segments.shape[1])
    before = places[:, None] >= places[None, :]
    return ((segments[:, :, None] == segments[:, None, :]) & before[None])[:, None]


def _turn(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute cosines and sines [B, T, 1, D / 2] of the rotary angles."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(config).reshape(1, 1, -1)
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def frequencies(config: DecoderConfig) -> np.ndarray:
    """Compute the rotary frequency of each pair of a head's numbers, float32 [D / 2]."""
    half = config.head_width // 2
    plain = config.rope_theta ** -(np.arange(half) / half)
    scaling = config.rope_scaling
    if scaling is not None:
        # Turns of a pair within the original length: pairs with few are stretched, with many not.
        turns = scaling.original_length * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = np.clip((turns - low) / (high - low), 0, 1)
        plain = (1 - share) * plain / scaling.factor + share * plain
    return plain.astype(np.float32)


def _rotate(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs of each head's numbers, [B, T, N, D]."""
    cos, sin = turn
    first, second = jnp.split(x.astype(wide_dtype(x.dtype)), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
