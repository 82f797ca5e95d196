"""What a phase may send: messages of any shape, counted from their shapes."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    Algorithm,
    Phase,
    algorithms,
    build_round,
    compressors,
    with_compression,
)
from fedjax_lab.clients.local import Gradient, local_steps
from tests.algorithms.problem import flat, initial_params, loss_fn, to_batch
from tests.reference import problem as reference

N = reference.NUM_CLIENTS


class Server(NamedTuple):
    params: dict


def head_only(**declared):
    """Clients train all of the model and send their bias, in a list, and a number."""
    gradient = Gradient(loss_fn)

    def client_update(params, row, batch):
        local = local_steps(gradient, gradient, params, batch, 0.2)
        bias = params["b"] - local.params["b"]
        message = {"head": [bias], "size": jnp.abs(bias).max()}
        return message, row, local.report

    def server_update(server, messages, cohort):
        (delta,) = messages["head"]
        params = server.params | {"b": server.params["b"] - delta}
        return Server(params), {"delta_norm": jnp.linalg.norm(delta), "size": messages["size"]}

    phase = Phase(
        lambda server, round: server.params,
        client_update,
        server_update,
        reduce={"head": "mean", "size": "sum"},
        **declared,
    )
    return Algorithm("head", lambda p, n, b: (Server(p), ()), (phase,), lambda s: s.server.params)


def shapes(params):
    return {"head": [params["b"]], "size": jnp.zeros(())}


def one_round(algorithm):
    drawn = reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)
    state = algorithm.init(initial_params(), N)
    return state, *jax.jit(build_round(algorithm, "vmap"))(state, to_batch(drawn[0][1], 0))


def test_a_message_may_have_any_shape():
    algorithm = head_only(message=shapes)
    before, after, metrics = one_round(algorithm)
    params = algorithm.params(after)
    np.testing.assert_array_equal(params["W"], before.server.params["W"])
    assert np.abs(flat(params) - flat(before.server.params)).max() > 1e-3
    assert algorithm.uplink(params) == 3 * 4 + 4
    assert algorithm.downlink(params) == 18 * 4
    assert metrics["bytes_up"] == metrics["participants"] * 16
    assert metrics["bytes_down"] == metrics["participants"] * 72


def test_a_compressed_message_keeps_its_shape():
    plain = head_only(message=shapes)
    algorithm = with_compression(plain, "identity")
    state = algorithm.init(initial_params(), N)
    (residuals,) = state.clients.residuals
    assert jax.tree.map(jnp.shape, residuals) == {"head": [(N, 3)], "size": (N,)}
    sizes = [compressors.identity().bytes(d) for d in (3, 1)]
    assert algorithm.uplink(initial_params()) == sum(sizes)
    ends = [flat(a.params(one_round(a)[1])) for a in (plain, algorithm)]
    np.testing.assert_allclose(*ends, atol=1e-7)
    with_downlink = with_compression(plain, "sign", downlink="int8")
    _, after, metrics = one_round(with_downlink)
    assert np.isfinite(flat(with_downlink.params(after))).all()
    assert metrics["bytes_down"] == metrics["participants"] * compressors.int8().bytes(18)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({}, r"message\['head'\] holds .*float32\[3\].* what the params hold"),
        ({"message": lambda params: shapes(params) | {"size": params["b"]}}, r"\['size'\] holds"),
    ],
)
def test_a_message_of_another_shape_than_declared(declared, said):
    with pytest.raises(ValueError, match=said):
        one_round(head_only(**declared))


def test_bytes_of_models_larger_than_an_integer():
    """Two gigabytes and more do not fit into int32."""
    params = {"W": jax.ShapeDtypeStruct((2**20, 2**10), jnp.float32)}
    algorithm = head_only(message=lambda params: {"head": [params["W"]], "size": jnp.zeros(())})
    assert algorithm.uplink(params) == 2**32 + 4
    assert algorithm.downlink(params) == 2**32


def test_a_round_of_a_large_model_can_be_traced():
    def tiny_loss(params, examples, key):
        return examples["x"] @ params["w"][: reference.FEATURES]

    algorithm = algorithms.fedavg(tiny_loss, client_lr=0.1)
    state = jax.eval_shape(lambda: algorithm.init({"w": jnp.zeros(2**30, jnp.float32)}, N))
    drawn = reference.make_rounds(0, 1, cohort_size=4, max_steps=2, batch_size=4)
    batch = to_batch(drawn[0][1], 0)
    after, metrics = jax.eval_shape(build_round(algorithm, "scan"), state, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    assert metrics["bytes_up"].dtype == jnp.float32
