"""What devices exchange in a round: worked out from shapes, and read from compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks.collectives import HIDDEN, METHODS, SLOTS, compiled
from fedjax_lab import algorithms, models
from fedjax_lab.clients.exchange import is_divided

MANY, DEVICES = 1000, 4


def exchanged(algorithm, params, store):
    """{kind of collective: bytes of its results on one device}, as docs/accelerators.md has it."""
    [phase] = algorithm.phases
    message = phase.message_like(params)
    sums = [message[name] for name, how in phase.reduce.items() if how != "stack"]
    stacked = [message[name] for name, how in phase.reduce.items() if how == "stack"]
    rows = jax.eval_shape(lambda params: algorithm.start(params, MANY, None)[1], params)
    found = dict.fromkeys(("all-to-all", "all-gather", "reduce-scatter"), 0)
    for leaf in jax.tree.leaves(sums):
        if not is_divided(leaf.size, DEVICES):
            found["all-gather"] += DEVICES * leaf.size * leaf.dtype.itemsize
            continue
        longest = max(leaf.shape)
        padded = leaf.size // longest * DEVICES * -(-longest // DEVICES) * leaf.dtype.itemsize
        found["all-to-all"] += padded
        found["all-gather"] += padded
    of_row = sum(leaf.size // MANY * leaf.dtype.itemsize for leaf in jax.tree.leaves(rows))
    of_stack = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stacked))
    found["all-gather"] += SLOTS * (of_row + of_stack)
    if store == "sharded":
        found["reduce-scatter"] += SLOTS // DEVICES * of_row
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "store"),
    [("fedavg", "device"), ("scaffold", "device"), ("scaffold", "sharded"), ("gradma", "sharded")],
)
def test_bytes_by_shapes_are_those_of_compiled_programs(name, store):
    model = models.mlp(10, hidden=HIDDEN)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 784)))
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    method = algorithms.ALGORITHMS[name](lambda *_: None, client_lr=0.1, **METHODS[name])
    found = exchanged(method, params, store)
    figures = compiled(name, f"cpu:{DEVICES}", "shard_map", store).figures
    in_program = {c.kind: c.bytes for c in figures.collectives}
    for kind in found.keys() | in_program.keys():
        assert found.get(kind, 0) == pytest.approx(in_program.get(kind, 0), abs=1e-3 * size)
