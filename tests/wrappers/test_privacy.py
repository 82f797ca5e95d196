"""Differential privacy: sensitivity, noise, accounting, and what is refused."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import (
    algorithms,
    build_round,
    data,
    privacy,
    simulate,
    sweep,
    with_compression,
    with_dp,
)
from tests import federations
from tests.algorithms.cases import MAIN
from tests.algorithms.cases import N as CLIENTS
from tests.algorithms.problem import CLIENT_MAPS, drawn, finish, loss_fn
from tests.federations import softmax_loss
from tests.tiers import few
from tests.wrappers.teller import D, N, batch_of, params, teller, to_vector

SUMS = {"first": "sum", "second": "sum"}


def vectors(got, cases):
    """[cases, 2 D] of what servers got."""
    leaves = [np.asarray(leaf).reshape(cases, -1) for leaf in jax.tree.leaves(got)]
    return np.concatenate(leaves, 1)


@pytest.mark.parametrize(
    "compressor",
    [
        None,
        pytest.param("random_drop:0.5", marks=pytest.mark.slow),
        pytest.param("qsgd:2", marks=pytest.mark.slow),
    ],
)
def test_one_client_changes_the_sum_by_two_clip_norms_at_most(compressor):
    """10,000 cases of ragged cohorts and messages of all sizes; by one where it stays away."""
    cases, clip = 10_000, 0.8
    rng = np.random.default_rng(0)
    size = 10.0 ** rng.uniform(-4, 6, (cases, N, 1, 1))
    messages = (rng.normal(size=(cases, N, 2, D)) * size).astype(np.float32)
    present = rng.random((cases, N)) < rng.random((cases, 1))
    replaced, opposite = messages.copy(), rng.random(cases) < 0.5
    who = np.arange(cases), rng.integers(0, N, cases)
    replaced[who] = np.where(
        opposite[:, None, None], -messages[who], rng.normal(size=(cases, 2, D)) * 1e3
    )
    method = teller(SUMS)
    if compressor:
        method = with_compression(method, compressor)
    algorithm = with_dp(method, clip, 0.0)
    state = algorithm.init(params(), N)
    batch = batch_of(messages[0], participates=present[0])

    def received(state, batch, messages, present, key):
        one = batch._replace(
            examples=messages[:, None, None], participates=present, key=jax.random.key(key)
        )
        server = build_round(algorithm, "vmap")(state, one)[0].server.inner
        return server["got"]

    many = jax.jit(jax.vmap(received, in_axes=(None, None, 0, 0, 0)))
    keys = jnp.arange(cases)
    fewer = present.copy()
    fewer[who] = False
    before, after, without = (
        vectors(many(state, batch, *given, keys), cases)
        for given in ((messages, present), (replaced, present), (messages, fewer))
    )
    moved = np.linalg.norm(before - after, axis=1)
    assert moved.max() <= 2 * clip * (1 + 1e-5)
    assert moved.max() > 1.99 * clip
    absent = ~present[who]
    assert absent.sum() > 1000
    assert (moved[absent] == 0).all()
    alone = np.linalg.norm(before - without, axis=1)
    assert alone.max() <= clip * (1 + 1e-5)
    assert alone.max() > 0.99 * clip


def test_all_fields_are_one_vector():
    """Against NumPy, with clients inside and outside the clip norm."""
    messages = np.random.default_rng(1).normal(size=(N, 2, D)) * [[[0.1], [0.5]]]
    norms = np.sqrt((messages**2).sum((1, 2)))
    clip = float(np.median(norms))
    short = messages * np.minimum(1, clip / norms)[:, None, None]
    expected = np.stack([short[:, 0].mean(0), short[:, 1].sum(0)])
    algorithm = with_dp(teller(), clip, 0.0)
    state, metrics = jax.jit(build_round(algorithm, "scan"))(
        algorithm.init(params(), N), batch_of(messages.astype(np.float32))
    )
    got = np.stack([to_vector(field) for field in state.server.inner["got"].values()])
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert metrics["clipped_clients"] == pytest.approx((norms > clip).mean())
    assert metrics["clip_norm"] == pytest.approx(clip)


def many_rounds(algorithm, rounds, participants=N):
    """The server after one round with each of the keys of so many seeds, where all send zeros."""
    batch = batch_of(np.zeros((N, 2, D), np.float32), participates=np.arange(N) < participants)

    @jax.jit
    def run(state, batch, seeds):
        def one(seed):
            return build_round(algorithm, "vmap")(state, batch._replace(key=jax.random.key(seed)))

        return jax.vmap(one)(seeds)[0].server

    return run(algorithm.init(params(), N), batch, jnp.arange(rounds))


def noise_of(rounds, participants=N):
    """What a server of multiplier 0.7 and clip norm 2 gets: [rounds, 2 D], of the sums."""
    server = many_rounds(with_dp(teller(SUMS), 2.0, 0.7), rounds, participants)
    return vectors(server.inner["got"], rounds)


def test_the_noise_is_what_was_asked_for():
    """Standard deviation, normality, independence of rounds and numbers; not of the clients."""
    noise = noise_of(1500)
    assert noise.std() == pytest.approx(0.7 * 2.0, rel=0.02)
    assert abs(noise.mean()) < 5 * 1.4 / np.sqrt(noise.size)
    assert stats.kstest(noise.ravel() / 1.4, "norm").pvalue > 1e-4
    between_numbers = np.corrcoef(noise.T)[np.triu_indices(2 * D, 1)]
    between_rounds = np.mean(noise[1:] * noise[:-1]) / 1.4**2
    assert np.abs(between_numbers).max() < 0.13
    assert abs(between_rounds) < 5 / np.sqrt(noise.size)
    np.testing.assert_array_equal(noise_of(3), noise_of(3, participants=4))


@pytest.mark.parametrize(
    "client_map",
    [pytest.param(m, marks=() if m == "shard_map" else pytest.mark.slow) for m in CLIENT_MAPS[1:]],
)
def test_the_draw_is_the_same_on_all_devices(client_map):
    """Bit for bit, since all send zeros; each device holds the same."""
    assert jax.device_count() == 8
    algorithm = with_dp(teller(SUMS), 2.0, 0.7)
    state, _ = jax.jit(build_round(algorithm, client_map))(
        algorithm.init(params(), N), batch_of(np.zeros((N, 2, D), np.float32))
    )
    got = state.server.inner["got"]
    np.testing.assert_array_equal(
        vectors(jax.tree.map(lambda x: x[None], got), 1)[0], noise_of(3)[0]
    )
    for leaf in jax.tree.leaves(got):
        assert leaf.is_fully_replicated
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all((copy == copies[0]).all() for copy in copies)


@pytest.mark.slow
def test_both_numbers_may_be_swept():
    """As arguments of one program they do what they do as numbers."""
    messages = np.random.default_rng(5).normal(size=(N, 2, D)).astype(np.float32)
    batch = batch_of(messages)

    def received(clip_norm, z, batch):
        algorithm = with_dp(teller(SUMS), clip_norm, z)
        state, _ = algorithm.round_fn(algorithm.init(params(), N), batch)
        return state.server.inner["got"]

    swept = jax.jit(jax.vmap(received, in_axes=(0, 0, None)))
    points = [(1.0, 0.0), (3.0, 0.5)]
    together = vectors(swept(*map(jnp.asarray, zip(*points, strict=True)), batch), 2)
    for row, point in zip(together, points, strict=True):
        alone = jax.tree.map(lambda leaf: leaf[None], received(*point, batch))
        np.testing.assert_allclose(row, vectors(alone, 1)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_exchanges_have_their_own_noise():
    plain = teller({"first": "sum"})
    twice = type(plain)("twice", plain.start, plain.phases * 2, plain.params)
    sums = []
    for method in (plain, twice):
        algorithm = with_dp(method, 1.0, 1.0)
        state, _ = jax.jit(algorithm.round_fn)(
            algorithm.init(params(), N), batch_of(np.zeros((N, 2, D), np.float32))
        )
        sums.append(to_vector(state.server.inner["got"]["first"]))
    assert np.abs(sums[0] - sums[1]).min() > 1e-6


@pytest.mark.parametrize(
    ("name", "client_map"),
    [("scaffold", "vmap")]
    + [pytest.param("fedavg", m, marks=pytest.mark.slow) for m in CLIENT_MAPS],
)
@pytest.mark.slow
def test_without_noise_and_far_from_the_clip_it_is_the_plain_method(name, client_map, x64):
    plain = getattr(algorithms, name)(loss_fn, client_lr=0.2)
    expected, _ = finish(plain, drawn(5, has_weights=False), client_map)
    actual, metrics = finish(with_dp(plain, 1e6, 0.0), drawn(5, has_weights=False), client_map)
    chex.assert_trees_all_close(actual.server.inner, expected.server, atol=1e-12)
    chex.assert_trees_all_close(actual.clients, expected.clients, atol=1e-12)
    assert metrics["clipped_clients"] == 0


def test_a_client_that_is_not_finite_changes_nothing_but_its_own_part():
    """It sends zeros, keeps its row and counts: who is in the mean does not depend on its data."""
    algorithm = with_dp(teller(stateful=True), 1e3, 0.0)
    messages = np.random.default_rng(2).normal(size=(N, 2, D)).astype(np.float32)
    broken = messages.copy()
    broken[3, 0, 0], messages[3] = np.nan, 0
    round_fn = jax.jit(algorithm.round_fn)
    state, metrics = round_fn(algorithm.init(params(), N), batch_of(broken))
    expected, _ = round_fn(algorithm.init(params(), N), batch_of(messages))
    chex.assert_trees_all_equal(state.server, expected.server)
    assert metrics["participants"] == N
    assert metrics["clipped_clients"] == pytest.approx(1 / N)
    np.testing.assert_array_equal(state.clients, np.arange(N) != 3)


def test_the_clip_norm_finds_its_quantile():
    """Andrew et al.'s update in NumPy, without noise; it ends where 7 of 9 are within."""
    messages = np.random.default_rng(3).normal(size=(N, 2, D)).astype(np.float32)
    messages *= np.linspace(0.2, 2, N, dtype=np.float32)[:, None, None]
    norms = np.sqrt((messages.astype(float) ** 2).sum((1, 2)))
    algorithm = with_dp(teller(), 0.1, 0.0, adaptive_quantile=0.75)
    state, clip = algorithm.init(params(), N), 0.1
    round_fn = jax.jit(algorithm.round_fn)
    for t in range(40):
        state, metrics = round_fn(state, batch_of(messages, seed=t))
        assert metrics["clip_norm"] == pytest.approx(clip, rel=1e-4)
        clip *= math.exp(-0.2 * ((norms <= clip).mean() - 0.75))
    assert np.sort(norms)[5] < clip < np.sort(norms)[7] * 1.05
    assert algorithm.uplink(params()) == teller().uplink(params()) + 4
    assert algorithm.downlink(params()) == teller().downlink(params()) + 4


