"""Personal leaves: against NumPy, at the edges, and in what is sent and kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import (
    algorithms,
    build_round,
    data,
    simulate,
    with_compression,
    with_personal,
)
from fedjax_lab.simulation.evaluate_personal import build_personal_evaluation
from fedjax_lab.wrappers import client_params, personal_first
from tests.algorithms.problem import (
    CLIENT_MAPS,
    flat,
    initial_params,
    loss_fn,
    run_rounds,
    to_batch,
)
from tests.federations import reporting
from tests.reference import problem as reference
from tests.reference.base import cohort_weights, participants

MORE = pytest.mark.methods
N, RATE = reference.NUM_CLIENTS, 0.2
SHARED, OWN = reference.LEAVES  # W is shared, b personal


def is_bias(path):
    return path == "b"


def rounds(count=6, **more):
    return reference.make_rounds(5, count, cohort_size=4, max_steps=3, batch_size=4, **more)


def by_hand(drawn, step, controls=False):
    """(shared leaves, own leaves [N, ...]) of FedAvg or SCAFFOLD with personal leaves.

    ``step`` is (gradient, y, x, control) -> direction, where x holds the client's own leaves of
    the round's start, and the control is 0 there.
    """
    x = reference.initial_point()
    own = np.tile(x[OWN], (N, 1))
    c, c_i = np.zeros_like(x), np.zeros((N, x.size))
    for clients, _ in drawn:
        clients = participants(clients)
        moves, changes = [], []
        for client in clients:
            start = np.concatenate([x[SHARED], own[client.id]])
            y, control = start.copy(), c - c_i[client.id]
            control[OWN] = 0
            for minibatch in client.minibatches:
                y = y - RATE * step(reference.gradient(y, minibatch), y, start, control)
            own[client.id] = y[OWN]
            moves.append(start - y)
            changes.append((start - y) / (client.steps * RATE) - c if controls else 0 * c)
        weights = cohort_weights(clients)
        for client, change in zip(clients, changes, strict=True):
            c_i[client.id] += change
        if clients:
            x[SHARED] -= sum(w * d for w, d in zip(weights, moves, strict=True))[SHARED]
            c = c + sum(changes) / N
    return x[SHARED], own


def run(algorithm, drawn, client_map="vmap"):
    state = algorithm.init(initial_params(), N)
    return run_rounds(build_round(algorithm, client_map), state, drawn)[0]


def check(algorithm, expected, drawn, client_map="vmap"):
    state = run(algorithm, drawn, client_map)
    shared, own = expected
    assert np.abs(own - reference.initial_point()[OWN]).max() > 0.05
    for client in range(N):
        params = flat(client_params(algorithm, state, client))
        np.testing.assert_allclose(params[SHARED], shared, atol=1e-9)
        np.testing.assert_allclose(params[OWN], own[client], atol=1e-9)
    np.testing.assert_allclose(flat(algorithm.params(state))[OWN], own.mean(0), atol=1e-9)


@pytest.mark.parametrize(
    "client_map",
    [
        pytest.param(name, marks={"shard_map": (), "vmap": MORE}.get(name, pytest.mark.slow))
        for name in CLIENT_MAPS
    ],
)
def test_fedper_is_fedavg_with_a_personal_head(client_map, x64):
    drawn = rounds()
    algorithm = with_personal(algorithms.fedavg(loss_fn, client_lr=RATE), is_bias)
    check(algorithm, by_hand(drawn, lambda g, y, x, c: g), drawn, client_map)


def test_a_proximal_term_pulls_own_leaves_to_those_of_the_start(x64):
    drawn = rounds()
    method = algorithms.fedprox(loss_fn, client_lr=RATE, prox_weight=0.5)
    expected = by_hand(drawn, lambda g, y, x, c: g + 0.5 * (y - x))
    check(with_personal(method, is_bias), expected, drawn)


@pytest.mark.slow
def test_control_variates_leave_own_leaves_alone(x64):
    drawn = rounds()
    method = algorithms.scaffold(loss_fn, client_lr=RATE)
    expected = by_hand(drawn, lambda g, y, x, c: g + c, controls=True)
    check(with_personal(method, is_bias), expected, drawn)


def test_fedrep_moves_one_part_after_the_other(x64):
    drawn = rounds(equal_steps=True)
    taken = []

    def step(g, y, x, c):
        first = len(taken) % 3 < 2
        taken.append(first)
        g = g.copy()
        g[SHARED if first else OWN] = 0
        return g

    rep = personal_first(is_bias, 2)
    method = algorithms.fedavg(loss_fn, client_lr=RATE, step_transform=rep)
    check(with_personal(method, is_bias), by_hand(drawn, step), drawn)


METHODS = {
    "fedavgm": {},
    "fedadam": {"server_lr": 0.1},
    "feddyn": {"prox_weight": 0.1},
    "fedspeed_ing": {"inertia": 0.3},
    "fedcm": {"mixing": 0.3},
    "fedmoswa": {},
    "fedacg": {"momentum": 0.9, "prox_weight": 0.1},
    "fedsmoo": {"perturbation_radius": 0.1, "prox_weight": 0.1},
    "gradma": {"memory_size": N},
    "mifa": {},
    "fednova": {},
    "fedadmm": {},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks={"fedspeed_ing": (), "fedadmm": MORE}.get(name, pytest.mark.slow))
        for name in METHODS
    ],
)
def test_personal_leaves_are_never_sent(name):
    method = algorithms.ALGORITHMS[name](loss_fn, client_lr=RATE, **METHODS[name])
    algorithm = with_personal(method, is_bias)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), initial_params())
    shared, everything = 4 * 15, 4 * 18
    for bytes_, plain in (
        (algorithm.uplink(params), method.uplink(params)),
        (algorithm.downlink(params), method.downlink(params)),
    ):
        vectors, rest = divmod(plain, everything)
        assert bytes_ == vectors * shared + rest
    state = run(algorithm, rounds(3))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    # What the server holds of them is still what it began with.
    again = algorithm.init(initial_params(), N)
    for before, after in zip(
        *(jax.tree.leaves(method.params(s._replace(clients=()))) for s in (again, state)),
        strict=True,
    ):
        assert np.array_equal(before, after) == (before.shape == (3,))


@pytest.mark.methods
def test_one_algorithm_for_two_models_of_which_one_holds_the_other():
    """The first model's plan fits a part of the second's broadcast: it is not the second's."""

    def loss(params, examples, key):
        own = jnp.square(params["own"] - 1).sum() if "own" in params else 0
        return loss_fn(params.get("net", params), examples, key) + own

    def finish(algorithm):
        state = algorithm.init({"net": initial_params(), "own": jnp.zeros(2)}, N)
        return run_rounds(build_round(algorithm, "vmap"), state, drawn)[0]

    drawn = rounds(2)
    make = functools.partial(
        with_personal,
        algorithms.fedavg(loss, client_lr=RATE),
        lambda path: path in ("b", "own"),
    )
    used, fresh = make(), make()
    used.init(initial_params(), N)
    for actual, expected in zip(*map(jax.tree.leaves, map(finish, (used, fresh))), strict=True):
        np.testing.assert_array_equal(actual, expected)
    own = client_params(used, finish(used), drawn[-1][0][0].id)["own"]
    assert (np.asarray(own) > 0.1).all()


