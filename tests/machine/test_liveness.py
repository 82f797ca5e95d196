"""What is alive at once in a traced program."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_lab.machine.liveness import _carried, count_large, peak_bytes, tiled_bytes

KIB = 1024


def _two_readers_of_a_sum(x):
    total = jnp.cumsum(x) + 1  # what the two read is made of cumsum(x) twice
    return jnp.cumsum(total * 2 + total * total)


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        (lambda x: x + 1, [1], 2),  # x and the result
        (lambda x: ((x + 1) * 2) - 3, [1], 2),  # one kernel
        (lambda x: jnp.cumsum(jnp.cumsum(jnp.cumsum(x))), [1], 3),  # x stays; two successors meet
        (lambda x: jnp.cumsum(x) + jnp.cumsum(x + 1), [1], 4),  # x, x + 1 or the sum, two parts
        (_two_readers_of_a_sum, [1], 3),
        (lambda x: (x[:, None] * x[None]).sum(-1), [8], 8),  # 512 products, never stored
        (lambda x, y: x * y, [1, 1], 3),
        (lambda x: jax.lax.fori_loop(0, 5, lambda i, y: y * 2, x), [1], 2),
        # a loop holds what it makes of one row
        (lambda x: jax.lax.map(lambda row: (row + 1) * 2, x), [4], 8),
    ],
)
def test_peak_bytes_counts_what_lives_at_once(program, arguments, expected):
    shapes = [jax.ShapeDtypeStruct((n, KIB // 4), jnp.float32) for n in arguments]
    shapes = [s if s.shape[0] > 1 else jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in shapes]
    found = peak_bytes(jax.make_jaxpr(program)(*shapes), "gpu")
    assert expected * KIB <= found <= (expected + 1) * KIB + 64


def test_what_a_scan_carries_is_told_from_constants_and_what_it_goes_over():
    def program(table, scale, total, count, rows, gate):
        def step(carry, row):
            total, count = carry
            return (total + scale * row @ table, count + 1), total.sum() * gate

        (total, count), sums = jax.lax.scan(step, (total, count), rows)
        return total, count, sums

    shapes = [(3, 3), (), (3,), (), (5, 3), ()]
    traced = jax.make_jaxpr(program)(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]).jaxpr
    (scan,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "scan")
    assert [scan.invars[i] for i in _carried(scan)] == traced.invars[2:4]


def test_what_two_read_is_stored_where_it_is_not_computed_twice():
    def program(x):
        y = jnp.concatenate([x, x])
        z = y + 1
        return (jnp.sort(y) * z).sum() + (z * z).sum()

    traced = jax.make_jaxpr(program)(jax.ShapeDtypeStruct((KIB // 4,), jnp.float32))
    stored = peak_bytes(traced) - peak_bytes(traced, "gpu")
    assert stored == pytest.approx(2 * KIB, abs=8)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8, 128), "float32", 8 * 128 * 4),
        ((8, 5, 250), "float32", 8 * 5 * 256 * 4),
        ((64, 28, 28, 3), "float32", 32 * 28 * 3 * 128 * 4),  # B as lanes, H as rows
        ((128, 16, 8, 8, 64), "float32", 128 * 16 * 8 * 8 * 128 * 4),  # 128 clients
        ((8, 128), "bfloat16", 16 * 128 * 2),
        ((8, 128), "uint8", 32 * 128),
        ((5,), "float32", 20),
        ((), "float32", 4),
        ((0, 3), "float32", 0),
    ],
)
def test_a_tpu_pads_the_two_axes_where_it_costs_least(shape, dtype, expected):
    jaxpr = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(shape, dtype)).jaxpr
    assert tiled_bytes(jaxpr.invars[0]) == expected


def test_an_update_of_what_is_donated_is_made_in_place():
    def program(table, rows):
        return table.at[jnp.array([3, 5])].set(rows * 2)

    shapes = [jax.ShapeDtypeStruct((n, KIB // 4), jnp.float32) for n in (64, 2)]
    traced = jax.make_jaxpr(program)(*shapes)
    in_place, copied = peak_bytes(traced, donated=1), peak_bytes(traced)
    assert copied - in_place == 64 * KIB  # the second table
    assert 64 * KIB < in_place < 70 * KIB


def test_a_tpu_computes_products_where_they_are_added():
    def step(weights, x, y):
        return weights - 0.1 * (x @ y).T

    shapes = [(1024, 128), (128, 256), (256, 1024)]  # tiles without padding
    traced = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    arguments, result = (1024 * 128 + 128 * 256 + 256 * 1024) * 4, 1024 * 128 * 4
    assert peak_bytes(traced, "tpu") == pytest.approx(arguments + result, abs=64)
    assert peak_bytes(traced) >= arguments + 2 * result


def _steps(weights, examples):
    """Three steps, each of which uses a scratch value of 64 KiB and the weights' 4 KiB."""

    def step(weights, example):
        scratch = jnp.cumsum(jnp.broadcast_to(example, (16, 8, 128)), 0)
        return weights - jnp.cumsum(scratch, 1)[-1], None

    return jax.lax.scan(step, weights * 2, examples)[0]


