"""Winograd's convolution against XLA's and against the sums as they stand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab.models import winograd
from fedjax_lab.models.convolution import convolution
from tests.models.test_convolution import compare, normal, value_and_gradients, xla
from tests.tiers import few

TILES = [(tile, width) for width in range(2, 8) for tile in range(2, min(4, 9 - width) + 1)]
# image, kernel, strides, padding: outputs that tiles divide and do not, fewer than a tile; all
# widths of a kernel that tiles take; oblong kernels; a batch of one. Rows of few columns, which are
# multiplied at once, with images or kernels first.
CASES = [
    ((2, 9, 12, 3), (5, 5, 3, 4), (1, 1), "VALID"),
    ((3, 8, 7, 2), (3, 3, 2, 5), (2, 1), "SAME"),
    ((1, 6, 4, 1), (1, 3, 1, 1), (1, 1), "VALID"),
    ((2, 5, 11, 2), (2, 7, 2, 3), (3, 1), "SAME"),
    ((2, 4, 9, 3), (3, 6, 3, 2), (1, 1), "SAME"),
    ((2, 4, 6, 2), (4, 4, 2, 2), (1, 1), "VALID"),
    ((2, 3, 8, 2), (2, 2, 2, 2), (1, 1), "VALID"),
]
# One row at a time, kernels or images first.
ROW_BY_ROW = [
    ((8, 5, 11, 2), (3, 3, 2, 4), (1, 1), "VALID"),
    ((16, 7, 6, 2), (3, 3, 2, 17), (2, 1), "VALID"),
]


@pytest.mark.parametrize(("tile", "width"), TILES)
def test_maps_correlate(tile, width):
    outputs, kernel, pixels = winograd._maps(tile, width)
    weights, row = normal(width, 0), normal(tile + width - 1, 1)
    got = outputs @ ((kernel @ weights) * (pixels @ row))
    np.testing.assert_allclose(got, np.correlate(row, weights), rtol=0, atol=1e-13)
    assert (pixels.astype(np.float32) == pixels).all()  # no rounding before the products


@pytest.mark.parametrize(
    ("shape", "kernel_shape", "strides", "padding", "dtype", "tolerance"),
    [
        *few(3, [(*case, np.float64, 1e-12) for case in CASES]),
        *((*case, np.float64, 1e-12) for case in ROW_BY_ROW),
        *((*case, np.float32, 1e-5) for case in CASES[:1]),
        *(pytest.param(*case, np.float32, 1e-5, marks=pytest.mark.slow) for case in CASES[1:]),
    ],
)
def test_values_and_gradients_are_xlas(
    x64, shape, kernel_shape, strides, padding, dtype, tolerance
):
    fns = (
        functools.partial(convolution, padding=padding, stride=strides, lowering="winograd"),
        functools.partial(xla, strides=strides, padding=padding),
    )
    run = jax.jit(lambda x, kernel: [value_and_gradients(fn, x, kernel) for fn in fns])
    compare(*run(normal(shape, 0, dtype), normal(kernel_shape, 1, dtype)), tolerance)


@pytest.mark.methods
def test_rounding_of_many_channels(x64):
    """Float32 next to float64, where the sums are as long as in the larger models."""
    x, kernel = normal((8, 10, 12, 64), 0), normal((5, 5, 64, 32), 1)

    @jax.jit
    def run(x, kernel):
        winograds = functools.partial(convolution, lowering="winograd")
        single = value_and_gradients(winograds, *(v.astype(jnp.float32) for v in (x, kernel)))
        return single, value_and_gradients(
            functools.partial(xla, strides=(1, 1), padding="VALID"), x, kernel
        )

    for ours, exact in zip(*run(x, kernel), strict=True):
        assert np.abs(ours - exact).max() < 5e-6 * np.abs(exact).max()


@pytest.mark.methods
def test_a_kernel_for_each_client(x64):
    """Mapped and scanned: XLA's result, client after client."""
    x, kernels = normal((3, 2, 6, 7, 3), 0), normal((3, 3, 3, 3, 2), 1)

    def one(x, kernel):
        fn = functools.partial(convolution, padding="SAME", lowering="winograd")
        return value_and_gradients(fn, x, kernel)

    @jax.jit
    def xlas(x, kernel):
        return value_and_gradients(lambda x, k: xla(x, k, (1, 1), "SAME"), x, kernel)

    @jax.jit
    def both(x, kernels):
        return jax.vmap(one)(x, kernels), jax.lax.map(lambda pair: one(*pair), (x, kernels))

    expected = [xlas(x[i], kernels[i]) for i in range(3)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
    for got in both(x, kernels):
        compare(got, expected, 1e-12)


@pytest.mark.parametrize("lowering", ["winograd", "gemm"])
@pytest.mark.methods
def test_second_derivatives_are_xlas(x64, lowering):
    """As the eigenvalues of a Hessian need them: reverse mode twice."""

    def products(fn):
        def norm_of_gradient(x, kernel):
            to_x, to_kernel = jax.grad(lambda *a: (fn(*a) ** 3).sum(), (0, 1))(x, kernel)
            return (to_x**2).sum() + (to_kernel**2).sum()

        return jax.grad(norm_of_gradient, (0, 1))

    ours = functools.partial(convolution, lowering=lowering)
    expected = functools.partial(xla, strides=(1, 1), padding="VALID")
    run = jax.jit(lambda x, kernel: [products(fn)(x, kernel) for fn in (ours, expected)])
    compare(*run(normal((2, 5, 6, 2), 0), normal((3, 3, 2, 2), 1)), 1e-11)


def test_automatic_choice():
    """Where sums and rows are long, or rows have few columns; never where it cannot be."""

    def chosen(shape, kernel_shape, dtype=jnp.float32, stride=1):
        x, kernel = jnp.ones(shape, dtype), jnp.ones(kernel_shape, dtype)
        programs = {}
        for lowering in ("auto", "gemm", "winograd"):
            fn = functools.partial(convolution, stride=stride, lowering=lowering)
            try:
                programs[lowering] = str(jax.make_jaxpr(fn)(x, kernel))
            except ValueError:
                continue
        return {name for name, program in programs.items() if program == programs["auto"]}

    wide = (50, 14, 14, 32), (5, 5, 32, 64)
    assert chosen(*wide) == {"auto", "winograd"}
    assert chosen(*wide, jnp.bfloat16) == {"auto", "gemm"}
    assert chosen(*wide, stride=2) == {"auto", "gemm"}
    assert chosen((50, 28, 28, 1), (5, 5, 1, 32)) == {"auto", "gemm"}
    assert chosen((2, 14, 14, 4), (5, 5, 4, 8)) == {"auto", "winograd"}
    assert chosen((20, 14, 14, 4), (5, 5, 4, 8)) == {"auto", "gemm"}
    assert chosen((50, 14, 14, 32), (1, 1, 32, 64)) == {"auto", "gemm"}
    lenets_first = (5, 5, 3, 6)  # 1.4 times as fast in tiles at batch 64, 0.9 at batch 10
    assert chosen((64, 32, 32, 3), lenets_first) == {"auto", "winograd"}
    assert chosen((10, 32, 32, 3), lenets_first) == {"auto", "gemm"}


def test_all_rows_at_once():
    """Where a row has few columns, or reads matrices that no cache holds; in bounded memory."""
    assert winograd._at_once(32, 15, (6, 48, 16))
    assert winograd._at_once(4, 20, (6, 1536, 512))
    assert not winograd._at_once(32, 160, (6, 192, 64))
    assert not winograd._at_once(4, 520, (6, 1536, 512))
    assert not winograd._at_once(112, 56, (6, 1536, 512))


def test_tiles_take_the_fewest_products():
    for num_outputs in range(1, 20):
        for width in range(1, 12):
            tile = winograd.best_tile(num_outputs, width)
            assert tile == 0 or (2 <= tile <= 4 and tile + width - 1 <= 8)
            fewest = num_outputs * width
            for other in range(2, min(4, 9 - width) + 1):
                fewest = min(fewest, -(-num_outputs // other) * (other + width - 1))
            ours = -(-num_outputs // tile) * (tile + width - 1) if tile else num_outputs * width
            assert ours == fewest


def test_what_it_cannot_do_is_named():
    x, kernel = jnp.ones((2, 9, 9, 3)), jnp.ones((3, 3, 3, 2))
    bad = [
        (x, kernel, 2, "a stride of 2 along W"),
        (x, jnp.ones((3, 1, 3, 2)), 1, "kernels of 1 columns"),
        (x, jnp.ones((3, 8, 3, 2)), 1, "kernels of 8 columns"),
        (x[:, :, :3], kernel, 1, "rows of 1 outputs"),
        (x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), 1, "bfloat16; it takes"),
    ]
    for x, kernel, stride, words in bad:
        with pytest.raises(ValueError, match=words):
            convolution(x, kernel, stride=stride, lowering="winograd")
