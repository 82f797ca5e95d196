"""Which model a client is scored with, and what is told of the scores."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab import algorithms, data, with_frozen, with_personal
from fedjax_lab.clients.host_table import HostTable
from fedjax_lab.simulation.evaluate import build_client_evaluation
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)
from fedjax_lab.wrappers import client_params
from tests.federations import of_sizes
from tests.tiers import few

OWNERS = np.array([0, 0, 0, 1, 3])  # client 2 has no data
VALUES = np.array([2.0, 2.0, 2.0, -1.0, 5.0], np.float32)  # all examples of a client are alike


def distance(params, examples, key):
    """Half the squared distance to the example, whose gradient is params - x."""
    return 0.5 * jnp.square(params["p"][None] - examples.x).sum(-1)


def own_models(algorithm, clients, **more):
    state = algorithm.init({"p": jnp.zeros(1)}, 4)
    model_of = client_models(algorithm, clients, **more)
    return np.array([float(model_of(state, i)["p"][0]) for i in range(4)])


@pytest.fixture(scope="module")
def clients():
    return of_sizes([3, 1, 0, 1], VALUES[:, None])  # client 2 has no data


def test_fine_tuning_goes_to_the_clients_own_data(clients):
    """E steps of rate 1/2 leave 2^-E of the way from 0 to a client's value."""
    method = algorithms.fedbabu(
        distance, client_lr=0.1, head="nothing", fine_tune_steps=3, fine_tune_lr=0.5
    )
    expected = (1 - 0.5**3) * np.array([2.0, -1.0, 0.0, 5.0])
    np.testing.assert_allclose(own_models(method, clients, batch_size=2), expected, rtol=1e-6)


def test_the_frozen_weights_are_those_of_the_state(clients):
    """The score of client i, whose own leaf is i, is the mean of x + w + i."""
    frozen = {"w": jnp.array([0.5])}

    def loss(params, examples, key, frozen):
        return distance({"p": params["shared"] + params["own"] + frozen["w"]}, examples, key)

    def build(loss_fn):
        method = algorithms.fedavg(loss_fn, client_lr=0.1)
        return with_personal(method, lambda path: path == "own")

    algorithm = with_frozen(build, loss, frozen)
    state = algorithm.init({"shared": jnp.zeros(1), "own": jnp.zeros(1)}, 4)
    own = (jnp.arange(4.0)[:, None],)
    state = state._replace(clients=state.clients._replace(personal=own))
    expected = [2.0 + 0.5, -1 + 0.5 + 1, np.nan, 5 + 0.5 + 3]

    def whole(params, examples, frozen):
        total = examples.x + params["own"][None] + frozen["w"][None]
        return total[:, 0], jnp.zeros(len(total))

    def with_mask(params, examples, frozen, mask):
        return whole(params, examples, frozen)

    def without(params, examples, factor=1.0):
        return whole(params, examples, {"w": params["w"]})

    def merged(state, client_id):
        return {**models(state, client_id), **state.frozen}

    models = client_models(algorithm)
    for count, model_of in ((whole, models), (with_mask, models), (without, merged)):
        count.score = "error"
        found = build_personal_evaluation(count, model_of, clients)(state)
        np.testing.assert_allclose(found, expected)


@pytest.mark.methods
def test_models_without_fine_tuning(clients):
    fedavg = algorithms.fedavg(distance, client_lr=0.5)
    assert (own_models(fedavg, None) == 0).all()
    still = algorithms.fedbabu(distance, client_lr=0.5, head="nothing", fine_tune_steps=0)
    assert (own_models(still, None) == 0).all()
    tuned = algorithms.with_fine_tuning(fedavg, distance, steps=1, client_lr=1.0)
    np.testing.assert_allclose(own_models(tuned, clients), [2, -1, 0, 5], rtol=1e-6)
    with pytest.raises(TypeError, match=r"train is None; fedavg\+fine_tuned fine-tunes"):
        client_models(tuned)
    with pytest.raises(ValueError, match="batch_size is 0"):
        client_models(tuned, clients, batch_size=0)
    with pytest.raises(ValueError, match="seed is -1"):
        client_models(tuned, clients, seed=-1)


