"""Buffered asynchronous aggregation: its event-driven twin, its limits, what it refuses."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    algorithms,
    build_round,
    with_attack,
    with_buffered_aggregation,
    with_compression,
    with_dp,
    with_personal,
    with_robust_aggregation,
    with_secure_aggregation,
)
from tests.algorithms.cases import N
from tests.algorithms.problem import flat, initial_params, loss_fn, stack_rounds
from tests.reference import problem as reference
from tests.reference.fedbuff_numpy import FedBuff
from tests.wrappers import teller

SLOW = pytest.mark.slow
K, ROUNDS = 3, 28
FEDAVG = algorithms.fedavg(loss_fn, client_lr=0.3, server_lr=0.8)


@functools.cache
def drawn(rounds=ROUNDS, slots=K):
    """Ragged rounds with absent clients and one round of nobody; seconds [rounds, slots]."""
    made = reference.make_rounds(5, rounds, slots, 3, 4, empty_round=9)
    seconds = np.random.default_rng(1).lognormal(0.0, 1.0, size=(rounds, slots))
    return made, seconds.astype(np.float32)


def run(algorithm, made, seconds=None, client_map="vmap"):
    """(state, metrics [rounds], params [rounds]) of one scan over given rounds."""
    batches = stack_rounds(made)
    if seconds is not None:
        batches = batches._replace(seconds=jnp.asarray(seconds))
    round_fn = build_round(algorithm, client_map)

    def body(state, batch):
        state, metrics = round_fn(state, batch)
        return state, (metrics, algorithm.params(state))

    @jax.jit
    def rounds(params, batches):
        return jax.lax.scan(body, algorithm.init(params, N), batches)

    state, (metrics, params) = rounds(initial_params(), batches)
    return state, metrics, params


def twin(concurrency, **options):
    made, seconds = drawn()
    found = FedBuff(
        reference.initial_point(),
        N,
        reference.gradient,
        client_lr=0.3,
        server_lr=0.8,
        buffer_size=K,
        concurrency=concurrency,
        **options,
    )
    return found.run([clients for clients, _ in made], seconds.astype(float))


def check_against_twin(concurrency, tolerance, staleness, of_twin):
    made, seconds = drawn()
    algorithm = with_buffered_aggregation(FEDAVG, K, concurrency, staleness=staleness)
    _, metrics, params = run(algorithm, made, seconds)
    steps = twin(concurrency, staleness=of_twin)
    with_step = [t for t, *_ in steps]
    assert len(steps) >= 18
    clock = np.cumsum(np.asarray(metrics["round_seconds"], float))
    for t, now, x, taus in steps:
        ours = flat(jax.tree.map(lambda leaf, t=t: leaf[t], params))
        np.testing.assert_allclose(ours, x, rtol=0, atol=tolerance, err_msg=f"round {t}")
        np.testing.assert_allclose(clock[t], now, rtol=10 * tolerance)
        assert metrics["staleness"][t] == pytest.approx(np.mean(taus or [0]), abs=tolerance)
    for t in {*range(ROUNDS)} - {*with_step}:
        before = reference.initial_point() if t == 0 else flat(_at(params, t - 1))
        np.testing.assert_array_equal(flat(_at(params, t)), before.astype(params["b"].dtype))
        assert metrics["round_seconds"][t] == metrics["delta_norm"][t] == 0
    assert max(tau for *_, taus in steps for tau in taus) >= 3  # some are stale indeed
    assert np.abs(steps[-1][2] - reference.initial_point()).max() > 0.1


def _at(params, t):
    return jax.tree.map(lambda leaf: leaf[t], params)


def test_it_agrees_with_an_event_driven_twin():
    check_against_twin(4 * K, 1e-5, "polynomial:0.5", None)


@SLOW
@pytest.mark.parametrize("concurrency", [2 * K, 4 * K])
def test_it_agrees_with_the_twin_in_float64(concurrency, x64):
    check_against_twin(concurrency, 1e-7, "constant", lambda tau: 1.0)
    check_against_twin(concurrency, 1e-7, lambda tau: 1 / (1 + tau), lambda tau: 1 / (1 + tau))


@SLOW
@pytest.mark.parametrize("client_map", ["scan", "chunk:2", "shard_map"])
def test_every_client_map(client_map):
    made, seconds = drawn()
    algorithm = with_buffered_aggregation(FEDAVG, K, 3 * K)
    expected, actual = (run(algorithm, made, seconds, m) for m in ("vmap", client_map))
    chex.assert_trees_all_close(actual[2], expected[2], atol=1e-5)
    np.testing.assert_array_equal(actual[0].server.version, expected[0].server.version)


def messages_of(algorithm, rounds, seconds=None):
    """What the server of a method, whose clients send 1, gets in each round; and the metrics."""
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    state, got, found = algorithm.init(teller.params(), teller.N), [], []
    for t in range(rounds):
        batch = teller.batch_of(np.ones((2, 2, teller.D), np.float32), round=t)
        if seconds is not None:
            batch = batch._replace(seconds=jnp.asarray(seconds[t], jnp.float32))
        state, metrics = round_fn(state, batch)
        got.append(float(state.server.server["got"]["first"]["v"][0]))
        found.append({name: float(value) for name, value in metrics.items()})
    return got, found


def test_staleness_and_its_weights_have_closed_forms():
    """Equal times, C = 3 K: tau is 0, 1 and then always 2, of which the weights are known."""
    plain = teller.teller({"first": "mean", "second": "sum"})
    algorithm = with_buffered_aggregation(plain, 2, 6, staleness="polynomial:0.5")
    got, metrics = messages_of(algorithm, 8, np.full((8, 2), 4.0))
    taus = [0, 0, 0, 1, 2, 2, 2, 2]
    assert [m["staleness"] for m in metrics] == taus
    expected = [0, 0, *((1 + tau) ** -0.5 for tau in taus[2:])]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    # Three cohorts are done at once, then they start one after the other at the same moment.
    assert [m["round_seconds"] for m in metrics] == [0, 0, 4, 0, 0, 4, 0, 0]
    algorithm = with_buffered_aggregation(plain, 2, 4, staleness=lambda tau: 3 - tau)
    got, metrics = messages_of(algorithm, 5)
    assert got == [0, 3, 2, 2, 2]
    assert "round_seconds" not in metrics[0]  # the batches say nothing of time


@pytest.mark.parametrize(
    "method",
    [
        FEDAVG,
        pytest.param(algorithms.fednova(loss_fn, client_lr=0.3), marks=SLOW),
        pytest.param(algorithms.fedadam(loss_fn, client_lr=0.3, server_lr=0.1), marks=SLOW),
        pytest.param(with_robust_aggregation(FEDAVG, "median"), marks=SLOW),
        pytest.param(with_compression(FEDAVG, "top_k:0.5", error_feedback=False), marks=SLOW),
    ],
    ids=lambda method: method.name,
)
def test_with_as_many_in_flight_as_in_the_buffer_it_is_the_method(method, x64):
    made, seconds = drawn(8, 4)
    expected = run(method, made)
    actual = run(with_buffered_aggregation(method, 4, 4), made, seconds)  # whatever these are
    chex.assert_trees_all_close(actual[2], expected[2], atol=1e-12)
    np.testing.assert_allclose(actual[1]["delta_norm"], expected[1]["delta_norm"], atol=1e-9)
    ids = np.stack([padded["client_ids"] for _, padded in made])
    waited = np.where(ids < N, seconds, 0).max(1)  # for whoever came, and not for a padded slot
    np.testing.assert_allclose(actual[1]["round_seconds"], waited)
    assert (actual[1]["staleness"] == 0).all()


def test_weights_of_several_rounds_are_compared_as_they_were_given():
    """Two clients of weight 1 and 3 from rounds in which they are alone do not count alike."""
    algorithm = with_buffered_aggregation(teller.teller(), 2, 4, staleness="constant")
    state = algorithm.init(teller.params(), teller.N)
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    for t, (value, weight) in enumerate([(1.0, 1.0), (5.0, 3.0)]):
        said = np.full((2, 2, teller.D), value, np.float32)
        batch = teller.batch_of(
            said, weights=[weight, 1.0], participates=[True, False], ids=[2 * t, 2 * t + 1], round=t
        )
        # Those who take part are done first, those who fail last.
        state, _ = round_fn(state, batch._replace(seconds=jnp.asarray([1.0, 2.0])))
    got = teller.to_vector(state.server.server["got"]["first"])
    np.testing.assert_allclose(got, (1 * 1 + 3 * 5) / 4, rtol=1e-6)


def test_a_client_that_fails_holds_its_place():
    algorithm = with_buffered_aggregation(teller.teller(), 2, 4)
    state = algorithm.init(teller.params(), teller.N)
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    ones = np.ones((2, 2, teller.D), np.float32)
    waited = []
    for t, (present, seconds) in enumerate(
        [([1, 1], [9, 8]), ([1, 0], [3, 1]), ([0, 0], [1, 1]), ([1, 1], [1, 1]), ([1, 1], [9, 9])]
    ):
        batch = teller.batch_of(ones, participates=np.array(present, bool), round=t)
        before = state
        state, metrics = round_fn(state, batch._replace(seconds=jnp.asarray(seconds, jnp.float32)))
        waited.append(float(metrics["round_seconds"]))
        if t == 2:
            chex.assert_trees_all_equal(state, before)
    # The failed one of round 1 is done after 1, its neighbour after 3; round 2 finds nobody.
    assert waited == [0, 3, 0, 1, 5]


def test_a_place_without_a_client_is_empty():
    """Two clients come to each round, three are a buffer: the clock and messages, by hand."""
    algorithm = with_buffered_aggregation(teller.teller({"first": "sum"}), 3, 6)
    state = algorithm.init(teller.params(), teller.N)
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    ones = np.ones((3, 1, teller.D), np.float32)
    rows = []
    for t in range(5):
        ids = [2 * t % teller.N, (2 * t + 1) % teller.N, teller.N]
        batch = teller.batch_of(ones, ids=ids, round=t)
        seconds = jnp.asarray([5.0, 7.0, 0.0])  # as times.seconds gives them
        state, metrics = round_fn(state, batch._replace(seconds=seconds))
        in_flight = int((state.server.in_flight.client_ids < teller.N).sum())
        sent = float(teller.to_vector(state.server.server["got"]["first"])[0])
        rows.append((float(metrics["round_seconds"]), in_flight, int(state.server.version), sent))
    # Four start at 0. Three are done after 5, 5 and 7; one is left, of which 0 seconds remain.
    # With two more there are three at 7, and the last of them needs 7.
    once, again = (1, 3), (2, 3 * 2**-0.5 / 3 + 2)
    assert [row[:3] for row in rows] == [(0, 2, 0), (7, 1, 1), (7, 0, 2), (0, 2, 2), (7, 1, 3)]
    assert rows[1][2:] == once
    assert rows[2][2] == again[0]
    assert rows[2][3] == pytest.approx(again[1], rel=1e-6)


def refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_what_has_no_meaning_is_refused_with_the_reason():
    scaffold = with_buffered_aggregation(algorithms.scaffold(loss_fn, client_lr=0.1), 2, 4)
    refused(lambda: scaffold.init(initial_params(), N), "clients have state; .* versions")
    compressed = with_buffered_aggregation(with_compression(FEDAVG, "top_k:0.5"), 2, 4)
    refused(lambda: compressed.init(initial_params(), N), "clients have state")
    buffered = with_buffered_aggregation(FEDAVG, 2, 4)
    for outer in (
        lambda: with_buffered_aggregation(buffered, 2, 4),
        lambda: with_compression(buffered, "sign"),
        lambda: with_dp(buffered, 1.0, 0.1),
        lambda: with_secure_aggregation(buffered, 32, 8.0),
        lambda: with_robust_aggregation(buffered, "median"),
        lambda: with_personal(buffered, lambda path: path == "b"),
        lambda: with_buffered_aggregation(with_dp(FEDAVG, 1.0, 0.1), 2, 4),
        lambda: with_buffered_aggregation(with_secure_aggregation(FEDAVG, 32, 8.0), 2, 4),
        lambda: with_buffered_aggregation(with_attack(FEDAVG, "alie", share=0.3), 2, 4),
        lambda: with_buffered_aggregation(with_personal(FEDAVG, lambda path: path == "b"), 2, 4),
    ):
        refused(outer, r"cannot wrap with_\w+; \w+")
    mime = algorithms.mime(loss_fn, client_lr=0.1, momentum=0.9)
    refused(lambda: with_buffered_aggregation(mime, 2, 4), "mime, which has 2 exchanges")
    gradma = algorithms.gradma_s(loss_fn, client_lr=0.1, memory_size=4)
    refused(lambda: with_buffered_aggregation(gradma, 2, 4), "needs the")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "buffer_size is 0"),
        ((4, 2), "concurrency is 2; it must be at least 4"),
        ((4, 10), "concurrency is 10; it must be a multiple of buffer_size, 4"),
        ((4, 8, "linear"), "staleness is 'linear'; it must be one of constant, polynomial"),
        ((4, 8, "polynomial"), "it must be polynomial:A"),
        ((4, 8, "polynomial:-1"), "staleness is -1.0"),
        ((4, 8, "constant:1"), "constant takes no number"),
    ],
)
def test_bad_arguments(arguments, message):
    buffer_size, concurrency, *rest = arguments
    options = {"staleness": rest[0]} if rest else {}
    refused(lambda: with_buffered_aggregation(FEDAVG, buffer_size, concurrency, **options), message)


def test_a_number_is_no_staleness():
    with pytest.raises(TypeError, match=r"staleness is 0\.5; it must be text"):
        with_buffered_aggregation(FEDAVG, 4, 8, staleness=0.5)


def test_a_cohort_of_another_size_and_a_wrong_function_are_errors():
    batch = teller.batch_of(np.ones((3, 2, teller.D), np.float32))
    for algorithm, message in (
        (with_buffered_aggregation(teller.teller(), 2, 4), "the cohort has 3"),
        (
            with_buffered_aggregation(teller.teller(), 3, 6, staleness=lambda tau: tau.sum()),
            r"staleness returned an array of shape \(\)",
        ),
    ):
        state = algorithm.init(teller.params(), teller.N)
        refused(lambda a=algorithm, s=state: build_round(a, "vmap")(s, batch), message)


@SLOW
def test_an_attack_goes_around_it():
    algorithm = with_attack(with_buffered_aggregation(FEDAVG, K, 2 * K), "sign_flip", share=0.3)
    made, seconds = drawn()
    _, _, params = run(algorithm, made[:6], seconds[:6])
    assert np.isfinite(flat(_at(params, -1))).all()
    assert algorithm.wrappers == ("buffered", "attack")
