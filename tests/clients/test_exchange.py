"""Sums over devices, next to NumPy's in the order of the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fedjax_lab.clients.exchange import sum_in_order
from fedjax_lab.clients.store import AXIS, client_mesh

RNG = np.random.default_rng(0)
DEVICES = 4
# Small leaves travel together, large ones are divided along their longest axis, evenly or not.
SHAPES = {"scalar": (), "small": (3, 5), "even": (8, 1024), "uneven": (5, 1031), "flat": (4999,)}


def summed(values):
    mesh = client_mesh(jax.devices()[:DEVICES])
    add = jax.shard_map(
        lambda tree: sum_in_order(jax.tree.map(lambda leaf: leaf[0], tree), AXIS, DEVICES),
        mesh=mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(add)(values)


def test_sums_are_those_in_the_order_of_the_devices():
    values = {
        name: RNG.normal(scale=10.0 ** RNG.integers(-3, 4, (DEVICES, *shape))).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    found = summed(values)
    for name, parts in values.items():
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    backwards = sum(parts for parts in values["even"][::-1])
    assert (np.asarray(found["even"]) != backwards).any()  # the order makes a difference


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16])
def test_a_leaf_keeps_its_dtype(dtype):
    values = {"a": jnp.ones((DEVICES, 3), dtype), "b": jnp.ones((DEVICES, 3, 2000), dtype)}
    found = summed({**values, "c": jnp.ones((DEVICES, 2), jnp.float32)})
    for name in values:
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], np.full(found[name].shape, DEVICES))
