"""A chunk of rounds stays on the device: no transfer, no copy of the state, data as stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.data import synthetic
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk


def loss_fn(params, examples, key):
    del key
    x = examples.x.reshape(examples.x.shape[0], -1).astype(jnp.float32) / 255
    return jnp.square(x @ params["w"] - examples.y)


@pytest.fixture(scope="module")
def chunk():
    """(compiled chunk of three rounds, its arguments without the state, a state)."""
    noise = synthetic.noise_images(500, (4, 4, 1), seed=0)
    clients = data.partition(noise, "iid", num_clients=10, seed=0)
    algorithm = algorithms.scaffold(loss_fn, client_lr=0.1)
    schedule = Schedule(cohort_size=4, batch_size=8, local_steps=2)
    state = algorithm.init({"w": jnp.ones(16)}, 10)
    rest = (clients, jax.random.key(0), jnp.zeros((), jnp.int32))
    chunk = build_chunk(Computation(algorithm, schedule), Placement(parse_client_map("scan")))
    run = chunk.lower(state, *rest, length=3).compile()
    return run, rest, state


def test_no_transfer_inside_a_chunk(chunk):
    run, rest, state = chunk
    state = jax.tree.map(jnp.copy, state)
    with jax.transfer_guard("disallow"):
        state, metrics = run(state, *rest)
        state, metrics = run(state, *rest)
    assert np.isfinite(metrics["loss"]).all()
    assert not any(word in run.as_text() for word in ("callback", "outfeed", "infeed"))


def test_the_guard_would_notice(chunk):
    run, (clients, key, _), state = chunk
    state = jax.tree.map(jnp.copy, state)
    refused = pytest.raises(Exception, match="Disallowed host-to-device")
    with jax.transfer_guard("disallow"), refused:
        run(state, clients, key, np.zeros((), np.int32))


def test_the_state_is_updated_in_place(chunk):
    run, rest, state = chunk
    state = jax.tree.map(jnp.copy, state)
    run(state, *rest)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(chunk[2]))
    assert run.memory_analysis().alias_size_in_bytes >= 0.9 * size


def test_examples_stay_as_they_are_stored(chunk):
    run, (clients, *_), _ = chunk
    assert clients.examples.x.dtype == jnp.uint8
    # A float copy of the data set, or of a round's mini-batches for all clients, would be larger.
    assert run.memory_analysis().temp_size_in_bytes < clients.examples.x.nbytes * 4
