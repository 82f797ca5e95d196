"""Vectors and compressors that the tests go through."""

import numpy as np
import pytest

from fedjax_lab import compressors as c

KINDS = ("random", "sparse", "constant", "zero", "one-hot")
ALL = {
    "top_k": c.top_k(0.7),
    "top_k-sort": c.top_k(0.7, selection="sort"),
    "top_k-approximate": c.top_k(0.7, selection="approximate"),
    "random_k": c.random_k(0.7),
    "random_k-rescale": c.random_k(0.7, rescale=True),
    "random_drop": c.random_drop(0.7),
    "random_drop-rescale": c.random_drop(0.7, rescale=True),
    "sign": c.sign(),
    "qsgd": c.qsgd(3),
    "qsgd-scaled": c.qsgd(1, scaled=True),
    "qsgd-fine": c.qsgd(1000),
    "terngrad": c.terngrad(),
    "terngrad-scaled": c.terngrad(scaled=True),
    "int8": c.int8(),
    "bfloat16": c.bfloat16(),
    "identity": c.identity(),
    "low_rank": c.low_rank(2),
    "compose-top_k-int8": c.compose(c.top_k(0.7), c.int8()),
    "compose-top_k-qsgd": c.compose(c.top_k(0.7), c.qsgd(1)),
    "compose-random_k-sign": c.compose(c.random_k(0.7, rescale=True), c.sign()),
    "compose-random_k-qsgd": c.compose(c.random_k(0.7, rescale=True), c.qsgd(3)),
}
# They share the kernels of another one, or of two.
VARIANTS = {
    "top_k-sort",
    "top_k-approximate",
    "random_k",
    "random_drop-rescale",
    "qsgd-scaled",
    "terngrad-scaled",
    "compose-top_k-qsgd",
    "compose-random_k-sign",
}
every = pytest.mark.parametrize("name", ALL)
every_kernel = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in ALL],
)
UNBIASED = {
    "random_k-rescale",
    "random_drop-rescale",
    "qsgd",
    "qsgd-fine",
    "terngrad",
    "identity",
    "compose-random_k-qsgd",
}


def vector(kind, d, seed=0):
    """A float32 vector of one of the kinds."""
    rng = np.random.default_rng(seed)
    v = np.zeros(d, np.float32)
    if kind == "random":
        v[:] = rng.normal(size=d)
    elif kind == "sparse":
        v[rng.permutation(d)[: max(1, d // 20)]] = 3.0
    elif kind == "constant":
        v[:] = -0.3
    elif kind == "one-hot":
        v[d // 3] = -2.0
    return v