def of_names(*names):
    """Two examples of each client, all of the value of its name."""
    value = {"a": 2.0, "b": -1.0, "c": 5.0, "d": 7.0}
    examples = {n: (np.full((2, 1), value[n], np.float32), np.zeros(2, np.int32)) for n in names}
    return data.from_clients(examples)


@pytest.mark.methods
def test_clients_are_matched_by_name():
    """A fine-tuned model is 7/8 of its client's value, and so right for that client alone."""
    method = algorithms.fedbabu(
        distance, client_lr=0.1, head="nothing", fine_tune_steps=3, fine_tune_lr=0.5
    )
    state, train = method.init({"p": jnp.zeros(1)}, 3), of_names("c", "a", "b")

    def is_own(params, examples):
        return jnp.abs(params["p"][0] - 7 / 8 * examples.x[:, 0]) < 1e-5, examples.x[:, 0]

    def score(train, tests):
        evaluate = build_personal_evaluation(is_own, client_models(method, train), tests)
        return np.asarray(evaluate(state)).tolist()

    for names in ("abc", "cab", "bca", "ac", "b"):
        assert score(train, of_names(*names)) == [1.0] * len(names)
    with pytest.raises(ValueError, match="clients has 'd', which is no client of the training"):
        score(train, of_names("a", "b", "d"))
    # Without names, by number.
    x, y = np.array([5.0, 2.0, -1.0], np.float32)[:, None], np.zeros(3, np.int32)
    numbered = data.partition((x, y), np.arange(3), num_clients=3)
    assert score(train, numbered) == score(numbered, train) == [1.0] * 3
    assert score(numbered, of_names("a", "b", "c")) == [0.0] * 3
    with pytest.raises(ValueError, match="clients has 2 clients and the state 3"):
        score(train, data.partition((x[:2], y[:2]), np.arange(2), num_clients=2))


