"""Programs by their compilers: collectives counted by hand, and programs that do not fit."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from fedjax_lab import tree
from fedjax_lab.clients.finite import run_until_finite
from fedjax_lab.machine.compiler import (
    abstract,
    compile_for,
    figures,
    mesh_of,
    read_collectives,
    try_compile,
)
from fedjax_lab.machine.target import here


def figures_of(function):
    """Those of a function of 100 numbers, on four devices."""
    devices, whole = tuple(jax.devices()[:4]), PartitionSpec()
    mesh = mesh_of(devices, "clients")
    spread = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    shape = abstract(jax.ShapeDtypeStruct((100,), jnp.float32), devices)
    return figures(*compile_for(here(), jax.jit(spread), shape))


def test_collectives_are_counted_with_their_loops():
    def total(x):
        def body(i, x):
            return x + jax.lax.psum(x, "clients")

        return jax.lax.fori_loop(0, 5, body, x)

    found = figures_of(total)
    assert found.collectives == (("all-reduce", 5, 5 * 400),)
    assert found.arguments == 400


# A loop of five turns as a TPU's compiler writes it, a loop whose length depends on values, and
# collectives that start and end apart, whose types name the operands, too.
TEXT = """
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}
%five (p: (s32[], bf16[8])) -> pred[] {
  %end = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}
%until (p: (s32[], bf16[8])) -> pred[] {
  ROOT %less = pred[] compare(%x, %y), direction=GT
}
%body (p: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %x = bf16[8]{0:T(256)(2,1)} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
}
ENTRY %main (x: bf16[8]) -> bf16[8] {
  %a = (s32[], bf16[8]) while(%t), condition=%five, body=%body
  %b = (s32[], bf16[8]) while(%t), condition=%until, body=%body
  %c = ((f32[4]{0}, pred[3]{0}), (f32[8]{0}, pred[6]{0})) all-gather-start(%u, %v), dimensions={0}
  %d = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%u)
}
"""


def test_collectives_of_a_text_by_hand():
    assert read_collectives(TEXT) == (
        ("all-gather", 1, 8 * 4 + 6),
        ("all-reduce", 5 + 1, 6 * 16),
        ("collective-permute", 1, 16),
    )


def test_a_cohort_that_is_finite_is_run_once():
    def total(x):
        return run_until_finite(lambda look: jax.lax.psum(x, "clients") + look, tree.all_finite)

    found = figures_of(total)
    assert found.collectives == (("all-reduce", 1, 400),)


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        read_collectives("HloModule empty")


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
