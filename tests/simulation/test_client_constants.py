"""Constants and weights of each client: what is read and averaged, against NumPy."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, build_round, data, simulate, sweep, tune, with_frozen
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.evaluate_personal import client_models
from fedjax_lab.simulation.placement import Placement
from tests.federations import of_sizes

N, B, STEPS, LR = 4, 6, 3, 0.5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, B, 3)).astype(np.float32)
Y = RNG.integers(0, 3, (N, B)).astype(np.int32)
MARGIN = (np.maximum([np.bincount(y, minlength=3) for y in Y], 1) ** -0.25).astype(np.float32)
OWNERS = np.repeat(np.arange(N), B)
EXAMPLES = data.Examples(X.reshape(-1, 3), Y.reshape(-1))
PARAMS = jnp.zeros((3, 3))
# All of a client's examples are its mini-batch.
CALL = {"rounds": 2, "eval_every": 1, "cohort_size": N, "local_steps": STEPS, "batch_size": B}


def fedlc(params, examples, key, constants):
    calibrated = examples.x @ params - constants["margin"][None]
    return optax.softmax_cross_entropy_with_integer_labels(calibrated, examples.y)


def in_numpy(weights=None):
    """FedAvg of softmax regressions with calibrated logits."""
    w = np.zeros((3, 3))
    for _ in range(CALL["rounds"]):
        ends = []
        for x, y, margin in zip(X.astype(float), Y, MARGIN.astype(float), strict=True):
            v = w
            for _ in range(STEPS):
                p = np.exp(x @ v - margin)
                p = p / p.sum(1, keepdims=True) - np.eye(3)[y]
                v = v - LR * x.T @ p / B
            ends.append(v)
        w = np.average(ends, 0, weights)
    return w


@pytest.fixture(scope="module")
def clients():
    return of_sizes([B] * N, *EXAMPLES)


FEDAVG = algorithms.fedavg(fedlc, client_lr=LR)
CONSTANTS = {"margin": MARGIN}


@pytest.mark.parametrize(
    "where",
    [
        {"client_map": "scan"},
        {"client_map": "shard_map:2"},
        pytest.param({"client_map": "chunk:3"}, marks=pytest.mark.methods),
        pytest.param({"client_map": "vmap"}, marks=pytest.mark.methods),
        pytest.param({"client_map": "pmap:2"}, marks=pytest.mark.methods),
        pytest.param({"client_map": "shard_map:3/vmap"}, marks=pytest.mark.methods),
        pytest.param({"client_map": "shard_map:2x2"}, marks=pytest.mark.methods),
    ],
    ids=lambda where: where["client_map"],
)
def test_fedlc_equals_numpy(clients, where):
    result = simulate(FEDAVG, PARAMS, clients, client_constants=CONSTANTS, **CALL, **where)
    np.testing.assert_allclose(result.params, in_numpy(), atol=1e-6)


def test_a_stream_a_sweep_and_a_loop_of_ones_own_equal_numpy(clients):
    stream = data.stream(EXAMPLES, OWNERS, N)
    streamed = simulate(FEDAVG, PARAMS, stream, client_constants=CONSTANTS, **CALL)
    swept = sweep(
        functools.partial(algorithms.fedavg, fedlc), PARAMS, clients,
        points=[{"client_lr": LR}], seeds=[0], client_constants=CONSTANTS, **CALL,
    )  # fmt: skip
    round_fn, state = build_round(FEDAVG, "scan"), FEDAVG.init(PARAMS, N)

    @jax.jit
    def step(state, clients, constants, t):
        draw = functools.partial(data.draw_batch, cohort_size=N, local_steps=STEPS, batch_size=B)
        batch = draw(clients, jax.random.key(0), t, client_constants=constants)
        return round_fn(state, batch)[0]

    for t in range(CALL["rounds"]):
        state = step(state, clients, CONSTANTS, jnp.int32(t))
    for found in (streamed.params, swept.params[0, 0], FEDAVG.params(state)):
        np.testing.assert_allclose(found, in_numpy(), atol=1e-6)


WEIGHTS = np.sqrt([9, 1, 0, 4])  # of the third client nothing counts


def test_a_mean_with_the_weight_of_each_client_equals_numpy(clients, tmp_path):
    call = {**CALL, "client_constants": CONSTANTS}
    found = simulate(FEDAVG, PARAMS, clients, weights=WEIGHTS, **call, run_dir=tmp_path / "run")
    np.testing.assert_allclose(found.params, in_numpy(WEIGHTS), atol=1e-6)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["arrays"]["weights"]["array"] == "0 to 3, mean 1.5"
    with pytest.raises(FileExistsError, match="client_weights"):
        simulate(FEDAVG, PARAMS, clients, weights=WEIGHTS + 1, **call, run_dir=tmp_path / "run")


@pytest.mark.methods
def test_weights_of_a_stream_a_sweep_and_a_batch(clients):
    call = {**CALL, "client_constants": CONSTANTS, "weights": list(WEIGHTS)}
    streamed = simulate(FEDAVG, PARAMS, data.stream(EXAMPLES, OWNERS, N), **call)
    build = functools.partial(algorithms.fedavg, fedlc)
    swept = sweep(build, PARAMS, clients, points=[{"client_lr": LR}], seeds=[0], **call)
    for params in (streamed.params, swept.params[0, 0]):
        np.testing.assert_allclose(params, in_numpy(WEIGHTS), atol=1e-6)
    batch = data.draw_batch(
        clients, jax.random.key(0), 0, cohort_size=2, local_steps=1, batch_size=B, weights=WEIGHTS
    )
    np.testing.assert_allclose(batch.weights, WEIGHTS[np.asarray(batch.client_ids)], rtol=1e-7)
    some = Schedule(2, B, local_steps=1, weights=WEIGHTS).of_clients(np.array([3, 0]), N)
    np.testing.assert_allclose(some.weights, WEIGHTS[[3, 0]], rtol=1e-7)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], r"weights has the shape \(2,\); .*'uniform', 'examples' or an array .* 4 cl"),
        ([1.0, -2.0, 1.0, 1.0], "weights are between -2.0 and 1.0; they must be finite"),
        ([1.0, np.nan, 1.0, 1.0], "they must be finite and at least 0"),
        (np.zeros(N), "one of them positive"),
        (None, "weights is None; it must be one of examples, uniform"),
    ],
)
def test_weights_are_checked(clients, weights, message):
    with pytest.raises(ValueError, match=message):
        data.draw_batch(
            clients, jax.random.key(0), 0, cohort_size=2, local_steps=1, batch_size=B,
            weights=weights,
        )  # fmt: skip


def number_of(params, examples, key, constants):
    return jnp.square(examples.x @ params).sum(-1), {"number": constants}


@pytest.mark.parametrize(
    ("method", "where"),
    [
        (algorithms.fedavg, {"sampling": "poisson", "client_map": "chunk:2"}),
        (algorithms.scaffold, {"client_store": "host", "client_map": "shard_map:2"}),
        pytest.param(
            algorithms.scaffold,
            {"client_store": "sharded", "client_map": "shard_map:2"},
            marks=pytest.mark.methods,
        ),
        pytest.param(
            functools.partial(algorithms.stem, momentum=0.9),
            {"client_map": "scan"},
            marks=pytest.mark.methods,
        ),
        pytest.param(
            functools.partial(algorithms.mime, momentum=0.9),
            {"client_map": "scan"},
            marks=pytest.mark.methods,
        ),
    ],
    ids=["padded slots", "host", "sharded", "first estimates", "full gradients"],
)
def test_each_client_reads_its_own_row_and_padding_reaches_no_sum(method, where):
    """The last of 6 clients has no data and NaN; padded slots read its row."""
    clients = data.partition(EXAMPLES, OWNERS, 6, min_size=0)
    numbers = np.array([1.0, 10, 100, 1000, np.nan, np.nan])
    call = {"cohort_size": 2, "local_steps": 1, "batch_size": 2}
    result = simulate(
        method(number_of, client_lr=0.1), PARAMS, clients, rounds=3, eval_every=1,
        client_constants=numbers, **call, **where,
    )  # fmt: skip
    call |= {"sampling": where.get("sampling", "without_replacement")}
    for t, row in enumerate(result.history):
        ids = np.asarray(data.draw_batch(clients, jax.random.key(0), t, **call).client_ids)
        there = numbers[ids[ids < 4]]
        expected = there.mean() if len(there) else np.nan
        np.testing.assert_allclose(row["number"], expected, rtol=1e-6)
    assert np.isfinite(result.params).all()


@pytest.mark.methods
def test_frozen_weights_and_clipped_examples_take_constants_too(clients):
    def loss_fn(params, examples, key, frozen, constants):
        return fedlc(params + frozen, examples, key, constants)

    build = functools.partial(algorithms.fedavg, client_lr=LR, example_clip=1e6)
    frozen = with_frozen(build, loss_fn, jnp.zeros((3, 3)))
    result = simulate(frozen, PARAMS, clients, client_constants=CONSTANTS, **CALL)
    np.testing.assert_allclose(result.params, in_numpy(), atol=1e-6)


def test_frozen_weights_add_no_constants_to_a_loss(clients, recwarn):
    """``client_models`` warns of those that the caller's own loss takes, and ``tune`` of them."""

    def build(loss):
        plain = algorithms.fedavg(loss, client_lr=LR)
        return algorithms.with_fine_tuning(plain, loss, steps=1, client_lr=LR)

    def without(params, examples, key, frozen):
        return fedlc(params + frozen, examples, key, CONSTANTS | {"margin": MARGIN[0]})

    def reads(params, examples, key, frozen, constants):
        return fedlc(params + frozen, examples, key, constants)

    client_models(with_frozen(build, without, jnp.zeros((3, 3))), clients)
    assert not recwarn
    frozen = with_frozen(build, reads, jnp.zeros((3, 3)))
    with pytest.warns(UserWarning, match=r"has an argument constants; .* is without them"):
        client_models(frozen, clients)
    with pytest.raises(ValueError, match=r"without a default.*set score"):
        tune(
            {"frozen": lambda client_lr: frozen}, {"client_lr": [0.1, 0.2]}, PARAMS, clients,
            rounds=2, budget=2, finalists=1, cohort_size=2, local_steps=1, batch_size=2,
            client_constants=CONSTANTS,
        )  # fmt: skip


