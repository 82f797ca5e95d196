"""Any combination of masks equals leaving out what they mask."""

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_lab import algorithms, build_round
from tests.algorithms.problem import flat, initial_params, loss_fn
from tests.federations import batch_of
from tests.reference import problem as reference
from tests.reference.base import ReferenceClient
from tests.reference.scaffold_numpy import Scaffold

S, K, B, N = 3, 2, 3, reference.NUM_CLIENTS


@functools.cache
def compiled(client_map):
    algorithm = algorithms.scaffold(loss_fn, client_lr=0.2, server_lr=0.8)
    return algorithm, jax.jit(build_round(algorithm, client_map))


@settings(max_examples=60, deadline=None)
@given(
    ids=st.permutations(range(N)).map(lambda order: np.array(order[:S], np.int32)),
    example_mask=hnp.arrays(bool, (S, K, B)),
    num_steps=hnp.arrays(np.int32, S, elements=st.integers(0, K)),
    participates=hnp.arrays(bool, S),
    weights=hnp.arrays(np.float32, S, elements=st.sampled_from([0.0, 0.5, 1.0, 3.0])),
    client_map=st.sampled_from(["vmap", "scan"]),
    seed=st.integers(0, 3),
)
def test_masks(ids, example_mask, num_steps, participates, weights, client_map, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(S, K, B, reference.FEATURES)).astype(np.float32)
    y = rng.integers(reference.CLASSES, size=(S, K, B)).astype(np.int32)
    algorithm, round_fn = compiled(client_map)
    batch = batch_of(
        {"x": jnp.asarray(x), "y": jnp.asarray(y)},
        ids=ids,
        example_mask=jnp.asarray(example_mask),
        num_steps=jnp.asarray(num_steps),
        weights=jnp.asarray(weights),
        participates=jnp.asarray(participates),
    )
    clients = []
    for s in range(S):
        taken = [k for k in range(num_steps[s]) if example_mask[s, k].any() and participates[s]]
        kept = [(x[s, k][example_mask[s, k]], y[s, k][example_mask[s, k]]) for k in taken]
        clients.append(ReferenceClient(int(ids[s]), kept, float(weights[s])))
    twin = Scaffold(flat(initial_params()), N, reference.gradient, client_lr=0.2, server_lr=0.8)
    state = algorithm.init(initial_params(), N)
    for t in range(2):
        state, metrics = round_fn(state, batch)
        twin.round(clients, t)
    np.testing.assert_allclose(flat(algorithm.params(state)), twin.x, atol=2e-5)
    np.testing.assert_allclose(flat(state.server.control), twin.c, atol=1e-4)
    assert metrics["participants"] == sum(bool(client.minibatches) for client in clients)
