"""The projection onto a cone against scipy's NNLS in float64 and against its KKT conditions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from fedjax_lab.machine.target import named, tracing_for
from fedjax_lab.qp import gram, inner_products, project_to_cone, project_to_cone_per_leaf
from fedjax_lab.qp.joined_leaves import are_small
from tests.tiers import few

TOLERANCE = 1e-5  # of the data's scale, in float32
SOLVERS = ("active_set", "projected_gradient")
_solve = jax.jit(project_to_cone, static_argnames="solver")
_solve_many = {
    solver: jax.jit(jax.vmap(partial(project_to_cone, solver=solver)))
    for solver in ("auto", *SOLVERS)
}
_solve_known = jax.jit(lambda p, rows, products: project_to_cone(p, rows, products=products))


def solve(p, rows, mask=None, margin=0.0, solver="auto"):
    """One program per shape and solver, whatever the options."""
    mask = np.ones(len(rows), bool) if mask is None else mask
    return _solve(p, rows, mask, margin, solver=solver)


def solve_many(p, rows, solver="auto"):
    """In NumPy, so that to take one of many compiles nothing."""
    return jax.tree.map(np.asarray, _solve_many[solver](p, rows))


def unit(rows):
    rows = np.asarray(rows, np.float64)
    norms = np.linalg.norm(rows, axis=1)
    return rows / np.where(norms > 0, norms, 1)[:, None], norms


def oracle(p, rows, margin=0.0):
    """q in float64: min_{z>=0} ||M z + p||; a margin moves into one more coordinate."""
    p = np.asarray(p, np.float64)
    size = np.linalg.norm(p) or 1.0
    units, norms = unit(rows)
    units = units[norms > 0]
    if not len(units):
        return p
    # <q, u> >= margin: find q0 with <q0, u> = margin for all c, and project p - q0 onto the cone.
    shift = np.linalg.lstsq(units, np.full(len(units), margin), rcond=None)[0] if margin else 0.0
    if margin:
        np.testing.assert_allclose(units @ shift, margin)
    target = p / size - shift
    z, _ = nnls(units.T, -target, maxiter=1000 + 100 * len(units))
    return size * (shift + target + z @ units)


def kkt(p, rows, q, z, margin=0.0):
    """max(-y, -s, y |s| / max(1, max y)) over the nonzero rows, in float64; see ConeInfo."""
    units, norms = unit(rows)
    size = np.linalg.norm(np.asarray(p, np.float64)) or 1.0
    s = (units @ (np.asarray(q, np.float64) / size) - margin)[norms > 0]
    y = (np.asarray(z, np.float64) * norms / size)[norms > 0]
    return max([0.0, *-y, *-s, *(y * abs(s) / max([1.0, *y]))])


def check(p, rows, q, info, tolerance=TOLERANCE):
    size = np.linalg.norm(np.asarray(p, np.float64)) or 1.0
    assert np.linalg.norm(np.asarray(q, np.float64) - oracle(p, rows)) <= tolerance * size
    measured = kkt(p, rows, q, info.z)
    assert measured <= tolerance
    np.testing.assert_allclose(float(info.kkt_residual), measured, atol=tolerance / 10)
    assert bool(info.feasible)
    assert (np.asarray(info.z) >= 0).all()
    assert info.iterations.dtype == jnp.int32


def draw(seed, c, d, kind):
    """One problem (p [d], rows [C, d]) in float32."""
    rng = np.random.default_rng(seed)
    p, rows = rng.normal(size=d), rng.normal(size=(c, d))
    if kind == "conflicting":
        rows -= 0.3 * p
    elif kind == "correlated":
        rows += 3 * (rng.normal(size=d) - 0.5 * p)
    elif kind == "duplicate":
        rows[c // 2 :] = rows[: c - c // 2]
    elif kind == "parallel":
        rows[c // 2 :] = 1e-3 * rows[: c - c // 2]
    elif kind == "opposed":
        rows[c // 2 :] = -rows[: c - c // 2]
    elif kind == "zero":
        rows[::2] = 0
    elif kind == "mixed scales":
        rows *= 10.0 ** rng.integers(-20, 16, size=(c, 1))
    elif kind.startswith("spread"):
        noise = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        rows = -p / np.linalg.norm(p) + float(kind.split()[1]) * noise
    return p.astype(np.float32), rows.astype(np.float32)


KINDS = ("random", "conflicting", "correlated", "duplicate", "parallel", "opposed", "zero")
KINDS += ("mixed scales", "spread 0.3", "spread 0.1", "spread 0.01")


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 1), (3, 30), (8, 30)]),
    kind=st.sampled_from(KINDS),
    exponent=st.integers(-20, 15),
)
@pytest.mark.parametrize("solver", SOLVERS)
def test_agrees_with_nnls(solver, seed, shape, kind, exponent):
    p, rows = draw(seed, *shape, kind)
    p = (p * 10.0**exponent).astype(np.float32)
    check(p, rows, *solve(p, rows, solver=solver))


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS[:-1]))
@pytest.mark.parametrize("solver", SOLVERS)
def test_more_rows_than_dimensions(solver, seed, kind):
    p, rows = draw(seed, 20, 8, kind)
    check(p, rows, *solve(p, rows, solver=solver))


# Two blocks of a sum; many rows.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("c", "d"),
    few(1, [(3, 20_000), (100, 2000)]),
)
@pytest.mark.parametrize("solver", SOLVERS)
def test_vmap_agrees_with_nnls(solver, kind, c, d):
    problems = [draw(seed, c, d, kind) for seed in range(3)]
    p, rows = (np.stack(part) for part in zip(*problems, strict=True))
    q, info = solve_many(p, rows, solver)
    for i in range(3):  # how a CPU adds up 2000 products in float32 decides the last digits
        check(p[i], rows[i], q[i], jax.tree.map(lambda leaf, i=i: leaf[i], info), 2 * TOLERANCE)


@pytest.mark.parametrize("kind", [*KINDS[:-1], "spread 0.03"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_many_rows_in_few_dimensions(solver, kind):
    p, rows = draw(0, 100, 50, kind)
    check(p, rows, *solve(p, rows, solver=solver))


E1 = np.array([1, 0, 0], np.float32)
ROWS = np.array([[1, 0, 0], [0, 1, 0]], np.float32)


@pytest.mark.parametrize(
    ("p", "rows", "expected"),
    [
        (E1, np.zeros((0, 3)), E1),  # no rows
        (E1, np.zeros((2, 3)), E1),  # only zero rows
        (0 * E1, -ROWS, 0 * E1),  # p = 0
        (-0.1 * E1, -ROWS, -0.1 * E1),  # feasible
        (-E1, [E1, 0 * E1], 0 * E1),  # a zero row among others
        (-E1, [E1, E1, E1], 0 * E1),  # duplicates
        (-E1, [E1, 1e-3 * E1, 1e3 * E1], 0 * E1),  # parallel rows
        (E1, [E1, -E1], 0 * E1),  # contradicting rows leave the plane between them
        ([1, 2, 3], [[0, 1, 0], [0, -1, 0]], [1, 0, 3]),
        ([-1, -2, -3], np.eye(3), [0, 0, 0]),
        ([-1, -2, -3], np.concatenate([np.eye(3), -np.eye(3)]), [0, 0, 0]),  # C > d
        ([-3, 1, 2], [[1, 1, 0]], [-2, 2, 2]),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e15])
@pytest.mark.parametrize("row_scale", [1.0, 1e-20, 1e15])
@pytest.mark.parametrize("solver", SOLVERS)
def test_degenerate_cases(solver, p, rows, expected, scale, row_scale):
    p = np.asarray(p, np.float32) * np.float32(scale)
    rows = np.asarray(rows, np.float32) * np.float32(row_scale)
    if len(rows):
        rows = np.concatenate([rows, np.zeros((6 - len(rows), 3), np.float32)])
    q, info = solve(p, rows, solver=solver)
    np.testing.assert_allclose(q / np.float32(scale), expected, atol=1e-6)
    assert info.z.shape == (len(rows),)
    assert kkt(p, rows, q, info.z) <= 1e-6 if len(rows) else info.kkt_residual == 0
    assert bool(info.feasible)
    if np.array_equal(np.asarray(expected, np.float32) * np.float32(scale), p):
        assert np.asarray(q).tobytes() == p.tobytes()
        assert int(info.iterations) == 0
        assert not np.asarray(info.z).any()


def test_a_feasible_p_comes_back_bit_for_bit_beside_infeasible_lanes():
    p, rows = draw(0, 100, 2000, "conflicting")
    feasible_rows = rows * np.where(rows @ p < 0, -1, 1)[:, None].astype(np.float32)
    q, info = solve_many(np.stack([p, p, p]), np.stack([rows, feasible_rows, rows]))
    assert q[1].tobytes() == p.tobytes()
    assert info.iterations[1] == 0
    assert not info.z[1].any()
    for i in (0, 2):
        check(p, rows, q[i], jax.tree.map(lambda leaf, i=i: leaf[i], info))


def test_masked_rows_are_no_constraints():
    p, rows = draw(1, 8, 30, "conflicting")
    mask = np.array([True, False, True, False, False, True, True, False])
    q, info = solve(p, rows, mask)
    np.testing.assert_allclose(q, oracle(p, rows[mask]), atol=TOLERANCE * np.linalg.norm(p))
    assert not np.asarray(info.z)[~mask].any()
    q, info = solve(p, rows, np.zeros(8, bool))
    assert np.asarray(q).tobytes() == p.tobytes()


def test_a_pytree_is_one_long_vector():
    p, rows = draw(2, 7, 60, "conflicting")
    tree = {"a": p[:12].reshape(3, 4), "b": (p[12], p[13:13], p[13:])}
    row_tree = {
        "a": rows[:, :12].reshape(7, 3, 4),
        "b": (rows[:, 12], rows[:, 13:13], rows[:, 13:]),
    }
    q, info = _solve(tree, row_tree)
    assert jax.tree.structure(q) == jax.tree.structure(tree)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(q)])
    check(p, rows, flat, info)


def test_small_leaves_add_no_products_to_a_program():
    def products(leaves):
        p = [jnp.zeros((5, 3)) for _ in range(leaves)]
        rows = [jnp.zeros((3, 5, 3)) for _ in range(leaves)]
        return jax.jit(project_to_cone).lower(p, rows).as_text().count("dot_general")

    assert products(9) == products(1)


def test_leaves_too_many_or_too_large_to_be_copied_stay_alone():
    sizes = (2**15, 2**15 + 1, 10, 2**15, 2**15, 2**15, 2**15 - 10)
    leaves = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
    leaves.append(jax.ShapeDtypeStruct((7,), jnp.bfloat16))
    # Leaf 1 is too large, and with leaf 5 or 7 the joined ones would exceed 2**17.
    small = [0, 2, 3, 4, 6]
    assert are_small(leaves) == [index in small for index in range(8)]
    assert sum(sizes[index] for index in small) == 2**17
    assert not are_small(leaves, divided=[index == 2 for index in range(8)])[2]


def test_per_leaf_projects_every_leaf_alone():
    p, rows = draw(3, 4, 50, "conflicting")
    tree, row_tree = {"a": p[:20], "b": p[20:]}, {"a": rows[:, :20], "b": rows[:, 20:]}
    q, info = jax.tree.map(np.asarray, jax.jit(project_to_cone_per_leaf)(tree, row_tree))
    assert info.z.shape == (2, 4)
    assert info.iterations >= 2
    for i, name in enumerate(tree):
        alone = info._replace(z=info.z[i])
        check(tree[name], row_tree[name], q[name], alone)
    worst = max(kkt(tree[name], row_tree[name], q[name], info.z[i]) for i, name in enumerate(tree))
    np.testing.assert_allclose(info.kkt_residual, worst, atol=TOLERANCE / 10)


def test_inner_products_of_every_leaf():
    p, rows = draw(3, 9, 40_000, "random")
    none = np.zeros((1, 0, 3), np.float32)
    tree = {"a": p[None, :20].reshape(1, 4, 5), "b": p[None, 20:], "none": none}
    row_tree = {"a": rows[:, :20].reshape(9, 4, 5), "b": rows[:, 20:], "none": none.repeat(9, 0)}
    some = jax.tree.map(lambda leaf: leaf[:2], row_tree)
    products = jax.jit(inner_products)(row_tree, some, tree)
    right = np.concatenate([rows[:2], p[None]]).astype(np.float64)
    expected = [rows[:, :20] @ right[:, :20].T, rows[:, 20:] @ right[:, 20:].T, np.zeros((9, 3))]
    np.testing.assert_allclose(products, expected, atol=1e-6 * np.square(rows).sum(1).max())


# Primes: the last block overlaps.
@pytest.mark.parametrize("shape", [(811, 41), pytest.param((20_011,), marks=pytest.mark.methods)])
@pytest.mark.parametrize("row_scale", [1.0, 1e-20])
def test_blocks_that_do_not_divide_a_leaf(shape, row_scale):
    p, rows = draw(6, 9, np.prod(shape), "conflicting")
    rows *= np.float32(row_scale)
    products = jax.jit(inner_products)(rows.reshape(9, *shape), p.reshape(1, *shape))
    exact = rows.astype(np.float64) @ p.astype(np.float64)
    sizes = np.linalg.norm(rows.astype(np.float64), axis=1) * np.linalg.norm(p)
    np.testing.assert_allclose(products[0, :, 0] / sizes, exact / sizes, atol=1e-6)
    q, info = _solve(p.reshape(shape), rows.reshape(9, *shape))
    check(p, rows, np.ravel(q), info)


@pytest.mark.parametrize(
    ("target", "count"),
    few(2, [("v5e", 4), ("h100", 12), ("v5e", 12), ("h100", 4)]),
)
def test_accelerators_project_as_a_cpu_does(x64, target, count):
    """In float64, because a CPU adds the numbers of their sums one by one, which costs digits."""
    p, rows = (part.astype(np.float64) for part in draw(6, count, 811 * 41, "conflicting"))
    p, rows = p.reshape(811, 41), rows.reshape(count, 811, 41)
    expected, info = _solve(p, rows)
    with tracing_for(named(target)):
        jaxpr = str(jax.make_jaxpr(lambda: inner_products(rows, p[None]))())
        found, on_target = jax.jit(lambda: project_to_cone(p, rows))()
    assert ("while" in jaxpr or "scan" in jaxpr) == (target != "h100")
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert on_target.iterations == info.iterations


def test_what_accelerators_compute_instead_of_one_matrix_product():
    _, rows = draw(7, 9, 300, "random")
    blocks, weights = rows.reshape(9, 20, 15), np.linspace(-1, 1, 9, dtype=np.float32)
    exact = rows.astype(np.float64) @ rows[:4].astype(np.float64).T
    np.testing.assert_allclose(gram.sums_of_products(blocks, blocks[:4]), exact, atol=1e-3)
    flat = blocks.reshape(len(blocks), -1).astype(np.float64)
    scale = np.float32(2) ** np.arange(-4, 5)
    scaled = flat * scale[:, None]
    for parts in ([blocks], [blocks[:-1], blocks[-1]], [*blocks]):  # the rows and p
        for target in ("cpu", "v5e", "h100"):
            with tracing_for(named(target)):
                (found, largest), product = jax.jit(
                    lambda parts: (
                        gram._square(parts, scale, axes=2),
                        gram._times(parts, [blocks[:3], blocks[3]], axes=2),
                    )
                )(parts)
            bound = 1e-6 * np.outer(scale, scale) * (flat**2).sum(1).max()
            assert (abs(found - scaled @ scaled.T) <= bound).all()
            np.testing.assert_array_equal(largest, abs(scaled).max(1))
            np.testing.assert_allclose(product, flat @ flat[:4].T, atol=1e-3)
    parts = gram.product_of_parts(blocks, blocks[:4])
    np.testing.assert_allclose(parts, exact, atol=1e-6 * exact.max())
    combined = (weights.astype(np.float64) @ rows).reshape(20, 15)
    np.testing.assert_allclose(gram._weighted_sum(weights, blocks), combined, atol=1e-5)


@pytest.mark.parametrize(("count", "size"), [(12, 40_000), (9, 2**18 + 3)])
def test_products_of_blocks_at_once(count, size):
    rows, columns = np.random.default_rng(0).standard_normal((2, count, size)).astype(np.float32)
    exact = rows.astype(np.float64) @ columns.astype(np.float64).T
    found = jax.jit(gram.product_of_blocks)(rows, columns)
    np.testing.assert_allclose(found, exact, atol=1e-6 * size)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e30])
def test_three_parts_of_bfloat16_hold_all_digits(scale):
    rows = np.random.default_rng(0).standard_normal((7, 50)).astype(np.float32) * np.float32(scale)
    parts = np.asarray(jax.jit(gram._in_bfloat16)(rows)).astype(np.float64).reshape(3, 7, 50)
    np.testing.assert_array_equal(parts.sum(0), rows.astype(np.float64))


@pytest.mark.parametrize("row_scale", [1.0, 1e-20])  # at 1e-20 the given squares are all 0
def test_known_products(row_scale):
    p, rows = draw(4, 8, 50, "conflicting")
    rows *= np.float32(row_scale)
    products = (rows @ rows.T, rows @ p)
    check(p, rows, *_solve_known(p, rows, products))


@pytest.mark.parametrize("seed", range(4))
def test_all_products_known(seed):
    p, rows = draw(seed, 8, 50, "conflicting")
    check(p, rows, *_solve_known(p, rows, (rows @ rows.T, rows @ p, p @ p)))


@pytest.mark.parametrize(("scale", "row_scale"), [(1, 1e-12), (1, 1e12), (1e-12, 1), (1e12, 1)])
def test_all_products_known_near_the_limits_are_not_feasible(scale, row_scale):
    p, rows = draw(4, 8, 50, "conflicting")
    p, rows = p * np.float32(scale), rows * np.float32(row_scale)
    _, info = _solve_known(p, rows, (rows @ rows.T, rows @ p, p @ p))
    assert not info.feasible


def test_all_products_known_may_be_of_zeros():
    rows = np.array([[0, 0], [0, 1]], np.float32)
    for p in (np.zeros(2, np.float32), np.array([1, -1], np.float32)):
        q, info = _solve_known(p, rows, (rows @ rows.T, rows @ p, p @ p))
        np.testing.assert_allclose(q, np.maximum(p, 0), atol=1e-6)
        assert info.feasible


def test_known_products_are_not_computed_again():
    p, rows = draw(4, 8, 50, "conflicting")
    products = np.eye(8, dtype=np.float32), np.ones(8, np.float32)  # as if p were feasible
    q, _ = _solve_known(p, rows, products)
    assert np.asarray(q).tobytes() == p.tobytes()


@pytest.mark.parametrize("with_square", [False, True])
def test_known_products_of_every_leaf(with_square):
    p, rows = draw(3, 4, 50, "conflicting")
    tree, row_tree = {"a": p[:20], "b": p[20:]}, {"a": rows[:, :20], "b": rows[:, 20:]}

    @jax.jit
    def run(tree, row_tree):
        with_rows = inner_products(row_tree, row_tree)
        with_p = inner_products(row_tree, jax.tree.map(lambda leaf: leaf[None], tree))[..., 0]
        squares = jnp.stack([jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)])
        products = with_rows, with_p, squares
        return project_to_cone_per_leaf(tree, row_tree, products=products[: 2 + with_square])

    q, info = jax.tree.map(np.asarray, run(tree, row_tree))
    for i, name in enumerate(tree):
        check(tree[name], row_tree[name], q[name], info._replace(z=info.z[i]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_float64(solver, kind):
    with jax.enable_x64(True):
        p, rows = (part.astype(np.float64) for part in draw(4, 8, 30, kind))
        q, info = solve(p, rows, solver=solver)
        assert q.dtype == info.z.dtype == jnp.float64
        check(p, rows, q, info, tolerance=1e-11)


def test_low_precision_leaves_keep_their_dtype():
    p, rows = draw(5, 3, 30, "conflicting")
    q, info = solve(p.astype(jnp.bfloat16), rows)
    assert q.dtype == jnp.bfloat16
    assert info.z.dtype == jnp.float32


def test_scan_and_pmap():
    problems = [draw(seed, 3, 30, "conflicting") for seed in range(jax.local_device_count())]
    p, rows = (np.stack(part) for part in zip(*problems, strict=True))
    scanned = jax.jit(partial(jax.lax.map, lambda xs: project_to_cone(*xs)))((p, rows))
    for q, info in jax.tree.map(np.asarray, [scanned, jax.pmap(project_to_cone)(p, rows)]):
        for i in range(len(p)):
            check(p[i], rows[i], q[i], jax.tree.map(lambda leaf, i=i: leaf[i], info))


@pytest.mark.parametrize("margin", [0.01, 0.3])
@pytest.mark.parametrize("solver", SOLVERS)
def test_margin(solver, margin):
    p, rows = draw(6, 8, 30, "conflicting")
    rows[3] = 0  # no constraint, also with a margin
    q, info = solve(p, rows, margin=margin, solver=solver)
    size = np.linalg.norm(p)
    np.testing.assert_allclose(q, oracle(p, rows, margin), atol=TOLERANCE * size)
    assert kkt(p, rows, q, info.z, margin) <= TOLERANCE
    assert info.z[3] == 0
    assert bool(info.feasible)


@pytest.mark.parametrize("margin", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("c", [3, 8])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_margin_that_nothing_satisfies(solver, margin, c):
    p, rows = draw(7, c, 30, "opposed")
    q, info = solve(p, rows, margin=margin, solver=solver)
    assert np.isfinite(q).all()
    assert np.isfinite(info.z).all()
    assert not bool(info.feasible)
    assert float(info.kkt_residual) >= margin / 2
    assert int(info.iterations) <= 2000


@pytest.mark.parametrize("solver", SOLVERS)
def test_not_finite_is_not_feasible(solver):
    p, rows = draw(8, 3, 30, "random")
    for bad in (np.nan, np.inf):
        broken = np.where(p > 1, np.float32(bad), p)
        assert not bool(solve(broken, rows, solver=solver)[1].feasible)
        info = solve(p, np.where(rows > 1, np.float32(bad), rows), solver=solver)[1]
        assert not bool(info.feasible)
        assert int(info.iterations) < 20  # other lanes of a vmap would wait


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_cap_holds(solver):
    p, rows = draw(9, 20, 8, "conflicting")
    q, info = jax.jit(partial(project_to_cone, max_iterations=5, solver=solver))(p, rows)
    assert int(info.iterations) == 5
    assert np.isfinite(q).all()


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "structure", ({"a": E1}, {"b": ROWS})),
        (ValueError, "no leaves", ({}, {})),
        (ValueError, "shape", (E1, ROWS[:, :2])),
        (ValueError, "shape", ({"a": E1, "b": E1}, {"a": ROWS, "b": ROWS[:1]})),
        (ValueError, "shape", (np.float32(1), np.float32(1))),
        (TypeError, "floating", (np.arange(3), np.ones((2, 3), int))),
        (TypeError, "bool", (E1, ROWS, np.ones(2))),
        (ValueError, "mask", (E1, ROWS, np.ones(3, bool))),
        (ValueError, "margin", (E1, ROWS, None, -1.0)),
    ],
)
@pytest.mark.parametrize("function", [project_to_cone, project_to_cone_per_leaf])
def test_errors(function, error, message, arguments):
    with pytest.raises(error, match=message):
        function(*arguments)


def test_option_errors():
    with pytest.raises(ValueError, match="max_iterations"):
        project_to_cone(E1, ROWS, max_iterations=-1)
    with pytest.raises(ValueError, match="tolerance"):
        project_to_cone(E1, ROWS, tolerance=-1.0)
    with pytest.raises(ValueError, match="solver is 'active'"):
        project_to_cone(E1, ROWS, solver="active")
    with pytest.raises(ValueError, match="products"):
        project_to_cone(E1, ROWS, products=(np.eye(3), np.ones(2)))
    with pytest.raises(ValueError, match="products"):
        project_to_cone_per_leaf(E1, ROWS, products=(np.eye(2), np.ones(2)))


def rows_of_a_repeated_batch(seed, spread):
    """GradMA's local rows where all steps see the same examples: the way so far opposes them."""
    rng = np.random.default_rng(seed)
    gradient, noise, around = rng.normal(size=(3, 1000))
    before, share = gradient + spread * noise, rng.uniform()
    rows = [gradient, before, -0.1 * (share * gradient + (1 - share) * before)]
    return (gradient + 0.1 * around).astype(np.float32), np.float32(rows)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.1, 0.3])
