"""The LSTM language model of FAFED (WikiText-2).

Sources: Wu, Huang, Hu, Huang: Faster Adaptive Federated Learning. AAAI 2023 (FAFED), which states
two layers, 650 units and word vectors, dropout 0.5. These are the settings of PyTorch's example of
a word language model, which also supplies the rest: dropout on the word vectors, between the layers
and before the decoder; word vectors and decoder uniform in +-0.1, the decoder's bias 0; layers as
``torch.nn.LSTM`` (Hochreiter and Schmidhuber 1997, with forget gates; every parameter uniform in
+-1/sqrt(hidden); two bias vectors, of which only the sum matters).
Departure: there, a sequence begins with the state in which the one before it ended. Here it begins
with zeros, because the sequences of a mini-batch are drawn independently of each other.

Axes: B sequences, L words of a sequence, V words of the vocabulary, E word vector, H units.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from fedjax_lab.checks import check_flag, check_int, check_number
from fedjax_lab.data.packing import Tokens
from fedjax_lab.machine.layout import written_out
from fedjax_lab.machine.target import traced_precision
from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import uniform
from fedjax_lab.tree import widen


def lstm(
    num_classes: int,
    *,
    embedding: int = 650,
    hidden: int = 650,
    layers: int = 2,
    dropout: float = 0.5,
    tie: bool = False,
) -> Model:
    """Build an LSTM language model: words int [B, L] -> logits [B, L, num_classes].

    50,065,078 parameters for the 33,278 words of WikiText-2 (28,434,378 with ``tie``). It has no
    forward-mode derivative.

    Args:
      num_classes: the size of the vocabulary, V.
      embedding: E.
      hidden: H, of every layer.
      layers: number of LSTM layers.
      dropout: dropout rate at all three places.
      tie: whether the decoder is the transpose of the word vectors, which needs E = H.

    Raises:
      ValueError: a number is out of range, or ``tie`` is set and E differs from H; when called:
        words are not integers [B, L].
      TypeError: a number has the wrong type; when called: words are ``Tokens``.
    """
    sizes = {"num_classes": num_classes, "embedding": embedding, "hidden": hidden, "layers": layers}
    for name, size in sizes.items():
        check_int(name, size, minimum=1)
    check_number("dropout", dropout, minimum=0.0, maximum=1.0, exclusive_maximum=True)
    if check_flag("tie", tie) and embedding != hidden:
        raise ValueError(
            f"embedding is {embedding} and hidden {hidden}; with tie they must be equal."
        )
    return from_linen(LanguageModel(num_classes, embedding, (hidden,) * layers, dropout, tie))


class LanguageModel(nn.Module):
    """See ``lstm``.

    Parameters: ``embedding`` [V, E], ``layers_i``, ``decoder`` [H, V], ``decoder_bias`` [V].

    Raises:
      TypeError: ``x`` is ``Tokens``.
      ValueError: ``x`` is not a batch of sequences of integers.
    """

    num_words: int
    embedding: int
    hidden: tuple[int, ...]
    dropout: float
    tie: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the logits of each next word."""
        if isinstance(x, Tokens):
            raise TypeError(
                "x is Tokens, whose segments an LSTM does not keep apart; it must be words, "
                "integers [B, L]: a sequence to a row, without padding on the left."
            )
        if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"x has shape {x.shape} and dtype {x.dtype}; it must be words, integers [B, L]."
            )

        def drop(h: jax.Array) -> jax.Array:
            return nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(h)

        vectors = self.param("embedding", uniform(0.1), (self.num_words, self.embedding))
        # A word beyond the vocabulary makes its sequence NaN, instead of counting as another one.
        places = jnp.asarray(vectors).at[x]
        h = drop(places.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False))
        for i, size in enumerate(self.hidden):
            h = drop(LSTM(size, name=f"layers_{i}")(h))
        if self.tie:
            decoder = vectors.T
        else:
            decoder = self.param("decoder", uniform(0.1), (self.hidden[-1], self.num_words))
        bias = self.param("decoder_bias", nn.initializers.zeros, (self.num_words,), jnp.float32)
        h, decoder, bias = promote_dtype(h, decoder, bias)
        return h @ decoder + bias.reshape(1, 1, -1)


