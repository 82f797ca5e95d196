"""Every method under every compressor: two rounds of ragged, partial participation.

What a compressor meets is a kind of exchange, not a method. So a plain run takes one method of each
kind, with compressors that together are all, here or in ``make test-methods``; ``-m slow`` takes
every method with all of them.
"""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from fedjax_lab import build_round, compressors, with_compression
from tests.algorithms.cases import MAIN, N
from tests.algorithms.problem import flat, initial_params, loss_fn, stack_rounds
from tests.reference import problem as reference

TEXTS = (
    "top_k:0.7",
    "sign",
    "random_drop:0.5",
    "qsgd:3",
    "random_k:0.7",
    "int8",
    "low_rank:1",
    "terngrad",
    "top_k:0.7+qsgd:3",
    "bfloat16",
    "identity",
)
# The other compressors have error feedback, no downlink, and all of a message as one vector.
OPTIONS = {
    "sign": {"downlink": "int8"},
    "qsgd:3": {"error_feedback": False},  # unbiased: the one to use without feedback
    "terngrad": {"scope": "per_leaf"},
}
KINDS = {
    "fedavg": ("top_k:0.7", "low_rank:1", "top_k:0.7+qsgd:3", "bfloat16", "identity"),  # a mean
    "scaffold": ("terngrad",),  # a sum and client rows
    "gradma_s": ("random_k:0.7",),  # messages one by one
    "mime": ("qsgd:3",),  # two exchanges
    "fedpd": ("random_drop:0.5",),  # and one of them without a message
    "fafed": ("sign",),  # first estimates, which are not compressed
    "fednova": ("int8",),  # numbers beside the vectors
}
# Numbers that clients send where they send a part of the model: its kernel or its bias.
PARTS = {"fedper": 15, "fedbn": 15, "fedrep": 15, "fedbabu": 15, "lg_fedavg": 3}
SOME = [case for case in MAIN if case.id in KINDS]
AT_ONCE = ("fedavg", "mime")  # in every run


@functools.cache
def batches():
    return stack_rounds(reference.make_rounds(3, 2, cohort_size=4, max_steps=3, batch_size=4))


def two_rounds(plain, texts, options):
    """(text, the state before, the state after, metrics) for compressors of the same options.

    Which of them it is, is an argument of the program, so that the method is compiled once.
    """
    through = [compressors.as_compressor("compressor", text).apply for text in texts]

    @jax.jit
    def run(which, params, batches):
        one_of_them = dataclasses.replace(
            compressors.identity(), direct=lambda key, v: jax.lax.switch(which, through, key, v)
        )
        algorithm = with_compression(plain, one_of_them, **options)
        before = algorithm.init(params, N, jax.tree.map(lambda leaf: leaf[0], batches))
        return before, *jax.lax.scan(build_round(algorithm, "vmap"), before, batches)

    for which, text in enumerate(texts):
        yield text, *run(which, initial_params(), batches())


def check(case, texts):
    plain = case.build(loss_fn)
    usual = [text for text in texts if text not in OPTIONS]
    groups = [(usual, {})] + [([text], OPTIONS[text]) for text in texts if text in OPTIONS]
    present = np.unique(batches().client_ids)
    absent = np.setdiff1d(np.arange(N), present)
    for together, options in groups:
        for text, before, after, metrics in two_rounds(plain, together, options):
            algorithm = with_compression(plain, text, **options)
            chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
            params = algorithm.params(after)
            assert np.isfinite(flat(params)).all()
            assert np.abs(flat(params) - flat(algorithm.params(before))).max() > 1e-4
            assert all(np.isfinite(values).all() for values in metrics.values())
            assert (metrics["message_sq"] > 0).all()
            assert (metrics["change_sq"] > 0).all()
            compressor = compressors.as_compressor("compressor", text)
            sizes = [15, 3] if options.get("scope") == "per_leaf" else [18]
            sizes = [PARTS[case.id]] if case.id in PARTS else sizes
            fields = sum(len(phase.reduce) for phase in plain.phases if not phase.once)
            uncompressed = max(0, 4 * reference.DIMENSION * (case.uplink - fields))
            packed = fields * sum(map(compressor.bytes, sizes))
            assert algorithm.uplink(params) == packed + uncompressed
            for old, new in zip(
                jax.tree.leaves(before.clients), jax.tree.leaves(after.clients), strict=True
            ):
                np.testing.assert_array_equal(old[absent], new[absent])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=() if case.id in AT_ONCE else pytest.mark.methods)
        for case in SOME
    ],
)
@pytest.mark.filterwarnings("ignore:error feedback needs")  # of a single round
def test_each_kind_of_exchange(case):
    check(case, KINDS[case.id])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*more than without compression")  # of three numbers
@pytest.mark.filterwarnings("ignore:error feedback needs")
@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.id)
def test_all_compressors(case):
    if case.id == "cfedavg":
        pytest.skip("compressed already")
    if case.id == "local_only":
        with pytest.raises(
            ValueError, match="algorithm is local_only, whose clients send no messages"
        ):
            with_compression(case.build(loss_fn), "sign")
        return
    check(case, TEXTS)


def test_every_kind_and_every_compressor_is_in_the_product():
    named = {name for text in TEXTS for name in [text.split(":")[0]] if "+" not in text}
    assert named | {"compose"} == set(compressors.COMPRESSORS)
    assert {text for texts in KINDS.values() for text in texts} == set(TEXTS)
    phases = {case.id: case.build(loss_fn).phases for case in SOME}
    assert set(phases) == set(KINDS)
    rules = {how for ps in phases.values() for p in ps for how in p.reduce.values()}
    assert rules == {"mean", "sum", "stack"}
    assert [[len(p.reduce) for p in phases[name]] for name in ("mime", "fedpd")] == [[1, 1], [1, 0]]
    assert [phase.once for phase in phases["fafed"]] == [True, False]