def test_what_a_loop_carries_is_there_once_on_a_tpu_and_its_first_value_besides_on_a_gpu():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 128), (3, 8, 128))]
    traced = jax.make_jaxpr(_steps)(*shapes)
    arguments, weights, scratch = 16 * KIB, 4 * KIB, 2 * 64 * KIB
    assert peak_bytes(traced, "tpu") == pytest.approx(arguments + weights + scratch, abs=4 * KIB)
    more = peak_bytes(traced, "gpu") - peak_bytes(traced, "tpu")
    assert more == pytest.approx(weights, abs=64)


def test_what_a_step_makes_may_lie_in_a_memory_of_its_own():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 128), (3, 8, 128))]
    traced = jax.make_jaxpr(_steps)(*shapes)
    whole = peak_bytes(traced, "tpu")
    assert peak_bytes(traced, "tpu", near_bytes=10 * KIB) == whole - 10 * KIB
    least = peak_bytes(traced, "tpu", near_bytes=KIB**2)
    assert 20 * KIB <= least <= 28 * KIB  # arguments and results


def test_a_choice_between_a_value_and_itself_is_that_value():
    def program(x, p):
        y = jnp.cumsum(x)
        return jnp.cumsum(jax.lax.select(p, y, jax.lax.stop_gradient(y))) + jnp.cumsum(y)

    shapes = jax.ShapeDtypeStruct((KIB // 4,), jnp.float32), jax.ShapeDtypeStruct((), bool)
    plain = jax.make_jaxpr(lambda x: jnp.cumsum(jnp.cumsum(x)) + jnp.cumsum(jnp.cumsum(x)))
    assert peak_bytes(jax.make_jaxpr(program)(*shapes)) <= peak_bytes(plain(shapes[0])) + 1


def test_axes_that_a_reshape_parts_do_not_lie_side_by_side_in_a_tpus_tiles():
    def program(x):
        y = jnp.cumsum(x, 0)  # [64, 4 * 32]: 4 clients' channels
        return jnp.cumsum(y.reshape(64, 4, 32), 0).sum()

    traced = jax.make_jaxpr(program)(jax.ShapeDtypeStruct((64, 128), jnp.float32))
    apart = 2 * 64 * 4 * 32 * 4  # 64 rows as 128 lanes
    assert peak_bytes(traced, "tpu") == pytest.approx(64 * 128 * 4 + 2 * apart, abs=64)


def test_only_the_branch_for_the_platform_counts():
    def small(x):
        return x.sum()

    def large(x):
        return jnp.cumsum(jnp.stack([jnp.cumsum(x)] * 64), 0).sum()

    def program(x):
        return jax.lax.platform_dependent(x, tpu=small, default=large)

    traced = jax.make_jaxpr(program)(jax.ShapeDtypeStruct((8, 128), jnp.float32))
    assert peak_bytes(traced, "tpu") < 5 * KIB
    assert peak_bytes(traced, "gpu") > 2 * 64 * 4 * KIB


def test_a_table_that_a_loop_reads_is_copied_on_a_tpu_unless_its_axes_lie_in_their_order():
    def program(table):
        def add(i, total):
            return total + jax.lax.dynamic_slice_in_dim(table, i, 1, axis=1).sum((0, 1))

        return jax.lax.fori_loop(0, table.shape[1], add, jnp.zeros(table.shape[2]))

    def peak(shape, platform="tpu"):
        traced = jax.make_jaxpr(program)(jax.ShapeDtypeStruct(shape, jnp.float32))
        return peak_bytes(traced, platform)

    # 784 as lanes are padded to 896, 200 to 256; the loop reads the latter
    assert peak((10, 784, 200)) == pytest.approx(10 * 200 * 896 * 4 + 10 * 784 * 256 * 4, rel=0.05)
    assert peak((10, 784, 200), "gpu") == pytest.approx(10 * 784 * 200 * 4, rel=0.05)
    assert peak((10, 784, 256)) == pytest.approx(10 * 784 * 256 * 4, rel=0.05)


def test_operations_are_counted_in_loops_and_functions_and_in_the_branch_for_the_platform():
    inner = jax.jit(lambda x: x * 2 + x.sum())  # a product, a sum of two, and a number

    def program(x):
        x, _ = jax.lax.scan(lambda y, _: (inner(y), None), x - 1, None, 3)
        return jax.lax.platform_dependent(x, tpu=jnp.cumsum, default=lambda x: x * x / 3)

    traced = jax.make_jaxpr(program)(jax.ShapeDtypeStruct((256,), jnp.float32))
    assert count_large(traced, "tpu") == 1 + 2 + 1
    assert count_large(traced, "gpu") == 1 + 2 + 2
    small = jax.make_jaxpr(program)(jax.ShapeDtypeStruct((4,), jnp.float32))
    assert count_large(small, "tpu") == 0
