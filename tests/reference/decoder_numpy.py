"""A decoder-only transformer in NumPy and float64: one sequence, one token and one head at a time.

Written from the equations: RMSNorm (Zhang, Sennrich 2019, eq. 4), rotary positions as products of
complex numbers (Su et al. 2021, eq. 13; the wavelengths of Llama 3 as its report's code states
them), attention (Vaswani et al. 2017, eq. 1) whose heads share keys and values in groups, and the
gated perceptron SwiGLU (Shazeer 2020, eq. 6).

``weights`` has the names and orientations of the files: "model.layers.0.self_attn.q_proj.weight",
of shape [outputs, inputs].
"""

import cmath
import math

import numpy as np


def norm(x, scale, epsilon):
    return x / math.sqrt(sum(number * number for number in x) / len(x) + epsilon) * scale


def affine(weights, name, x):
    y = weights[f"{name}.weight"] @ x
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def angle(pair, head_width, theta, scaling):
    """By how much a pair turns from one place to the next."""
    step = theta ** (-2 * pair / head_width)
    if scaling is None:
        return step
    wavelength = 2 * math.pi / step
    long = scaling["original"] / scaling["low"]
    short = scaling["original"] / scaling["high"]
    if wavelength < short:
        return step
    if wavelength > long:
        return step / scaling["factor"]
    smooth = (scaling["original"] / wavelength - scaling["low"]) / (
        scaling["high"] - scaling["low"]
    )
    return (1 - smooth) * step / scaling["factor"] + smooth * step


def turned(head, place, theta, scaling):
    """A head's numbers at a place: numbers i and i + D / 2 are a complex number that turns."""
    half = len(head) // 2
    pairs = [
        complex(head[i], head[i + half])
        * cmath.exp(1j * place * angle(i, len(head), theta, scaling))
        for i in range(half)
    ]
    return np.array([pair.real for pair in pairs] + [pair.imag for pair in pairs])


def softmax(scores):
    powers = np.exp(scores - np.max(scores))
    return powers / powers.sum()


def silu(x):
    return x / (1 + np.exp(-x))


def logits(weights, tokens, *, num_heads, num_kv_heads, layers, theta, epsilon, scaling=None):
    """Logits [T, V] of one sequence [T]."""
    stream = [weights["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(layers):
        name = f"model.layers.{layer}."
        queries, keys, values = [], [], []
        for place, h in enumerate(stream):
            x = norm(h, weights[f"{name}input_layernorm.weight"], epsilon)
            query, key, value = (
                np.split(affine(weights, f"{name}self_attn.{part}_proj", x), heads)
                for part, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads))
            )
            queries.append([turned(head, place, theta, scaling) for head in query])
            keys.append([turned(head, place, theta, scaling) for head in key])
            values.append(value)
        after = []
        for place, h in enumerate(stream):
            heads = []
            for head in range(num_heads):
                shared = head * num_kv_heads // num_heads
                query = queries[place][head]
                scores = [query @ keys[p][shared] / math.sqrt(len(query)) for p in range(place + 1)]
                share = softmax(np.array(scores))
                heads.append(sum(s * values[p][shared] for p, s in enumerate(share)))
            h = h + affine(weights, f"{name}self_attn.o_proj", np.concatenate(heads))
            x = norm(h, weights[f"{name}post_attention_layernorm.weight"], epsilon)
            gate = silu(affine(weights, f"{name}mlp.gate_proj", x))
            hidden = gate * affine(weights, f"{name}mlp.up_proj", x)
            after.append(h + affine(weights, f"{name}mlp.down_proj", hidden))
        stream = after
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return np.stack([head @ norm(h, weights["model.norm.weight"], epsilon) for h in stream])
