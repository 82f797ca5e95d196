"""Which wrapper goes around which: every pair is made, and those with a meaning are run."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    algorithms,
    build_round,
    data,
    simulate,
    with_attack,
    with_compression,
    with_dp,
    with_personal,
    with_ranks,
    with_robust_aggregation,
    with_secure_aggregation,
    with_update_metrics,
)
from tests.algorithms.cases import N
from tests.algorithms.problem import drawn, flat, initial_params, loss_fn

WRAP = {
    "personal": lambda a: with_personal(a, lambda path: path == "b"),
    "compression": lambda a: with_compression(a, "top_k:0.5"),
    "dp": lambda a: with_dp(a, 1.0, 0.1),
    "robust": lambda a: with_robust_aggregation(a, "median"),
    "secure": lambda a: with_secure_aggregation(a, 32, 8.0),
    "attack": lambda a: with_attack(a, "alie", share=0.3),
}
# Outer -> what it may go around.
MAY = {
    "personal": set(),
    "compression": {"personal", "compression", "robust"},
    "dp": {"personal", "compression"},
    "robust": {"personal", "compression"},
    "secure": {"personal", "compression", "dp"},
    "attack": {"personal", "compression", "dp", "robust", "secure"},
}


def plain():
    return algorithms.scaffold(loss_fn, client_lr=0.2)


def batches():
    return drawn(2, equal_steps=True, has_weights=False)


def finish(algorithm):
    state = jax.jit(lambda p: algorithm.init(p, N))(initial_params())
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    for batch in batches():
        before = state
        state, metrics = round_fn(state, batch)
        chex.assert_trees_all_equal_shapes_and_dtypes(before, state)
    assert np.isfinite(flat(algorithm.params(state))).all()
    assert all(np.isfinite(value) for value in metrics.values())
    return state


@pytest.mark.parametrize("outer", WRAP)
def test_orders_without_a_meaning_are_errors_that_say_why(outer):
    for inner in set(WRAP) - MAY[outer]:
        with pytest.raises(ValueError, match=r"cannot wrap with_\w+; \w+"):
            WRAP[outer](WRAP[inner](plain()))


def test_a_rule_around_padded_adapters_is_refused():
    """It would combine what the server has not padded yet."""
    ranked = with_ranks(algorithms.fedavg(loss_fn, client_lr=0.1), [1, 2], padded="adapters")
    with pytest.raises(ValueError, match="the rule must combine the adapters as the server pads"):
        with_robust_aggregation(ranked, "median")


PAIRS = [(o, i) for o in WRAP for i in sorted(MAY[o]) if o != i]
PLAIN_RUN = {("attack", "robust")}


@pytest.mark.parametrize(
    ("outer", "inner"),
    [pytest.param(*p, marks=() if p in PLAIN_RUN else pytest.mark.slow) for p in PAIRS],
)
def test_orders_with_a_meaning(outer, inner):
    algorithm = WRAP[outer](WRAP[inner](plain()))
    assert algorithm.wrappers == (inner, outer)
    finish(algorithm)


@pytest.mark.slow
def test_all_that_go_together():
    """Personal leaves, compressed, clipped and noised, masked, and attacked."""
    algorithm = plain()
    for name in ("personal", "compression", "dp", "secure", "attack"):
        algorithm = WRAP[name](algorithm)
    assert algorithm.name == "scaffold+personal+top_k+dp+secure+alie"
    finish(algorithm)


@pytest.mark.slow
def test_compression_on_either_side_of_a_rule_is_the_same(x64):
    inside, outside = (
        with_robust_aggregation(with_compression(plain(), "top_k:0.5"), "median"),
        with_compression(with_robust_aggregation(plain(), "median"), "top_k:0.5"),
    )
    chex.assert_trees_all_close(finish(inside), finish(outside), atol=1e-12)


@pytest.mark.slow
def test_noise_and_masks_keep_what_noise_alone_does(x64):
    """With masks, the mean differs by the resolution, and the noise is the same draw."""
    alone, masked = with_dp(plain(), 1.0, 0.1), WRAP["secure"](with_dp(plain(), 1.0, 0.1))
    chex.assert_trees_all_close(finish(alone), finish(masked), atol=1e-6)


def test_an_adaptive_clip_is_not_masked():
    with pytest.raises(ValueError, match="without adaptive_quantile"):
        with_secure_aggregation(with_dp(plain(), 1.0, 0.1, adaptive_quantile=0.5), 32, 8.0)


@pytest.mark.parametrize("name", ["compression", "dp around compression", "metrics"])
def test_the_model_of_a_state_on_the_host(name):
    """Where a wrapper adds rows of clients, too."""
    x = np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32)
    clients = data.partition(data.Examples(x, np.zeros(24, np.int32)), "iid", 6, seed=0)
    fedavg = algorithms.fedavg(lambda w, e, key: jnp.square(w[None] - e.x).sum(-1), client_lr=0.1)
    compressed = with_compression(fedavg, "top_k:0.5")
    algorithm = {
        "compression": compressed,
        "dp around compression": with_dp(compressed, 1.0, 0.1),
        "metrics": with_update_metrics(fedavg, to_last=True),
    }[name]
    how = {"rounds": 2, "cohort_size": 3, "batch_size": 2, "local_steps": 2}
    ends = [
        simulate(algorithm, jnp.zeros(2), clients, client_store=store, **how)
        for store in ("host", "device")
    ]
    for result in ends:
        np.testing.assert_array_equal(algorithm.params(result.state), ends[1].params)
