"""Compressors: sparsifiers, quantizers, low-rank projections and compositions."""

from fedjax_lab.compressors.base import Compressor, bfloat16, identity
from fedjax_lab.compressors.by_name import COMPRESSORS, as_compressor
from fedjax_lab.compressors.compose import compose
from fedjax_lab.compressors.low_rank import low_rank
from fedjax_lab.compressors.quantize import int8, qsgd, sign, terngrad
from fedjax_lab.compressors.sparsify import random_drop, random_k, top_k

__all__ = [
    "COMPRESSORS",
    "Compressor",
    "as_compressor",
    "bfloat16",
    "compose",
    "identity",
    "int8",
    "low_rank",
    "qsgd",
    "random_drop",
    "random_k",
    "sign",
    "terngrad",
    "top_k",
]
