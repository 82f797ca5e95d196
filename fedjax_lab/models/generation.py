"""Text generation with a language model, one token at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_int, check_number, is_traced
from fedjax_lab.data.packing import Tokens
from fedjax_lab.data.sampler import check_key
from fedjax_lab.machine.keys import seeded
from fedjax_lab.models.base import Apply
from fedjax_lab.tree import widen
from fedjax_lab.types import Key, Params

_COLDEST = 1e-30  # least temperature at which usual logits / temperature are finite
_NO_TOKEN = -1  # where logits are NaN, of which argmax would be token 0


def generate(
    apply: Apply,
    params: Params,
    prompt: jax.Array | Tokens,
    num_tokens: int,
    *,
    key: Key | None = None,
    temperature: float = 0.0,
) -> jax.Array:
    """Continue prompts: int [B, T] -> the next tokens, int32 [B, ``num_tokens``].

    One compiled loop. There is no cache between tokens: each token runs the model over all T +
    ``num_tokens`` - 1 places, as many as precede the last token. This is fine for inspecting a
    model, but slow for serving one.

    Args:
      apply: ``model.apply`` of ``models.decoder``, ``lstm`` or ``transformer``, or a function
        (params, int [B, T]) -> logits [B, T, V]. It gets ``Tokens`` if the prompt is one, which
        ``lstm`` refuses.
      params: the model's parameters.
      prompt: int [B, T]. Prompts of different lengths are ``Tokens``, padded on the left, so that
        the last token belongs to the prompt.
      num_tokens: number of tokens to generate.
      key: typed PRNG key; required if ``temperature`` is not 0.
      temperature: 0 selects the most likely token each time; otherwise tokens are drawn from
        softmax(logits / temperature), from 1e-30 on. The softmax is float32 or wider.

    Returns:
      The tokens. If an argument is traced, so that nothing can be refused, a sequence whose logits
      are NaN continues with -1.

    Raises:
      TypeError: ``num_tokens`` is not an integer, or ``key`` is no typed key.
      ValueError: a number is out of range, the key is missing or not a single one, logits are NaN,
        or prompts are not integers [B, T] with a token, or are padded on the right.
    """
    check_int("num_tokens", num_tokens, minimum=1)
    check_number("temperature", temperature, minimum=0)
    if 0 < temperature < _COLDEST:
        raise ValueError(
            f"temperature is {temperature}; it must be 0, or at least {_COLDEST:g}, since logits "
            "divided by it may overflow."
        )
    if temperature and key is None:
        raise ValueError(f"key is None; temperature={temperature} draws tokens and needs one.")
    if key is not None:
        check_key(key)
    tokens, segments = prompt if isinstance(prompt, Tokens) else (prompt, None)
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"prompt has shape {tokens.shape} and dtype {tokens.dtype}; it must be tokens, "
            "integers [B, T], with T at least 1."
        )
    tokens = tokens.astype(jnp.int32)
    if segments is not None:
        segments = jnp.asarray(segments, jnp.int32)
        if not is_traced(segments) and not (segments[:, -1] > 0).all():
            raise ValueError(
                "prompt ends with padding (segment 0); pad prompts on the left, so that the last "
                "token belongs to the prompt."
            )
    key = seeded(0) if key is None else key
    found = _continue(apply, num_tokens, float(temperature), params, tokens, segments, key)
    if not is_traced(found) and (found == _NO_TOKEN).any():
        row = int(jnp.argmax((found == _NO_TOKEN).any(1)))
        raise ValueError(
            f"the logits of prompt[{row}] are NaN: it has a token beyond the vocabulary, or params "
            "are not finite."
        )
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _continue(
    apply: Apply,
    num_tokens: int,
    temperature: float,
    params: Params,
    tokens: jax.Array,
    segments: jax.Array | None,
    key: Key,
) -> jax.Array:
    length = tokens.shape[1]
    whole = jnp.pad(tokens, ((0, 0), (0, num_tokens)))
    if segments is not None:
        last = jnp.broadcast_to(segments[:, -1:], (len(tokens), num_tokens - 1))
        segments = jnp.concatenate([segments, last], axis=1)

    def step(i: Any, tokens: jax.Array) -> jax.Array:
        read = tokens[:, :-1]  # nothing follows the last token
        x = read if segments is None else Tokens(read, segments)
        logits: Any = apply(params, x)  # type: ignore[arg-type]
        here = jax.lax.dynamic_index_in_dim(logits, length + i - 1, axis=1, keepdims=False)
        here = widen(here)  # bfloat16 would draw with noise of 8 bits
        if temperature:
            drawn = jax.random.categorical(jax.random.fold_in(key, i), here / temperature)
        else:
            drawn = jnp.argmax(here, axis=-1)
        drawn = jnp.where(jnp.isnan(here).any(-1), _NO_TOKEN, drawn)
        return tokens.at[:, length + i].set(drawn.astype(tokens.dtype))

    return jax.lax.fori_loop(0, num_tokens, step, whole)[:, length:]