def test_rows_that_contradict_each_other_to_rounding(spread):
    problems = [rows_of_a_repeated_batch(seed, spread) for seed in range(200)]
    q, info = solve_many(*(np.stack(part) for part in zip(*problems, strict=True)))
    assert info.feasible.all()
    for i, (p, rows) in enumerate(problems):
        assert kkt(p, rows, q[i], info.z[i]) <= TOLERANCE
        # What float32 makes of the rows decides a direction of its own, of little of p.
        span = np.linalg.qr(rows[:2].T.astype(np.float64))[0]
        left = np.linalg.norm(p - span @ (span.T @ p.astype(np.float64)))
        assert np.linalg.norm(oracle(p, rows)) - 1e-3 <= np.linalg.norm(q[i]) <= 1.01 * left


def rows_of_one_line(seed, count, shape, spread, against, opposed):
    """Problems whose rows are one direction and ``spread`` of noise, the first ones opposed."""
    rng = np.random.default_rng(seed)
    p, line = rng.normal(size=(2, count, 1, shape[1]))
    line -= against * p
    noise = rng.normal(size=(count, *shape))
    noise /= np.linalg.norm(noise, axis=2, keepdims=True)
    rows = line / np.linalg.norm(line, axis=2, keepdims=True) + spread * noise
    rows[:, :opposed] *= -1
    rows *= 10 ** rng.uniform(-2, 2, size=(count, shape[0], 1))
    return np.float32(p[:, 0]), np.float32(rows)


@pytest.mark.parametrize("against", few(1, [2.0, 0.5, 10.0]))
def test_rows_parallel_to_within_a_thousandth(against):
    p, rows = rows_of_one_line(1, 60, (3, 10_000), 1e-3, against, opposed=0)
    q, info = solve_many(p, rows)
    for i in range(len(p)):
        check(p[i], rows[i], q[i], jax.tree.map(lambda leaf, i=i: leaf[i], info))


@pytest.mark.parametrize("spread", few(1, [1e-4, 1e-3, 1e-5]))
def test_opposed_rows_are_solved_or_flagged_without_a_margin(spread):
    p, rows = rows_of_one_line(1, 60, (8, 2000), spread, 0.0, opposed=2)
    q, info = solve_many(p, rows)
    assert info.feasible.all()  # some q always is, and this one is no longer than p
    assert (np.linalg.norm(q, axis=1) <= np.linalg.norm(p, axis=1) * (1 + 1e-6)).all()
    measured = [kkt(p[i], rows[i], q[i], info.z[i]) for i in range(len(p))]
    np.testing.assert_allclose(info.kkt_residual, measured, rtol=1e-2, atol=1e-6)
    assert max(measured) <= 2e-2
    assert np.median(measured) <= 1e-5