def test_what_absent_clients_hold_stays_bit_for_bit():
    algorithm = with_personal(algorithms.fedavg(loss_fn, client_lr=RATE), is_bias)
    drawn = rounds(2)
    first = run(algorithm, drawn[:1])
    second, _ = jax.jit(build_round(algorithm, "vmap"))(first, to_batch(drawn[1][1], 1))
    came = {client.id for client in participants(drawn[1][0])}
    (before,), (after,) = first.clients.personal, second.clients.personal
    for client in range(N):
        assert np.array_equal(before[client], after[client]) == (client not in came)


def test_it_goes_into_compression_and_not_over_it():
    method = algorithms.fedavg(loss_fn, client_lr=RATE)
    drawn = rounds(3)
    plain = with_personal(method, is_bias)
    compressed = with_compression(plain, "identity")
    for one, other in zip(
        *(jax.tree.leaves(client_params(a, run(a, drawn), 2)) for a in (plain, compressed)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)
    with pytest.raises(ValueError, match=r"with_compression\(with_personal"):
        with_personal(with_compression(method, "sign"), is_bias).init(initial_params(), N)


def test_what_lacks_the_local_model_is_refused():
    reports_less = reporting(algorithms.fedavg(loss_fn, client_lr=RATE), "loss")
    with pytest.raises(ValueError, match="no entry 'local_params'; with_personal requires"):
        run(with_personal(reports_less, is_bias), rounds(1))


def test_a_run_counts_shared_leaves_alone():
    """In its history's totals, as in the metrics of its rounds."""
    x, y = (np.concatenate(arrays) for arrays in zip(*reference.client_data(), strict=True))
    owners = np.repeat(np.arange(N), reference.SIZES)
    examples = {"x": x.astype(np.float32), "y": y.astype(np.int32)}
    clients = data.partition(examples, owners, num_clients=N)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), initial_params())
    algorithm = with_personal(algorithms.fedavg(loss_fn, client_lr=RATE), is_bias)
    result = simulate(
        algorithm, params, clients, rounds=3, cohort_size=2, local_steps=1, batch_size=2,
        replace=True, eval_every=3, client_map="scan",
        diagnose=lambda state: {"own": np.linalg.norm(state.clients.personal[0], axis=1)},
    )  # fmt: skip
    row = result.history[-1]
    assert row["bytes_up"] == row["bytes_down"] == 3 * 2 * 4 * 15
    np.testing.assert_allclose(row["own"], np.linalg.norm(result.state.clients.personal[0], axis=1))