class LSTM(nn.Module):
    """One LSTM layer that starts from the state 0: float [B, L, E] -> outputs [B, L, H].

    Parameters, with the gates in the order input, forget, cell, output: ``input_kernel`` [E, 4H],
    ``hidden_kernel`` [H, 4H], ``input_bias`` and ``hidden_bias`` [4H], float32.
    """

    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the layer over the sequences."""
        start = uniform(1.0 / math.sqrt(self.size))
        width = 4 * self.size
        input_kernel = self.param("input_kernel", start, (x.shape[-1], width))
        hidden_kernel = self.param("hidden_kernel", start, (self.size, width))
        bias = self.param("input_bias", start, (width,))
        bias = bias + self.param("hidden_bias", start, (width,))
        x, input_kernel, hidden_kernel, bias = promote_dtype(x, input_kernel, hidden_kernel, bias)
        # The inputs' part of the gates, for all words in one matrix product.
        gates = x.swapaxes(0, 1) @ input_kernel + bias.reshape(1, 1, -1)
        return _run(gates, hidden_kernel, traced_precision()).swapaxes(0, 1)


# A custom gradient, without forward mode. What does not depend on later words is computed for all
# words at once. This includes the gradient of the kernel, which would otherwise take a product and
# an addition to the full kernel for each word.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _run(gates: jax.Array, kernel: jax.Array, precision: str | None) -> jax.Array:
    """Compute the outputs [L, B, H] from the inputs' part of the gates, [L, B, 4H].

    The gradient is traced elsewhere, where the default precision of products may be another one.
    """

    def step(state, gates):
        h, c = state
        h, c, _ = _word(gates + h @ kernel, c)
        return (h, c), h

    return jax.lax.scan(step, _zero_state(gates), gates)[1]


def _word(gates, c):
    """Compute (h, c) after a word, and the values of the four gates."""
    enter, forget, cell, leave = jnp.split(gates, 4, axis=-1)
    opened = nn.sigmoid(enter), nn.sigmoid(forget), jnp.tanh(cell), nn.sigmoid(leave)
    enter, forget, cell, leave = opened
    c = forget * c + enter * cell
    return leave * jnp.tanh(c).astype(leave.dtype), c, opened


def _zero_state(gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    zeros = jnp.zeros((gates.shape[1], gates.shape[2] // 4), gates.dtype)
    # A sum over the words, in float32 for bfloat16.
    return zeros, widen(zeros)


def _run_forward(gates, kernel, precision):
    def step(state, gates):
        h, c = state
        h, after, opened = _word(gates + h @ kernel, c)
        return (h, after), (h, c, opened)

    with jax.default_matmul_precision(precision):
        _, (outputs, c, opened) = jax.lax.scan(step, _zero_state(gates), gates)
    return outputs, (outputs, c, opened, kernel)


def _run_backward(precision, residuals, to_outputs):
    with jax.default_matmul_precision(precision):
        return _gradients(residuals, to_outputs)


def _gradients(residuals, to_outputs):
    outputs, c, (enter, forget, cell, leave), kernel = residuals
    squashed = jnp.tanh(forget * c + enter * cell)
    # The factor of each gate for the gradient of c, or of h for the last gate.
    slopes = (
        cell * enter * (1 - enter),
        c * forget * (1 - forget),
        enter * (1 - cell**2),
        squashed * leave * (1 - leave),
    )

    def step(to_state, word):
        to_h, to_c = to_state
        to_output, slopes, of_h, forget = word
        to_h = to_h + to_output
        to_c = to_c + to_h * of_h
        parts = [slope * to for slope, to in zip(slopes, (to_c, to_c, to_c, to_h), strict=True)]
        to_gates = jnp.concatenate(parts, axis=-1).astype(kernel.dtype)
        return (to_gates @ transposed, to_c * forget), to_gates

    words = to_outputs, slopes, leave * (1 - squashed**2), forget
    transposed = written_out(kernel.T)
    zeros = jnp.zeros_like(c[0])
    _, to_gates = jax.lax.scan(step, (zeros.astype(outputs.dtype), zeros), words, reverse=True)
    # The state before the first word is 0.
    before, after = (x.reshape(-1, x.shape[-1]) for x in (outputs[:-1], to_gates[1:]))
    return to_gates, before.T @ after


_run.defvjp(_run_forward, _run_backward)
