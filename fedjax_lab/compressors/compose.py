"""Sparsification followed by quantization of the kept values.

Basu, Data, Karakus, Diggavi: Qsparse-local-SGD. NeurIPS 2019.
"""

import dataclasses
import math

import jax

from fedjax_lab.compressors import wire
from fedjax_lab.compressors.base import Compressor
from fedjax_lab.signatures import suggest_keywords


@suggest_keywords
def compose(sparsifier: Compressor, quantiser: Compressor) -> Compressor:
    """Quantize the coordinates that a sparsifier keeps.

    With bounds s and q of the two, the bound is s + q (1 - s) if q <= 1, else q. For an unbiased
    sparsifier it is s + q (1 + s), or (sqrt(s) + sqrt(q (1 + s)))^2 if the quantizer is biased.

    Args:
      sparsifier: ``top_k`` or ``random_k``.
      quantiser: any compressor; it receives the vector of the k kept values.

    Raises:
      ValueError: ``sparsifier`` does not keep a fixed number of values.
    """
    if sparsifier.positions is None:
        raise ValueError(f"sparsifier is {sparsifier}; it must be top_k or random_k.")
    positions = sparsifier.positions

    def compress(key, v):
        message = sparsifier.compress(jax.random.fold_in(key, 0), v)
        values = quantiser.compress(jax.random.fold_in(key, 1), message.values)
        return dataclasses.replace(message, values=values)

    def decompress(message):
        values = quantiser.decompress(message.values)
        return sparsifier.decompress(dataclasses.replace(message, values=values))

    def unpack(data, d, dtype="float32"):
        k = positions.kept(d)
        reader = wire.Reader(data)
        message = positions.unpack(reader, d)
        values = quantiser.unpack(reader.take(len(data) - positions.bytes(d)), k, dtype)
        return dataclasses.replace(message, values=values)

    def snr_bound(d):
        s, q = sparsifier.snr_bound(d), quantiser.snr_bound(positions.kept(d))
        if not sparsifier.unbiased:
            return s + q * (1 - s) if q <= 1 else q
        if quantiser.unbiased:
            return s + q * (1 + s)
        return (math.sqrt(s) + math.sqrt(q * (1 + s))) ** 2

    return Compressor(
        "compose",
        {"sparsifier": str(sparsifier), "quantiser": str(quantiser)},
        compress,
        decompress,
        pack=lambda message: positions.pack(message) + quantiser.pack(message.values),
        unpack=unpack,
        bytes=lambda d, dtype="float32": (
            positions.bytes(d) + quantiser.bytes(positions.kept(d), dtype)
        ),
        snr_bound=snr_bound,
        unbiased=sparsifier.unbiased and quantiser.unbiased,
    )