def test_the_noise_of_the_count_and_of_the_messages_under_an_adaptive_clip():
    """Together they cost what the noise multiplier does: 1/z² = 1/z_Δ² + 1/(2 σ_b)²."""
    rounds, z, clip = 1500, 0.6, 2.0
    algorithm = with_dp(teller(SUMS), clip, z, adaptive_quantile=0.5)
    server = many_rounds(algorithm, rounds)
    count_sd = N * np.std(np.log(np.asarray(server.clip[:, 0]) / clip) / -0.2)
    sum_sd = vectors(server.inner["got"], rounds).std() / clip
    assert count_sd == pytest.approx(max(N / 20, z), rel=0.06)
    assert sum_sd == pytest.approx((z**-2 - (2 * max(N / 20, z)) ** -2) ** -0.5, rel=0.02)


REFUSED = {
    "gradma": "delta of each client",
    "gradma_s": "delta of each client",
    "fedexp": "delta of each client",
    "local_only": "clients send no messages",
    "fednova": "number of local steps of each client",
}
FEW = ("fedavg", *REFUSED)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c.id in FEW else pytest.mark.slow) for c in MAIN],
    ids=lambda case: case.id,
)
@pytest.mark.slow
def test_every_method(case):
    """Those that are not refused run, keep their bytes, and keep still where nobody comes."""
    plain = case.build(case.problem.loss)
    start, batches = case.problem.initial_params(), drawn(2, has_weights=False)
    if case.id in REFUSED:
        with pytest.raises(ValueError, match=rf"algorithm is {case.id}, .*{REFUSED[case.id]}"):
            with_dp(plain, 1.0, 0.1).init(start, CLIENTS)
        return
    algorithm = with_dp(plain, 1.0, 0.01)
    state = jax.jit(lambda p, b: algorithm.init(p, CLIENTS, b))(start, batches[0])
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    for batch in batches:
        before = state
        state, metrics = round_fn(state, batch)
        chex.assert_trees_all_equal_shapes_and_dtypes(before, state)
    assert np.isfinite(case.problem.flat(algorithm.params(state))).all()
    assert all(np.isfinite(value) for value in metrics.values())
    assert algorithm.uplink(start) == plain.uplink(start)
    nobody = batches[0]._replace(participates=jnp.zeros(4, bool))
    chex.assert_trees_all_equal(round_fn(state, nobody)[0], one_round_later(state))


