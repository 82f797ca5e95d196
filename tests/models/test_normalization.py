"""``(x - centre) * scale`` in a form of its own, against the same as JAX differentiates it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core

from fedjax_lab.models.lowering import lowered
from fedjax_lab.models.normalization import centred_and_scaled


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(1.0, 2.0, shape).astype(dtype)


def test_values_and_derivatives_are_those_of_the_plain_product(x64):
    """Also gradients of gradients, in forward mode, and for each of several centres at once."""
    primals = normal(3, 4, 2, 6), normal(3, 1, 1, 6, seed=1), normal(1, 1, 1, 6, seed=2)
    tangents = tuple(normal(*x.shape, seed=9 + i) for i, x in enumerate(primals))

    def everything(function):
        def loss(*primals):
            return jnp.sin(function(*primals)).sum()

        def along(*primals):
            return sum(map(jnp.vdot, jax.grad(loss, (0, 1, 2))(*primals), tangents))

        each = jax.vmap(jax.grad(loss, (0, 1, 2)), (None, 0, None))
        return (
            jax.grad(loss, (0, 1, 2))(*primals),
            jax.grad(along, (0, 1, 2))(*primals),
            jax.jvp(function, primals, tangents),
            each(primals[0], jnp.stack([primals[1], 2 * primals[1]]), primals[2]),
        )

    def plain(x, centre, scale):
        return (x - centre) * scale

    np.testing.assert_array_equal(centred_and_scaled(*primals), plain(*primals))
    theirs, ours = jax.jit(lambda: (everything(plain), everything(centred_and_scaled)))()
    for expected, got in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-11)


class Normalized(nn.Module):
    """A convolution, and a norm of its features."""

    norm: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.norm(nn.Conv(6, (3, 3))(x))


def gradient_program(function, *arguments):
    """The gradient of the sum of squares, as a program."""
    loss = lambda *arguments: jnp.square(function(*arguments)).sum()  # noqa: E731
    return jax.make_jaxpr(jax.grad(loss))(*arguments)


def summed_products(program, size):
    """How many sums over the pixels of images read a product, in a program."""
    products = {e.outvars[0] for e in program.eqns if e.primitive.name in ("mul", "neg")}
    sums = [e.invars[0] for e in program.eqns if e.primitive.name == "reduce_sum"]
    return sum(v.aval.size >= size and v in products for v in sums)


@pytest.mark.parametrize(
    "norm",
    [nn.GroupNorm(2), nn.InstanceNorm(), nn.BatchNorm(False)],
    ids=["group", "instance", "batch"],
)
def test_norms_behind_a_convolution_sum_their_cotangents_once(x64, norm):
    """The cotangent's sum for the centre is the one for the bias, with no product before it."""
    x, module = normal(3, 8, 8, 2), Normalized(norm)
    variables = module.init(jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: normal(*leaf.shape, seed=3), variables)
    statistics = {name: v for name, v in variables.items() if name != "params"}

    def apply(params):
        return module.apply({"params": params, **statistics}, x, mutable=list(statistics))[0]

    plain, ours = (gradient_program(f, variables["params"]) for f in (apply, lowered(apply)))
    assert "centred_and_scaled" in str(ours)
    size = 3 * 8 * 8 * 6
    assert summed_products(ours.jaxpr, size) < summed_products(plain.jaxpr, size)
    arrays = jax.tree.leaves(variables["params"])
    expected, got = (jax.jit(jax_core.jaxpr_as_fun(program))(*arrays) for program in (plain, ours))
    for theirs, mine in zip(expected, got, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (y.astype(jnp.bfloat16) - y.mean((1, 2), keepdims=True).astype(jnp.bfloat16)) * 2,
        lambda y: (y - y.mean()) * 3,  # one number for all
        lambda y: (y - y.mean((1, 2), keepdims=True)) * y,  # the scale has all pixels
        lambda y: (y - 1) * y.mean((1, 2), keepdims=True),
        lambda y: (y - y.mean((1, 2), keepdims=True)) * y[:, :, :1],  # it has some of them
    ],
    ids=["bfloat16", "number", "all pixels", "literal", "some pixels"],
)
def test_other_products_stay(function):
    x, kernel = normal(3, 8, 8, 2, dtype=np.float32), normal(3, 3, 2, 6, dtype=np.float32)

    def apply(kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return function(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        )

    assert "centred_and_scaled" not in str(gradient_program(lowered(apply), kernel))


def test_a_program_without_a_convolution_stays():
    def apply(x):
        return (x - x.mean(1, keepdims=True)) * x.std(1, keepdims=True)

    x = normal(3, 8, dtype=np.float32)
    assert "centred_and_scaled" not in str(gradient_program(apply, x))
