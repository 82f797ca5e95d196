"""Wrong arguments are told in one sentence, before anything is compiled; wrong answers at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, data
from fedjax_lab.checks import check_number
from fedjax_lab.clients.mapping import check_client_map
from tests.simulation.test_run import FEDAVG, N, first_params, loss_fn, make_clients, run


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a chunk was built")

    monkeypatch.setattr("fedjax_lab.simulation.chunks.build_chunk", refuse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 2**31}, "batch_size is 2147483648; it must be between 1 and 2147483647"),
        ({"local_steps": 2**31}, "local_steps is 2147483648; it must be between 1 and 2147483647"),
        ({"local_steps": None, "local_epochs": 2**31}, "local_epochs is 2147483648; it must be"),
        ({"client_map": "chunk:" + "9" * 20}, "n in chunk:n must be at least 1, and at most 2147"),
        ({"client_map": "shard_map:2x" + "9" * 20}, "M in shard_map:CxM must be at least 1, and"),
        ({"client_map": "chunk:²"}, "n in chunk:n must be at least 1"),
        ({"client_map": None}, "client_map is None; it must be text"),
        ({"weights": 1.0}, "weights is 1.0; it must be one of examples, uniform, or an array"),
        ({"weights": np.ones(N + 1)}, r"weights has the shape \(\d,\); it must be 'uniform'"),
        ({"params": {"w": 0.5}}, r"params\['w'\] is float, not an array"),
        ({"params": 0.5}, "params is float, not an array"),
        ({"run_dir": 3}, "run_dir is 3; it must be the path of a directory"),
        ({"profile_dir": 3}, "profile_dir is 3; it must be a path or None"),
        ({"config": {"a": object()}}, r"config\['a'\] is no JSON value: Object of type object"),
        ({"config": {"a": [np.nan]}}, r"config\['a'\] is no JSON value"),
        ({"config": [1]}, "config is a list; it must be a dict"),
        ({"config": {1: 1}}, "config has the name 1; names must be text"),
        ({"evaluate": 3}, "evaluate is 3; it must be a function of the params"),
        ({"diagnose": 3}, "diagnose is 3; it must be a function of the state"),
        ({"on_row": 3}, "on_row is 3; it must be a function of a row, or several"),
        ({"devices": 3}, "devices is 3; it must be a data.Devices or None"),
    ],
)
def test_before_anything_is_compiled(nothing_is_compiled, changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        run(FEDAVG, **changes)


@pytest.mark.parametrize("part", ["server", "clients"])
def test_a_state_with_random_keys(nothing_is_compiled, part):
    """A round takes them, but no checkpoint and no table on the host could hold them."""

    def start(params, num_clients, batch):
        server, _ = FEDAVG.start(params, num_clients, batch)
        keys = jax.random.split(jax.random.key(0), num_clients)
        return ({"own": server, "key": keys[0]}, ()) if part == "server" else (server, keys)

    own = dataclasses.replace(FEDAVG, start=start, params=lambda state: state.server.params)
    where = r"state.server\['key'\]" if part == "server" else "state.clients"
    with pytest.raises(TypeError, match=rf"{where} of .* has typed random keys; .*key_data"):
        run(own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": lambda params: {"note": "fine"}}, "evaluate returned {'note': 'fine'}; it"),
        ({"stop_when": lambda row: np.ones(2)}, r"stop_when returned array.*one truth value"),
    ],
)
def test_answers_that_are_no_numbers(changes, message):
    with pytest.raises(TypeError, match=message):
        run(FEDAVG, **changes)


def test_a_number_that_rows_lack_is_told_with_those_that_they_have():
    with pytest.raises(KeyError, match="accuracy") as caught:
        run(FEDAVG, stop_when=lambda row: row["accuracy"] > 0.9)
    (note,) = caught.value.__notes__
    assert note.startswith("stop_when is given a row with round, ")


@pytest.mark.parametrize("value", ["0.1", b"1", True, np.True_, jnp.array(True), [0.1], np.ones(1)])
def test_what_python_turns_into_a_number_is_none(value):
    with pytest.raises(TypeError, match=r"client_lr is .*; it must be a number, or a schedule"):
        algorithms.fedavg(loss_fn, client_lr=value)


@pytest.mark.parametrize("value", [1, 0.1, np.float32(0.1), np.array(0.1), jnp.array(1)])
def test_numbers_of_all_kinds(value):
    assert check_number("client_lr", value, minimum=0.0) is value


def test_a_client_map_may_be_large():
    assert check_client_map("chunk:2147483647")


@pytest.mark.methods
def test_a_batch_may_be_a_constant_of_a_program():
    key, round_fn = jax.random.key(0), build_round(FEDAVG, "scan")
    batch = data.draw_batch(
        make_clients(), key, 0, cohort_size=3, batch_size=4, local_steps=2, replace=True
    )
    state = FEDAVG.init(first_params(), N)
    expected = round_fn(state, batch)[0].server.params["w"]

    @jax.jit
    def with_key(key):
        return round_fn(state, batch._replace(key=key))[0].server.params["w"]

    np.testing.assert_allclose(with_key(batch.key), expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"client_ids is \[7, 0, 1\]; ids must lie between 0 and"):
        jax.eval_shape(lambda _: round_fn(state, batch._replace(client_ids=np.array([7, 0, 1]))), 0)