def one_round_later(state):
    """The same state, but that one more round is counted."""
    released = state.server.released
    released = released._replace(rounds=released.rounds + 1)
    return state._replace(server=state.server._replace(released=released))


def poisson_batch(messages, present, seed=0):
    """A batch of these messages in which 4 clients are expected."""
    batch = batch_of(messages.astype(np.float32), participates=present, seed=seed)
    return batch._replace(expected_size=jnp.asarray(4.0))


def test_poisson_means_are_divided_by_the_expected_number():
    """One client more or less changes a sum by clip_norm at most; how many came is in nothing."""
    messages = np.random.default_rng(7).normal(size=(N, 2, D))
    norms = np.sqrt((messages**2).sum((1, 2)))
    clip = 0.9 * float(norms.min())
    algorithm = with_dp(teller(), clip, 0.0)
    round_fn = jax.jit(algorithm.round_fn)
    got = []
    for present in (np.arange(N) < 6, np.arange(N) < 7):
        state, _ = round_fn(algorithm.init(params(), N), poisson_batch(messages, present))
        short = (messages * (clip / norms)[:, None, None])[present]
        received = [to_vector(field) for field in state.server.inner["got"].values()]
        np.testing.assert_allclose(received[0], short[:, 0].sum(0) / 4, atol=1e-6)
        np.testing.assert_allclose(received[1], short[:, 1].sum(0), atol=1e-6)
        got.append(np.concatenate([4 * received[0], received[1]]))
    assert np.linalg.norm(got[1] - got[0]) == pytest.approx(clip, rel=1e-5)


