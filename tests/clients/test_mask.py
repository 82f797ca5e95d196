"""A loss that looks at the whole mini-batch can tell padding from examples.

The loss of an example is (w - its distance from the mean of the mini-batch)^2. The distances of the
real examples add up to 0: a step with the rate 1/4 takes w to w / 2, whatever the examples are.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, data, with_frozen, with_personal
from fedjax_lab.clients.metrics import takes_mask
from fedjax_lab.simulation.evaluate import build_client_evaluation, build_evaluation

SIZES = (3, 5, 4, 1)
X = np.random.default_rng(0).normal(size=(sum(SIZES), 1)).astype(np.float32)
CLIENTS = data.partition(X, np.repeat(np.arange(4), SIZES), num_clients=4, min_size=1)


def centred(x, mask):
    return x[:, 0] - jnp.where(mask, x[:, 0], 0).sum() / mask.sum()


def loss_fn(params, x, key, mask):
    return (params["w"] + params["v"] - centred(x, mask)) ** 2


def frozen_loss(params, x, key, frozen, *, mask):
    return loss_fn(params, x + frozen, key, mask)


fedavg = functools.partial(algorithms.fedavg, client_lr=0.25)
METHODS = {
    "plain": fedavg(loss_fn),
    "jitted": fedavg(jax.jit(loss_fn)),
    "frozen": with_frozen(fedavg, frozen_loss, jnp.float32(3)),
    "personal": with_personal(fedavg(loss_fn), lambda path: path == "v"),
    "clipped": fedavg(loss_fn, example_clip=100.0),
    "full": algorithms.scaffold(loss_fn, client_lr=0.25, control_update="I"),
}


@pytest.mark.parametrize(
    ("name", "client_map"),
    [(name, "scan") for name in METHODS]
    + [("plain", m) for m in ("vmap", "chunk:3", "shard_map:2", "pmap")],
)
def test_padding_is_told(name, client_map):
    algorithm = METHODS[name]
    batch = data.draw_batch(
        CLIENTS, jax.random.key(0), 0, cohort_size=4, batch_size=8, local_epochs=1
    )
    params = {"w": jnp.float32(1), "v": jnp.float32(0)}
    state, _ = jax.jit(build_round(algorithm, client_map))(algorithm.init(params, 4), batch)
    if name == "full":  # its control variates are gradients at w = 1: 2 w
        np.testing.assert_allclose(state.clients["w"], 2, rtol=1e-5)
    # Both move: their sum is what the loss sees.
    np.testing.assert_allclose(algorithm.params(state)["w"], 0.5, rtol=1e-5)


def test_evaluations_are_told_of_padding():
    def counts(params, x, mask):
        return centred(x, mask), jnp.ones(len(x))

    # Batches of 8 and 5: the distances of each add up to 0.
    scores = build_evaluation(counts, X, batch_size=8)(())
    assert abs(float(scores["accuracy"])) < 1e-6
    of_clients = build_client_evaluation(counts, CLIENTS, batch_size=13)(())
    total = (np.asarray(of_clients) * SIZES).sum()
    assert abs(total) < 1e-5


def test_who_takes_a_mask():
    assert takes_mask(loss_fn)
    assert takes_mask(jax.jit(loss_fn))
    assert takes_mask(functools.partial(frozen_loss, frozen=1))
    assert not takes_mask(functools.partial(loss_fn, mask=None))
    assert not takes_mask(lambda params, examples, key, **options: None)
    assert not takes_mask(max)
