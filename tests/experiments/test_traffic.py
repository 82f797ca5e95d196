"""Where bytes go: products and their floor by hand, parts that add up."""

import jax
import jax.numpy as jnp

from experiments.benchmarks.traffic import Reader, product_bytes


def program(weights, x):
    def step(x, _):
        return jnp.tanh(x @ weights), ()

    return jax.lax.scan(step, x, None, length=3)[0]


SHAPES = (jnp.zeros((64, 64)), jnp.zeros((32, 64)))


def test_the_floor_of_three_products():
    assert product_bytes(jax.make_jaxpr(program)(*SHAPES)) == 3 * 4 * (64 * 64 + 2 * 32 * 64)


def test_parts_add_up_and_products_are_found():
    reader = Reader(jax.jit(program).lower(*SHAPES).compile().as_text())
    moved = reader.traffic().bytes_accessed
    assert round(sum(reader.parts.values())) == moved
    assert 3 * 4 * (64 * 64 + 2 * 32 * 64) <= reader.parts["products"] < moved
