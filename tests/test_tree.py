"""Arithmetic on pytrees, next to NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import tree


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rows_are_scaled_by_their_own_factor_in_their_own_dtype(dtype):
    random = np.random.default_rng(0)
    factors = np.array([0.0, 0.5, -2.0, 4.0])  # products without rounding
    rows = {
        "matrix": jnp.asarray(random.normal(size=(4, 3, 2)), dtype),
        "vector": jnp.asarray(random.normal(size=(4, 5)), dtype),
        "scalar": jnp.asarray(random.normal(size=4), dtype),
        "none": jnp.zeros((4, 0), dtype),
    }
    scaled = tree.scale_rows(rows, jnp.asarray(factors, jnp.float32))
    for name, leaf in rows.items():
        assert scaled[name].dtype == leaf.dtype
        expected = [factor * row for factor, row in zip(factors, np.float64(leaf), strict=True)]
        np.testing.assert_array_equal(np.float64(scaled[name]), np.array(expected))


def test_joined_scalars_come_back_with_their_dtypes_and_structure():
    values = {"a": (jnp.float32(1), jnp.float16(2)), "b": [jnp.int32(3)], "c": jnp.float32(4)}

    def add(total, factor):
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), total), None

    joined = tree.Joined.of(values)
    assert [array.shape for array in joined.arrays] == [(2,), (), ()]  # of float32, float16, int32
    found = jax.lax.scan(add, joined, jnp.array([2, 3]))[0].separate()
    assert jax.tree.structure(found) == jax.tree.structure(values)
    for leaf, value in zip(jax.tree.leaves(found), jax.tree.leaves(values), strict=True):
        assert (leaf.dtype, leaf.shape, float(leaf)) == (value.dtype, (), 6 * float(value))
    assert tree.Joined.of({}).separate() == {}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axes", [0, 1])
def test_one_number_that_is_not_finite_is_found_and_large_ones_are_not_taken_for_it(dtype, axes):
    largest = float(jnp.finfo(dtype).max)
    shapes = [(3, 5), (3, 5), (3, 2, 2), (3, 5), (3, 5000), (3, 5000), (3,)]

    def values():
        return [np.full(shape, largest * (-1) ** i) for i, shape in enumerate(shapes)]

    def answer(values):
        found = {str(i): jnp.asarray(value, dtype) for i, value in enumerate(values)}
        return bool(jax.jit(tree.all_finite, static_argnums=1)({**found, "n": jnp.arange(3)}, axes))

    assert answer(values())
    for i, shape in enumerate(shapes):
        for broken in (np.nan, np.inf, -np.inf):
            spoilt = values()
            spoilt[i][(2,) + (1,) * (len(shape) - 1)] = broken
            assert not answer(spoilt), (i, broken)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_norms_of_many_leaves_are_not_added_in_few_bits(dtype):
    """Leaves too large to be joined; in bfloat16 their 400 sums stop growing at 2^9 times one."""
    leaves = [jnp.full((5000,), value, dtype) for value in np.linspace(0.5, 2, 400)]
    exact = np.sqrt(sum(5000 * float(leaf[0]) ** 2 for leaf in leaves))
    assert tree.norm(leaves).dtype == jnp.float32
    assert float(tree.norm(leaves)) == pytest.approx(exact, rel=1e-5)
    unit = tree.unit(leaves)
    assert {leaf.dtype for leaf in unit} == {jnp.dtype(dtype)}
    length = np.sqrt(sum(5000 * float(leaf[0]) ** 2 for leaf in unit))
    assert length == pytest.approx(1, rel=4e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_factor_is_not_rounded_to_the_dtype_of_its_leaf(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 500)), dtype)
    zeros, factor = jnp.zeros_like(x), 0.99
    found = {
        "scale": tree.scale(x, factor),
        "scale_rows": tree.scale_rows(x, jnp.full(3, factor)),
        "add_scaled": tree.add_scaled(zeros, factor, x),
        "descend": tree.descend(zeros, -factor, x),
        "average": tree.average(x, zeros, factor),
    }
    half = float(jnp.finfo(dtype).eps) / 2
    for name, product in found.items():
        assert product.dtype == dtype
        np.testing.assert_allclose(
            np.float64(product), factor * np.float64(x), rtol=1.1 * half + 1e-7, err_msg=name
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_normal_numbers_are_drawn_in_more_bits_than_they_have(dtype):
    drawn = tree.normal_like(jax.random.key(0), {"w": jnp.zeros(200_000, dtype)})["w"]
    assert drawn.dtype == dtype
    z = np.float64(drawn)
    assert abs(z.mean()) < 4 / np.sqrt(z.size)
    assert z.std() == pytest.approx(1, abs=4 / np.sqrt(2 * z.size))
    assert stats.binomtest(int((abs(z) > 3.5).sum()), z.size, 2 * stats.norm.sf(3.5)).pvalue > 1e-4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_weights_are_not_rounded_to_the_dtype_of_what_they_weigh(dtype):
    """Rows that cancel; the weights are 0.3008, 0.2002 and 0.5 in bfloat16."""
    rows = np.array([[100.0, 3.0], [100.0, -2.0], [-100.0, -1.0]])
    found = tree.weighted_sum(jnp.asarray(rows, dtype), jnp.array([0.3, 0.2, 0.5]))
    assert found.dtype == dtype
    np.testing.assert_allclose(np.float64(found), [0, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_momentum_of_many_steps_in_few_bits(dtype):
    """With 0.99 rounded to the dtype, the mean would be 15 % (bfloat16) or 2 % off."""
    steps = jnp.asarray(np.random.default_rng(1).normal(1, 1, (1000, 500)), dtype)
    found, _ = jax.lax.scan(
        lambda m, step: (tree.add_scaled(step, 0.99, m), None), jnp.zeros(500, dtype), steps
    )
    exact = np.zeros(500)
    for step in np.float64(steps):
        exact = 0.99 * exact + step
    assert np.float64(found).mean() == pytest.approx(exact.mean(), rel=2e-3)
