"""Options that meet seldom: client times with devices, streams with empty slots, constants."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, simulate
from fedjax_lab.simulation.evaluate_personal import client_models

SETTINGS = {
    "rounds": 4,
    "eval_every": 2,
    "cohort_size": 2,
    "batch_size": 4,
    "local_steps": 5,
    "client_map": "scan",
}


def loss_fn(params, examples, key, constants=None):
    x, y = examples
    factor = 1.0 if constants is None else constants
    return factor * jnp.square(x @ params - y)


def arrays(number=40):
    x = np.random.default_rng(0).normal(size=(number, 3)).astype(np.float32)
    return x, x[:, 0] - x[:, 1]


def test_fine_tuning_has_the_constants_of_its_client():
    """A client whose loss is 0 times something does not move."""
    clients = data.partition(arrays(), "iid", 4)
    fedavg = algorithms.fedavg(loss_fn, client_lr=0.01)
    method = algorithms.with_fine_tuning(fedavg, loss_fn, steps=5, client_lr=0.01)
    factors = np.array([0.0, 1.0, 10.0, 20.0], np.float32)
    result = simulate(method, jnp.zeros(3), clients, client_constants=factors, **SETTINGS)
    models = client_models(method, clients, client_constants=factors)
    still, moved = (models(result.state, jnp.int32(i)) for i in (0, 1))
    np.testing.assert_array_equal(still, result.params)
    assert np.abs(moved - result.params).max() > 1e-4
    with pytest.warns(UserWarning, match="has an argument constants; .* client_models, too"):
        client_models(method, clients)
    with pytest.raises(ValueError, match="leading axis must have an entry for each of the 4"):
        client_models(method, clients, client_constants=factors[:3])


class OwnDevices(data.Devices):
    def __init__(self, steps):
        super().__init__()
        object.__setattr__(self, "steps", jnp.asarray(steps))

    def local_steps(self, key, round, ids, planned):
        return self.steps[ids]


@pytest.mark.parametrize(
    "options",
    [
        {"devices": data.Devices(min_local_steps=1), "times": data.ClientTimes()},
        {"devices": OwnDevices([1, 2, 3, 4])},
    ],
)
def test_methods_of_two_gradients_take_devices_of_any_kind(options):
    method = algorithms.fedsam(loss_fn, client_lr=0.01, perturbation_radius=0.05)
    clients = data.partition(arrays(), "iid", 4)
    result = simulate(method, jnp.zeros(3), clients, **options, **SETTINGS)
    assert np.isfinite(result.params).all()


def test_a_stream_has_room_for_what_padded_slots_draw():
    """One large client, which is the only one at hand."""
    owners = np.repeat(np.arange(40), [400, *[1] * 39])
    at_hand = np.zeros((1, 40), bool)
    at_hand[0, 0] = True
    method = algorithms.fedavg(loss_fn, client_lr=0.01)
    ends = [
        simulate(
            method, jnp.zeros(3), clients, times=data.ClientTimes(availability=at_hand), **SETTINGS
        ).params
        for clients in (
            data.stream(arrays(439), owners, memory=10**6),
            data.partition(arrays(439), owners, 40),
        )
    ]
    np.testing.assert_array_equal(*ends)


def test_a_stream_is_evaluated_less_often_than_it_has_rounds():
    stream = data.stream(arrays(), "iid", 4, memory=10**6)
    method = algorithms.fedavg(loss_fn, client_lr=0.01)
    result = simulate(method, jnp.zeros(3), stream, **SETTINGS | {"eval_every": 2**31 - 1})
    assert [row["round"] for row in result.history] == [4]


def test_labels_of_any_integer_dtype_are_counted():
    labels = np.arange(40, dtype=np.uint64) % 3
    stream = data.stream((arrays()[0], labels), "iid", 4, memory=10**6)
    assert np.asarray(stream.label_histogram()).sum(0).tolist() == [14, 13, 13]


def test_tokens_beyond_int32_are_refused():
    tokens = np.array([1, 2**31 + 5, 7])
    with pytest.raises(ValueError, match=r"they must be integers \[m\] from 0 to 2147483647"):
        data.pack([(tokens, np.ones(3, bool))], 4)