def test_an_empty_poisson_cohort_has_its_noise():
    """A fixed one, in which nobody comes, leaves all as it was."""
    algorithm = with_dp(teller(SUMS), 2.0, 0.7)
    start = algorithm.init(params(), N)
    nobody = np.zeros(N, bool)
    batch = poisson_batch(np.ones((N, 2, D)), nobody)
    round_fn = jax.jit(algorithm.round_fn)
    state, _ = round_fn(start, batch)
    np.testing.assert_allclose(
        vectors(jax.tree.map(lambda x: x[None], state.server.inner["got"]), 1)[0],
        noise_of(1)[0],
        rtol=1e-6,
    )
    still, _ = round_fn(start, batch._replace(expected_size=None))
    chex.assert_trees_all_equal(still, one_round_later(start))


def test_the_adaptive_clip_under_poisson_cohorts():
    """Andrew et al.'s update, less the quantile for each that came, over the expected number."""
    messages = np.random.default_rng(3).normal(size=(N, 2, D))
    messages *= np.linspace(0.2, 2, N)[:, None, None]
    norms, clip = np.sqrt((messages**2).sum((1, 2))), 1.5
    algorithm = with_dp(teller(), clip, 0.0, adaptive_quantile=0.75)
    state, round_fn = algorithm.init(params(), N), jax.jit(algorithm.round_fn)
    for t in range(5):
        present = np.random.default_rng(t).random(N) < 0.5
        within = norms[present] <= clip
        state, _ = round_fn(state, poisson_batch(messages, present, t))
        clip *= math.exp(-0.2 * (within - 0.75).sum() / 4)
        assert state.server.clip[0] == pytest.approx(clip, rel=1e-4)