def test_the_mean_of_equal_own_leaves_is_exact_and_the_function_is_recorded():
    method = with_personal(algorithms.fedavg(loss_fn, client_lr=RATE), is_bias)
    model = {**initial_params(), "b": jnp.asarray([0.1, 1 / 3, 0.7])}
    state = method.init(model, 10)
    jax.tree.map(np.testing.assert_array_equal, method.params(state), model)
    assert method.hyperparameters["is_personal"]["function"].endswith("is_bias")


def test_mistakes_are_named():
    for name in ("mime", "fedpd"):
        more = {"momentum": 0.9} if name == "mime" else {}
        method = algorithms.ALGORITHMS[name](loss_fn, client_lr=RATE, **more)
        with pytest.raises(ValueError, match=f"algorithm is {name}, which has 2 exchanges"):
            with_personal(method, is_bias)
    method = algorithms.fedavg(loss_fn, client_lr=RATE)
    for is_personal, word in ((lambda path: False, "no"), (lambda path: True, "all")):
        with pytest.raises(ValueError, match=f"is true for {word} leaves .* The leaves are W, b"):
            with_personal(method, is_personal).init(initial_params(), N)
    with pytest.raises(ValueError, match="steps is 0"):
        personal_first(is_bias, 0)
    assert isinstance(personal_first(is_bias, 1), optax.GradientTransformation)


def test_a_client_that_is_not_there_has_no_model():
    algorithm = with_personal(algorithms.fedavg(loss_fn, client_lr=RATE), is_bias)
    state = algorithm.init(initial_params(), N)
    (table,) = state.clients.personal
    table = table.at[2].set(7)
    state = state._replace(clients=state.clients._replace(personal=(table,)))
    for client in (2, jnp.int32(2), np.array(2), np.int64(2)):
        assert (np.asarray(client_params(algorithm, state, client)["b"]) == 7).all()
    for client in (-1, N, jnp.int32(N)):
        with pytest.raises(
            ValueError, match=f"client_id is {client}; it must be between 0 and {N - 1}"
        ):
            client_params(algorithm, state, client)
    for client in (1.5, np.array([0, 1]), "2"):
        with pytest.raises(TypeError, match=r"client_id is .*; it must be an integer"):
            client_params(algorithm, state, client)
    traced = jax.jit(lambda state, i: client_params(algorithm, state, i))(state, 2)
    np.testing.assert_array_equal(traced["b"], table[2])


@pytest.mark.parametrize("batch_size", [4, pytest.param(1000, marks=MORE)])
def test_each_client_is_evaluated_with_its_own_model(batch_size):
    algorithm = with_personal(algorithms.fedavg(loss_fn, client_lr=RATE), is_bias)
    state = run(algorithm, rounds(4))
    held = reference.client_data(seed=1)
    x, y = (np.concatenate(arrays) for arrays in zip(*held, strict=True))
    owners = np.repeat(np.arange(N), reference.SIZES)
    owners[owners == 2] = 1  # who holds other examples, too; client 2 has none
    clients = data.partition(data.Examples(x, y), owners, num_clients=N, min_size=0)

    def count(params, examples):
        logits = examples.x @ params["W"] + params["b"][None]
        return (logits.argmax(-1) == examples.y).astype(float), jnp.zeros(len(examples.y))

    evaluate = build_personal_evaluation(
        count, functools.partial(client_params, algorithm), clients, batch_size
    )
    accuracy = np.asarray(evaluate(state))
    assert np.isnan(accuracy[2])
    for i in set(range(N)) - {2}:
        params = flat(client_params(algorithm, state, i))
        weights, bias = reference.unpack(params)
        right = (x[owners == i] @ weights + bias).argmax(1) == y[owners == i]
        assert accuracy[i] == pytest.approx(right.mean())
