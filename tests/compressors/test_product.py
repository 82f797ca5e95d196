"""Every method under every compressor: two rounds of ragged, partial participation.

A plain run takes one compressor per method, another one for the next; ``-m slow`` takes all of
them.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import build_round, compressors, with_compression
from tests.algorithms.cases import MAIN, N
from tests.algorithms.problem import flat, initial_params, loss_fn, to_batch
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
ROTATING = [(case, (TEXTS[i % len(TEXTS)],)) for i, case in enumerate(MAIN)]


@functools.cache
def batches():
    drawn = reference.make_rounds(3, 2, cohort_size=4, max_steps=3, batch_size=4)
    return [to_batch(padded, t) for t, (_, padded) in enumerate(drawn)]


def check(case, texts):
    """Two rounds under each compressor, all in one program."""
    plain = case.build(loss_fn)
    wrapped = {
        text: with_compression(
            plain,
            text,
            error_feedback=text != "qsgd:3",  # unbiased: the one to use without feedback
            downlink="int8" if text == "sign" else None,
            scope="per_leaf" if text == "terngrad" else "global",
        )
        for text in texts
    }
    first = batches()[0] if plain.needs_first_batch else None
    states = {text: a.init(initial_params(), N, first) for text, a in wrapped.items()}

    @jax.jit
    def both_rounds(states, batches):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        return {
            text: jax.lax.scan(build_round(wrapped[text], "vmap"), state, stacked)
            for text, state in states.items()
        }

    present = np.unique(np.concatenate([np.asarray(b.client_ids) for b in batches()]))
    absent = np.setdiff1d(np.arange(N), present)
    for text, (after, metrics) in both_rounds(states, batches()).items():
        algorithm, before = wrapped[text], states[text]
        chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
        params = algorithm.params(after)
        assert np.isfinite(flat(params)).all()
        assert np.abs(flat(params) - flat(algorithm.params(before))).max() > 1e-4
        assert all(np.isfinite(values).all() for values in metrics.values())
        assert (metrics["message_sq"] > 0).all()
        assert (metrics["change_sq"] > 0).all()
        compressor = compressors.as_compressor("compressor", text)
        sizes = [15, 3] if text == "terngrad" else [18]
        fields = sum(len(phase.reduce) for phase in plain.phases if not phase.once)
        uncompressed = max(0, 4 * reference.DIMENSION * (case.uplink - fields))
        assert algorithm.uplink(params) == fields * sum(map(compressor.bytes, sizes)) + uncompressed
        for old, new in zip(
            jax.tree.leaves(before.clients), jax.tree.leaves(after.clients), strict=True
        ):
            np.testing.assert_array_equal(old[absent], new[absent])


@pytest.mark.parametrize(("case", "texts"), ROTATING, ids=lambda value: getattr(value, "id", ""))
def test_two_compressors(case, texts):
    if case.id == "cfedavg":
        pytest.skip("compressed already")
    check(case, texts)


@pytest.mark.slow
@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.id)
def test_all_compressors(case):
    if case.id == "cfedavg":
        pytest.skip("compressed already")
    check(case, TEXTS)


def test_every_compressor_is_in_the_product():
    named = {name for text in TEXTS for name in [text.split(":")[0]] if "+" not in text}
    assert named | {"compose"} == set(compressors.COMPRESSORS)
    if len(MAIN) > len(TEXTS) // 2:
        assert {text for _, texts in ROTATING for text in texts} == set(TEXTS)