def test_dropouts_move_neither_the_adaptive_clip_nor_the_mean():
    """All messages have norm 1: the clip of any quantile goes there, and stays."""
    fedavg = algorithms.fedavg(lambda params, examples, key: -(examples @ params), client_lr=1.0)
    rows = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True) + 1e-4 * rows
    clients = data.from_clients({i: row[None] for i, row in enumerate(rows)})
    run = {
        **{"cohort_size": 20, "sampling": "poisson", "devices": data.Devices(dropout=0.5)},
        **{"batch_size": 1, "local_steps": 1, "eval_every": 50},
    }
    adaptive = with_dp(fedavg, 0.5, 0.0, adaptive_quantile=0.9)
    result = simulate(adaptive, jnp.zeros(4), clients, rounds=100, **run)
    assert abs(result.history[-1]["clip_norm"] - 1) < 0.2
    fixed = with_dp(fedavg, 2.0, 0.0)
    total = simulate(fixed, jnp.zeros(4), clients, rounds=100, **run).params
    ratio = float(total @ rows.mean(0)) / (100 * float(rows.mean(0) @ rows.mean(0)))
    assert abs(ratio - 1) < 0.3


def test_weights_are_an_error():
    algorithm = with_dp(teller(), 1.0, 1.0)
    weighted = batch_of(np.zeros((N, 2, D), np.float32), weights=np.ones(N))
    with pytest.raises(ValueError, match=r"the batch has weights; teller under with_dp"):
        algorithm.round_fn(algorithm.init(params(), N), weighted)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"clip_norm": 0.0}, r"clip_norm is 0\.0; it must be finite and greater than 0"),
        ({"noise_multiplier": -1.0}, r"noise_multiplier is -1"),
        ({"delta": 0.0}, r"delta is 0\.0; it must be finite and greater than 0"),
        ({"delta": 1.0}, r"delta is 1\.0; it must be finite and greater than 0 and less than 1"),
        ({"adaptive_quantile": 1.0}, r"adaptive_quantile is 1\.0"),
    ],
)
def test_wrong_arguments(options, match):
    with pytest.raises(ValueError, match=match):
        with_dp(teller(), **{"clip_norm": 1.0, "noise_multiplier": 1.0, **options})


# Accounting. Without the library, what needs it is skipped, and says so.

KNOWN = [(1.0, 1e-5, 100, 100, 1000), (4.0, 1e-5, 500, 10, 1000), (8.0, 1e-6, 200, 50, 50)]


