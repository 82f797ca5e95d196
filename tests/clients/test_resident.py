"""Resident examples as they are and flat, as TPUs gather them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, models
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.clients.resident import FlatExamples, flatten_examples, gather
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.machine.target import named
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk


def test_a_gather_from_flat_examples_is_numpys_from_whole_ones():
    generator = np.random.default_rng(0)
    source = {
        "image": generator.integers(0, 256, (11, 4, 3, 2)).astype(np.uint8),
        "text": generator.integers(0, 9, (11, 5)).astype(np.int32),
        "y": np.arange(11),
    }
    places = generator.integers(0, 11, (2, 6))
    flat = flatten_examples(jax.tree.map(jnp.asarray, source))
    assert isinstance(flat["image"], FlatExamples)
    assert flat["image"].rows.shape == (11, 24)
    assert flat["text"].shape == (11, 5)
    found = jax.jit(gather)(jnp.asarray(places), flat)
    jax.tree.map(lambda values, s: np.testing.assert_array_equal(values, s[places]), found, source)


@pytest.mark.methods
def test_a_chunk_for_a_tpu_holds_examples_flat_and_computes_what_others_do():
    noise = data.synthetic.noise_images(40, (5, 4, 1), seed=0)
    clients = data.partition(noise, "iid", num_clients=4, seed=0)
    network = models.mlp(10, hidden=(3,))
    loss_fn = models.classification_loss(network.apply, data.preprocess())
    algorithm = algorithms.scaffold(loss_fn, client_lr=0.1)
    schedule = Schedule(cohort_size=2, batch_size=3, local_steps=2)
    key, first = jax.random.key(1), jnp.zeros((), jnp.int32)
    params = jax.jit(network.init)(jax.random.key(0), noise.x[:1])
    state = jax.jit(Computation(algorithm, schedule).start)(params, clients, key, ())

    def run(target):
        chunk = build_chunk(
            Computation(algorithm, schedule),
            Placement(parse_client_map("vmap", target), target=target),
        )
        traced = chunk.trace(jax.tree.map(jnp.copy, state), clients, key, first, length=2)
        shapes = {v.aval.shape for eqn in traced.jaxpr.eqns for v in eqn.outvars}
        return shapes, chunk(jax.tree.map(jnp.copy, state), clients, key, first, length=2)

    plain, expected = run(named("cpu"))
    flat, found = run(named("v5e"))
    assert (40, 20) in flat
    assert (40, 20) not in plain
    jax.tree.map(np.testing.assert_array_equal, found, expected)
