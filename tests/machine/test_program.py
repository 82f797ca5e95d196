"""Compiled programs: bytes, loops and collectives against XLA's own analysis and by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from fedjax_lab import tree
from fedjax_lab.clients.finite import run_until_finite
from fedjax_lab.machine.arithmetic import count_flops
from fedjax_lab.machine.compiler import abstract, compile_for, figures, mesh_of, try_compile
from fedjax_lab.machine.program import read_traffic, shape_bytes
from fedjax_lab.machine.target import here


@pytest.mark.parametrize(
    ("type", "padded", "plain"),
    [
        ("f32[10,64]{1,0}", 2560, 2560),
        ("f32[10,64]{1,0:T(8,128)}", 4 * 16 * 128, 2560),
        ("f32[10,64]{0,1:T(8,128)}", 4 * 64 * 128, 2560),  # the layout decides what is padded
        ("bf16[7,64,300]{2,1,0:T(8,128)(2,1)S(1)}", 2 * 7 * 64 * 384, 2 * 7 * 64 * 300),
        ("f32[7]{0:T(128)}", 512, 28),
        ("(f32[2,3]{1,0}, /*index=1*/pred[5], s32[])", 24 + 5 + 4, 24 + 5 + 4),
        ("(u4[3], f8e4m3fn[3], token[])", 5, 5),
    ],
)
def test_sizes_of_types(type, padded, plain):
    assert shape_bytes(type) == padded
    assert shape_bytes(type, padded=False) == plain


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def step(w, x):
    return jnp.tanh(w @ x)


W, X = jnp.zeros((200, 200)), jnp.zeros((200, 300))


def test_without_a_loop_it_agrees_with_xlas_own_analysis():
    program = compiled(lambda w, x: step(w, step(w, x)).sum(1), W, X)
    assert read_traffic(program.as_text()).bytes_accessed == pytest.approx(
        program.cost_analysis()["bytes accessed"], rel=0.1
    )


@pytest.mark.parametrize("length", [3, 50])
def test_a_loop_counts_as_often_as_it_runs(length):
    def loop(w, x):
        return jax.lax.fori_loop(0, length, lambda i, x: step(w, x), x)

    once = read_traffic(compiled(step, W, X).as_text())
    many = read_traffic(compiled(loop, W, X).as_text())
    assert many.unknown_loops == 0
    # the program's own body, and a copy of what the loop carries
    assert many.bytes_accessed == pytest.approx(
        length * once.bytes_accessed, rel=0.1, abs=2.2 * X.nbytes
    )


def test_of_a_slice_only_what_is_read_counts():
    rows = jnp.zeros((1000, 300))

    def read_some(rows, starts):
        return jax.lax.map(lambda i: jax.lax.dynamic_slice_in_dim(rows, i, 2).sum(), starts)

    found = read_traffic(compiled(read_some, rows, jnp.arange(10)).as_text())
    assert found.bytes_accessed < rows.nbytes / 10


ASYNCHRONOUS = """
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %start = ((f32[8,128]{1,0}), f32[6,128]{1,0}, s32[]) slice-start(%x), slice={[0:6], [0:128]}
  %start.1 = ((f32[8,128]{1,0}), f32[2,128]{1,0}, s32[]) slice-start(%x), slice={[6:8], [0:128]}
  %done = f32[6,128]{1,0} slice-done(%start)
  %done.1 = f32[2,128]{1,0} slice-done(%start.1)
  ROOT %all = f32[8,128]{1,0} custom-call(%done, %done.1), custom_call_target="ConcatBitcast"
}
"""


def test_an_array_fetched_in_slices_is_read_and_written_once():
    assert read_traffic(ASYNCHRONOUS).bytes_accessed == 2 * 8 * 128 * 4


def test_a_loop_of_unknown_length_is_told():
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: x + 1, x)

    assert read_traffic(compiled(loop, jnp.zeros(3)).as_text()).unknown_loops == 1


def test_of_branches_the_largest_counts():
    def program(take, w, x):
        return jax.lax.cond(take, lambda x: step(w, x), lambda x: x, x)

    both = read_traffic(compiled(program, True, W, X).as_text()).bytes_accessed
    one = read_traffic(compiled(step, W, X).as_text()).bytes_accessed
    assert one <= both <= one + 2.2 * X.nbytes
    assert count_flops(jax.make_jaxpr(program)(True, W, X)) == 2 * 200 * 200 * 300


def test_a_cohort_that_is_finite_is_run_once():
    def round(w, x):
        return run_until_finite(lambda look: step(w, x) + look, tree.all_finite)

    found = read_traffic(compiled(round, W, X).as_text()).bytes_accessed
    one = read_traffic(compiled(step, W, X).as_text()).bytes_accessed
    assert one <= found <= one + 8 * X.nbytes  # what is looked at, and what the loop carries
    assert count_flops(jax.make_jaxpr(round)(W, X)) == 2 * 200 * 200 * 300


def test_collectives_are_counted_with_their_loops():
    devices = tuple(jax.devices()[:4])
    mesh = mesh_of(devices, "clients")

    def total(x):
        def body(i, x):
            return x + jax.lax.psum(x, "clients")

        return jax.lax.fori_loop(0, 5, body, x)

    spread = jax.shard_map(
        total, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    shape = abstract(jax.ShapeDtypeStruct((100,), jnp.float32), devices)
    found = figures(*compile_for(here(), jax.jit(spread), shape))
    assert [tuple(c) for c in found.collectives] == [("all-reduce", 5, 5 * 400)]
    assert found.arguments == 400


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        read_traffic("HloModule empty")


class Refuses:
    """A function whose compiler has not enough memory."""

    def __init__(self, message):
        self.message = message

    def trace(self, *arguments, **static):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "bytes"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory. Used 21.25G of 15.75G hbm.", 21.25 * 2**30),
        ("RESOURCE_EXHAUSTED: required for HLO temporaries (512.0M) exceeds", 2**29),
        ("RESOURCE_EXHAUSTED: and nothing else", 2**62),
    ],
)
def test_what_a_program_wants_that_does_not_fit(message, bytes):
    assert try_compile(here(), Refuses(message)) == (None, bytes)


def test_other_errors_of_a_compiler_are_the_callers():
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED"):
        try_compile(here(), Refuses("UNIMPLEMENTED: no such operation"))


def test_flops_of_products_and_convolutions():
    def program(x, kernel, w):
        def body(total, _):
            return total + (w @ w).sum(), None

        images = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.lax.scan(body, images.sum(), None, length=7)[0]

    shapes = [(2, 8, 8, 3), (5, 5, 3, 6), (10, 10)]
    jaxpr = jax.make_jaxpr(program)(*map(jnp.zeros, shapes))
    convolution = 2 * (2 * 4 * 4 * 6) * (5 * 5 * 3)
    assert count_flops(jaxpr) == convolution + 7 * 2 * 10**3

    def grouped(x, kernel):  # two groups: each output sees half of the channels
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=2
        )

    jaxpr = jax.make_jaxpr(grouped)(jnp.zeros((2, 8, 8, 4)), jnp.zeros((5, 5, 2, 6)))
    assert count_flops(jaxpr) == 2 * (2 * 4 * 4 * 6) * (5 * 5 * 2)