@pytest.mark.parametrize(
    ("z", "delta", "rounds", "cohort", "clients"),
    few(1, KNOWN),
)
def test_epsilon_is_the_librarys(z, delta, rounds, cohort, clients):
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    among = {"cohort_size": cohort, "num_clients": clients}
    relations = dp.NeighboringRelation
    fixed = rdp.RdpAccountant(neighboring_relation=relations.REPLACE_ONE)
    gaussian = dp.GaussianDpEvent(z / 2)  # of the sensitivity 2 clip_norm
    event = dp.SampledWithoutReplacementDpEvent(clients, cohort, gaussian)
    fixed.compose(dp.SelfComposedDpEvent(event, rounds))
    ours = privacy.epsilon(z, delta, rounds, **among)
    assert ours == pytest.approx(fixed.get_epsilon(delta), rel=1e-9)
    poisson = rdp.RdpAccountant(neighboring_relation=relations.ADD_OR_REMOVE_ONE)
    event = dp.PoissonSampledDpEvent(cohort / clients, dp.GaussianDpEvent(z))
    poisson.compose(event, rounds)
    ours = privacy.epsilon(z, delta, rounds, sampling="poisson", **among)
    assert ours == pytest.approx(poisson.get_epsilon(delta), rel=1e-9)


def test_epsilon_of_a_single_gaussian_bounds_the_exact_one():
    """Balle and Wang's formula for the Gaussian mechanism, sensitivity 2 clip norms."""
    pytest.importorskip("dp_accounting")
    delta, z = 1e-5, 6.0

    def exact_delta(epsilon):
        ratio = 2 / z
        phi = stats.norm.cdf
        return phi(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * phi(
            -ratio / 2 - epsilon / ratio
        )

    epsilon = privacy.epsilon(z, delta, 1, cohort_size=5, num_clients=5)
    assert exact_delta(epsilon) <= delta
    assert exact_delta(0.7 * epsilon) > delta


@pytest.mark.slow
def test_the_noise_for_an_epsilon():
    pytest.importorskip("dp_accounting")
    among = {"cohort_size": 20, "num_clients": 400, "exchanges": 2}
    z = privacy.noise_multiplier(4.0, 1e-5, 100, **among)
    assert privacy.epsilon(z, 1e-5, 100, **among) <= 4.0
    assert privacy.epsilon(z / 1.002, 1e-5, 100, **among) > 4.0
    # Two sums with noise z are one with noise z / sqrt(2).
    one = privacy.epsilon(z / math.sqrt(2), 1e-5, 100, cohort_size=20, num_clients=400)
    assert privacy.epsilon(z, 1e-5, 100, **among) == pytest.approx(one)
    more = privacy.epsilon(z, 1e-5, 100, first_exchanges=3, **among)
    assert privacy.epsilon(z, 1e-5, 100, **among) < more < privacy.epsilon(z, 1e-5, 102, **among)


def test_accounting_without_the_library():
    among = {"cohort_size": 2, "num_clients": 4}
    assert privacy.epsilon(0.0, 1e-5, 3, **among) == math.inf
    assert privacy.epsilon(1.0, 1e-5, 0, **among) == 0
    with pytest.raises(ValueError, match="delta is 2"):
        privacy.epsilon(1.0, 2, 3, **among)
    with pytest.raises(ValueError, match=r"cohort_size is 5; it must be between 1 and 4"):
        privacy.epsilon(1.0, 0.1, 3, cohort_size=5, num_clients=4)
    with pytest.raises(ValueError, match=r"sampling is 'fixed'; .*without_replacement"):
        privacy.epsilon(1.0, 0.1, 3, sampling="fixed", **among)
    with pytest.raises(ValueError, match=r"epsilon is 0; it must be"):
        privacy.noise_multiplier(0, 0.1, 3, **among)


def test_a_delta_that_promises_nothing_is_told_of():
    with pytest.warns(UserWarning, match=r"delta is 0\.5 with 4 clients; it should be well below"):
        assert privacy.epsilon(1.0, 0.5, 0, cohort_size=2, num_clients=4) == 0
    assert privacy.epsilon(1.0, 0.25, 0, cohort_size=2, num_clients=4) == 0


def digits():
    return softmax_loss, federations.digits(400, 20)[1], jnp.zeros((64, 10))


SETTINGS = {"cohort_size": 5, "local_steps": 1, "batch_size": 8, "client_map": "scan"}


@pytest.mark.methods
def test_rows_have_epsilon(monkeypatch):
    """That of the rounds so far, from the number of clients and the cohort's size."""
    loss, clients, start = digits()
    algorithm = with_dp(algorithms.fedavg(loss, client_lr=0.1), 1.0, 3.0, delta=1e-3)
    asked = []

    def formula(z, delta, rounds, **among):
        asked.append((z, delta, among))
        return 10.0 + rounds

    monkeypatch.setattr("fedjax_lab.wrappers.ledger.epsilon", formula)
    result = simulate(algorithm, start, clients, rounds=4, eval_every=2, **SETTINGS)
    assert [row["epsilon"] for row in result.history] == [12.0, 14.0]
    counted = {"cohort_size": 5, "num_clients": 20, "exchanges": 1, "first_exchanges": 1}
    counted |= {"noise_bands": 1}
    fixed = {**counted, "sampling": "without_replacement", "accountant": "rdp"}
    assert asked
    assert all(call == (3.0, 1e-3, fixed) for call in asked)
    asked.clear()
    simulate(algorithm, start, clients, rounds=2, sampling="poisson", **SETTINGS)
    assert asked
    assert all(
        call == (3.0, 1e-3, {**counted, "sampling": "poisson", "accountant": "pld"})
        for call in asked
    )
    with pytest.raises(ValueError, match="evaluate returned 'epsilon', a name that rows"):
        simulate(algorithm, start, clients, rounds=2, evaluate=lambda p: {"epsilon": 0}, **SETTINGS)
    with pytest.raises(ValueError, match="sample_cohort is set; the accounting of fedavg"):
        simulate(
            algorithm,
            start,
            clients,
            rounds=2,
            sample_cohort=lambda k, t: jnp.arange(5),
            **SETTINGS,
        )


@pytest.mark.methods
def test_a_sweep_counts_each_point(monkeypatch, capsys):
    """In its history, its progress and the command line's table; once for all seeds."""
    from fedjax_lab.command.sweeping import sweep_table

    def formula(z, delta, rounds, **among):
        return 10.0 * z + rounds

    monkeypatch.setattr("fedjax_lab.wrappers.ledger.epsilon", formula)
    loss, clients, start = digits()

    def build(dp_noise):
        return with_dp(algorithms.fedavg(loss, client_lr=0.1), 1.0, dp_noise, delta=1e-3)

    points = {"dp_noise": [1.0, 3.0]}
    result = sweep(
        build, start, clients, points=points, seeds=[0, 1], rounds=2, eval_every=1, progress=True,
        **SETTINGS,
    )  # fmt: skip
    expected = [[[11.0, 12.0]] * 2, [[31.0, 32.0]] * 2]
    np.testing.assert_array_equal(result.history["epsilon"], expected)
    assert "epsilon 32.00" in capsys.readouterr().err
    assert sweep_table(result) == [["dp_noise", "epsilon"], ["1", "12.00"], ["3", "32.00"]]


@pytest.mark.slow
def test_rows_have_the_librarys_epsilon():
    pytest.importorskip("dp_accounting")
    loss, clients, start = digits()
    algorithm = with_dp(algorithms.fedavg(loss, client_lr=0.1), 1.0, 3.0, delta=1e-3)
    result = simulate(algorithm, start, clients, rounds=2, eval_every=1, **SETTINGS)
    expected = [privacy.epsilon(3.0, 1e-3, t, cohort_size=5, num_clients=20) for t in (1, 2)]
    assert [row["epsilon"] for row in result.history] == expected