@pytest.mark.parametrize("count", few(1, [3, 25]))
def test_means_over_clients_examples_and_the_worst_tenth(count):
    rng = np.random.default_rng(count)
    scores, sizes = rng.random(count), rng.integers(1, 9, count)
    scores[1], sizes[1] = np.nan, 0
    held = np.delete(np.arange(count), 1)
    tenth = -(-len(held) // 10)
    modes = (("accuracy", None), ("error", None), ("f1", "max"), ("error", "min"))
    for name, mode in modes:
        is_large_good = name in ("accuracy", "f1")
        worst = np.sort(scores[held])[:tenth] if is_large_good else np.sort(scores[held])[-tenth:]
        found = personal_scores(jnp.asarray(scores), jnp.asarray(sizes), name, mode=mode)
        expected = {
            f"personal_{name}": scores[held].mean(),
            f"personal_{name}_weighted": np.average(scores[held], weights=sizes[held]),
            f"personal_{name}_worst": worst.mean(),
        }
        assert {k: float(v) for k, v in found.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("broken", few(1, [np.inf, np.nan]))
def test_a_client_whose_error_is_not_finite_is_the_worst(broken):
    """Only clients without examples are left out: the number of the last one says nothing."""
    errors, sizes = np.array([0.5, broken, 0.25, 7.0]), np.array([3, 1, 2, 0])
    found = personal_scores(jnp.asarray(errors), jnp.asarray(sizes), "error")
    assert not any(np.isfinite(value) for value in found.values())
    assert found["personal_error_worst"] == np.inf
    found = personal_scores(jnp.asarray(errors), jnp.asarray(sizes * [1, 0, 1, 1]), "error")
    assert found["personal_error_worst"] == 0.5
    assert found["personal_error_weighted"] == pytest.approx(2 / 5)
    found = personal_scores(jnp.asarray(errors), jnp.asarray(sizes), "f1", mode="max")
    assert found["personal_f1_worst"] == -np.inf
    with pytest.raises(ValueError, match="mode is 'large'; it must be one of max, min"):
        personal_scores(jnp.asarray(errors), jnp.asarray(sizes), "f1", mode="large")


def test_nan_means_that_a_client_has_no_data(clients):
    """Models and errors that are not finite give the worst score."""
    own = jnp.asarray([jnp.nan, 1e30, 0.0, 0.0])  # the clients' models, of which 0 is right

    def errors(params, examples):
        return (jnp.square(params) + 0 * examples.x[:, 0],) * 2

    def rights(params, examples):  # as argmax does, which takes NaN for some class
        return (jnp.where(jnp.isnan(params), 1.0, params == 0) + 0 * examples.x[:, 0],) * 2

    errors.score = "mean_squared_error"
    for count, expected in ((errors, [np.inf, np.inf, np.nan, 0]), (rights, [0, 0, np.nan, 1])):
        evaluate = build_personal_evaluation(count, lambda state, i: state[i], clients)
        with jax.debug_nans(True):  # NaN is no fault here
            np.testing.assert_array_equal(evaluate(own), expected)
    of_all = build_client_evaluation(errors, clients)(jnp.asarray(jnp.nan))
    np.testing.assert_array_equal(of_all, [np.inf, np.inf, np.nan, np.inf])


def test_padding_is_told_and_devices_share_the_clients(clients):
    """With a copy of the models on each device, devices score their own clients."""
    own, masks, devices = jnp.arange(4.0), [], []

    def count(params, examples, *, mask):
        masks.append(mask.shape)
        devices.append(math.prod(jax.sharding.get_abstract_mesh().shape.values()))
        return jnp.where(mask, params + examples.x[:, 0], 1e9), jnp.zeros(mask.shape)

    count.score = "sum"
    expected = np.array([2.0, 0.0, np.nan, 8.0])
    everywhere = NamedSharding(jax.make_mesh((8,), ("all",)), PartitionSpec())
    for size in (2, 1000):
        evaluate = build_personal_evaluation(count, lambda state, i: state[i], clients, size)
        for models in (own, jax.device_put(own, everywhere)):
            np.testing.assert_array_equal(evaluate(models), expected)
            assert devices[-1] == len(models.devices())
        assert masks[-1] == (min(size, 3),)


def test_scores_of_inputs_that_are_not_finite_are_refused():
    """Of NaN, argmax says class 0, which may be right."""
    method = algorithms.fedavg(distance, client_lr=0.1)

    def count(params, examples):
        return examples.y == 0, distance(params, examples, None)

    for broken in (np.nan, np.inf):
        x, y = np.array([[1.0], [broken], [2.0]], np.float32), np.array([0, 0, 1])
        clients = data.from_clients({"a": (x[:1], y[:1]), "b": (x[1:], y[1:])})
        message = "1 examples of the clients b have values that are not finite, so a score"
        with pytest.raises(ValueError, match=message):
            build_client_evaluation(count, clients)
        with pytest.raises(ValueError, match=message):
            build_personal_evaluation(count, client_models(method), clients)
        # What a part does not hold is not looked at.
        (only_a,) = (p for p in data.split_clients(clients, held_out=1) if p.names == ("a",))
        build_client_evaluation(count, only_a)


def test_rows_on_the_host_are_scored(clients):
    """Client i's model is the value i + 1 of its row; only clients 0 and 3 took part."""
    method = algorithms.local_only(distance, client_lr=0.1)
    state = method.init({"p": jnp.zeros(1)}, 4)
    rows, structure = jax.tree.flatten(state.clients)
    assert len(rows) == 1
    table = HostTable(jax.tree.map(lambda leaf: leaf[0], state.clients), 4)
    table.write(np.array([0, 3]), structure.unflatten([np.array([[1.0], [4.0]], np.float32)]))
    state = state._replace(clients=table)
    own = np.array([1.0, 0.0, 0.0, 4.0])
    for i in range(4):
        np.testing.assert_array_equal(client_params(method, state, i)["p"], [own[i]])

    def count(params, examples):
        return (params["p"] - examples.x[:, 0],) * 2

    count.score = "error"
    found = build_personal_evaluation(count, client_models(method), clients)(state)
    np.testing.assert_allclose(found, [1 - 2.0, 0 + 1.0, np.nan, 4 - 5.0])


def test_of_nobody_there_is_no_score():
    found = personal_scores(jnp.full(3, jnp.nan), jnp.zeros(3, jnp.int32))
    assert all(np.isnan(value) for value in jax.tree.leaves(found))