def test_constants_are_sharded_like_client_rows_and_no_constants_of_a_program(clients):
    place = Placement(parse_client_map("shard_map:2"), "sharded")
    placed = place.clients(dataclasses.replace(clients, constants=CONSTANTS)).constants["margin"]
    assert {shard.data.shape for shard in placed.addressable_shards} == {(N // 2, 3)}
    batch = data.draw_batch(
        clients, jax.random.key(0), 0, cohort_size=2, local_steps=1, batch_size=B,
        client_constants=CONSTANTS,
    )  # fmt: skip
    traced = jax.make_jaxpr(build_round(FEDAVG, "vmap"))(FEDAVG.init(PARAMS, N), batch)
    assert not any(np.shape(value) == MARGIN.shape for value in traced.consts)


def test_a_run_directory_is_bound_to_them(clients, tmp_path):
    call = CALL | {"client_map": "scan", "run_dir": tmp_path / "a"}
    simulate(FEDAVG, PARAMS, clients, client_constants=CONSTANTS, **call)
    assert "client_constants" in json.loads((tmp_path / "a" / "config.json").read_text())
    with pytest.raises(FileExistsError, match="client_constants"):
        simulate(FEDAVG, PARAMS, clients, client_constants={"margin": MARGIN + 1}, **call)


def test_a_search_takes_those_of_its_training_clients_and_needs_a_score(clients):
    schedule = Schedule(2, 2, local_steps=1, client_constants={"a": np.arange(N)})
    left = schedule.of_clients(np.array([1, 3]), N).client_constants
    np.testing.assert_array_equal(left["a"], [1, 3])
    with pytest.raises(ValueError, match=r"without a default.*set score"):
        tune(
            {"fedavg": functools.partial(algorithms.fedavg, fedlc)}, {"client_lr": [0.1, 0.2]},
            PARAMS, clients, rounds=2, budget=2, finalists=1, cohort_size=2, local_steps=1,
            batch_size=2, client_constants=CONSTANTS,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("constants", "said"),
    [
        ({"margin": MARGIN[:-1]}, r"client_constants\['margin'\] has the shape \(3, 3\)"),
        ({"a": MARGIN, "b": 0.5}, r"client_constants\['b'\] has the shape \(\)"),
        (np.array(list("abcd")), "client_constants has an array of dtype"),
        ({}, "client_constants is {}; it must have at least one array"),
        (None, "loss_fn has an argument constants, and there are no constants"),
    ],
)
def test_wrong_constants_are_refused(clients, constants, said):
    with pytest.raises(ValueError, match=said):
        simulate(FEDAVG, PARAMS, clients, client_constants=constants, **CALL)


def test_fine_tuning_has_the_constants_of_its_client(clients):
    """A client whose loss is 0 times something does not move."""

    def weighted(params, examples, key, constants=None):
        losses = jnp.square(examples.x @ params - examples.y[:, None]).sum(-1)
        return losses if constants is None else constants * losses

    fedavg = algorithms.fedavg(weighted, client_lr=0.01)
    method = algorithms.with_fine_tuning(fedavg, weighted, steps=5, client_lr=0.01)
    factors = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    result = simulate(method, PARAMS, clients, client_constants=factors, **CALL)
    models = client_models(method, clients, client_constants=factors)
    still, moved = (models(result.state, jnp.int32(i)) for i in (0, 1))
    np.testing.assert_array_equal(still, result.params)
    assert np.abs(moved - result.params).max() > 1e-4
    with pytest.warns(UserWarning, match=r"has an argument constants; .* client_models, too"):
        client_models(method, clients)
    with pytest.raises(ValueError, match="must have an entry for each of the 4"):
        client_models(method, clients, client_constants=factors[:3])
