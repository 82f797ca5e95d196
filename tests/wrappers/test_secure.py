"""Secure aggregation: masks cancel, one message is uniform, the sum is the sum."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import algorithms, build_round, with_secure_aggregation
from fedjax_lab.wrappers import secure
from tests.algorithms.cases import MAIN
from tests.algorithms.cases import N as CLIENTS
from tests.algorithms.problem import CLIENT_MAPS, drawn, finish, loss_fn
from tests.tiers import few
from tests.wrappers.teller import D, N, batch_of, params, run, teller, to_vector
from tests.wrappers.test_privacy import REFUSED

WEIGHTS = np.array([1, 2, 3, 4, 0.5, 1, 1, 2, 0.7])
COUNT = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1], bool)


def draw(seed=0):
    return np.random.default_rng(seed).normal(size=(N, 2, D)) * [[[1], [3]]]


masks = jax.jit(secure.mask, static_argnames="neighbours")


def masked(encoded, present, reports, ids=None, seed=0, neighbours=None):
    ids = jnp.arange(len(encoded)) if ids is None else jnp.asarray(ids)
    arrays = jnp.asarray(encoded), jax.random.key(seed), ids, jnp.asarray(present)
    return map(np.asarray, masks(*arrays, jnp.asarray(reports), neighbours=neighbours))


@pytest.mark.parametrize("neighbours", [None, 2])
def test_masks_cancel_exactly_also_where_clients_drop_out(neighbours):
    """In NumPy's integers modulo 2^32, for every set of four that may drop out."""
    rng = np.random.default_rng(0)
    encoded = rng.integers(0, 2**32, (5, 33), dtype=np.uint32)
    present = np.array([1, 1, 1, 1, 0], bool)
    for number in range(16):
        reports = present & np.array([*(number >> np.arange(4) & 1), 0], bool)
        seen, left = masked(encoded, present, reports, [7, 2, 9, 4, 11], neighbours=neighbours)
        total = seen[reports].sum(0, dtype=np.uint32) - left
        np.testing.assert_array_equal(total, encoded[reports].sum(0, dtype=np.uint32))
        assert (left != 0).all() == (0 < reports.sum() < 4)
        np.testing.assert_array_equal(seen[4], encoded[4])  # a padded slot has no masks
        assert (seen[:4] != encoded[:4]).mean() > 0.99


def who_shares(present, neighbours, seed):
    """bool [n, n]: whose masks are in what is seen of whom, tried out over all sets of others."""
    n, key = len(present), jax.random.key(seed)
    seen, _ = masked(np.zeros((n, 3), np.uint32), present, present, None, seed, neighbours)
    drawn = np.zeros((n, n, 3), np.uint32)
    for i, j in itertools.combinations(range(n), 2):
        drawn[i, j] = jax.random.bits(secure.pair_key(key, i, j), (3,), jnp.uint32)
        drawn[j, i] = -drawn[i, j]
    found = np.zeros((n, n), bool)
    for i in range(n):
        sets = np.array(list(itertools.product((False, True), repeat=n)))
        sets = sets[~sets[:, i]]
        sums = np.einsum("sj,jd->sd", sets.astype(np.uint32), drawn[i])
        [found[i]] = sets[(sums == seen[i]).all(1)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "neighbours", "degree"),
    [(0, 4, 4), (0, None, 6), (1, 4, 4), (2, 4, 4), (3, 4, 3), (0, 2, 2), (5, 2, 1), (6, 2, 0)],
)
def test_every_client_shares_masks_with_so_many_others(absent, neighbours, degree):
    """Of seven slots; the graph is one piece, its ring another one in another round."""
    present = np.arange(7) >= absent
    graph = who_shares(present, neighbours, 0)
    np.testing.assert_array_equal(graph, graph.T)
    np.testing.assert_array_equal(graph.sum(0), np.where(present, degree, 0))
    reached = np.linalg.matrix_power(graph + np.eye(7), 7)
    assert (reached[np.ix_(present, present)] > 0).all()
    if degree == 2:
        assert (who_shares(present, neighbours, 1) != graph).any()


@pytest.mark.parametrize(
    ("clients", "neighbours"), [(3, None), pytest.param(5, 2, marks=pytest.mark.slow)]
)
def test_what_the_server_sees_of_one_client_is_uniform(clients, neighbours):
    """Chi-square of single messages, of low and of high bits, of pairs of clients, over rounds."""
    encoded = np.zeros((clients, 60_000), np.uint32)  # nothing but the masks
    all_of_them = np.ones(clients, bool)
    seen, _ = masked(encoded, all_of_them, all_of_them, neighbours=neighbours)
    again, _ = masked(encoded, all_of_them, all_of_them, seed=1, neighbours=neighbours)
    for values in (*seen, seen[0] + seen[1], seen[0] - again[0], seen[1] ^ again[2]):
        for shift in (0, 12, 24):
            counts = np.bincount(values >> shift & 255, minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-5
    pairs = np.bincount((seen[0] >> 28) * 16 + (seen[1] >> 28), minlength=256)
    assert stats.chisquare(pairs).pvalue > 1e-5


@pytest.mark.parametrize("bits", [2, 8, 16, 31, 32])
def test_numbers_and_their_integers(bits):
    """Towards zero, in Python's integers, the largest included; sums of the extremes fit."""
    slots, clip = 1 if bits == 2 else 3, 0.75
    largest = secure.levels(bits, slots)
    assert slots * largest < 2 ** (bits - 1) <= slots * (largest + 1)
    values = np.array([0, 0.75, -0.75, 0.3, -0.3, 5, -5, 1e-9, np.inf, -np.inf], np.float32)
    values = np.append(values, np.float32(np.nan))
    stacked = jnp.asarray(np.tile(values, (slots, 1)))
    encoded = np.asarray(secure.encode(stacked, jnp.ones(slots), clip, largest))
    signed = encoded.view(np.int32).astype(object)
    exact = [int(min(max(float(v) / clip, -1), 1) * largest) for v in values[:-1]] + [0]
    for row in signed:
        for got, wanted in zip(row, exact, strict=True):
            assert abs(got) <= abs(wanted) + 1e-6 * largest  # float32 has 24 bits
            assert abs(got - wanted) <= max(1, 2e-7 * largest)
            assert abs(got) <= largest
    total = encoded.sum(0, dtype=np.uint32)
    decoded = secure.decode(jnp.asarray(total), bits, clip, largest, jnp.float32)
    expected = [clip / largest * sum(column) for column in signed.T]
    np.testing.assert_allclose(decoded, np.array(expected, float), rtol=1e-6, atol=1e-7)
    # The upper bits say nothing.
    junk = np.uint32(0) if bits == 32 else np.uint32(0xFFFFFFFF) << np.uint32(bits)
    other = secure.decode(jnp.asarray(total ^ junk), bits, clip, largest, jnp.float32)
    np.testing.assert_array_equal(decoded, other)


@pytest.mark.parametrize(
    ("bits", "client_map"),
    [
        pytest.param(32, "vmap", marks=pytest.mark.slow),
        pytest.param(32, "shard_map", marks=pytest.mark.methods),
        (12, "scan"),
    ],
)
def test_the_server_gets_the_mean_and_the_sum(bits, client_map, x64):
    """Up to the resolution, weights, absent clients and padded slots as ever."""
    messages, clip = draw(), 12.0
    batch = batch_of(messages, weights=WEIGHTS, participates=COUNT)
    got, metrics = run(with_secure_aggregation(teller(), bits, clip), batch, client_map)
    weights = np.where(COUNT, WEIGHTS, 0)
    expected = np.stack([weights / weights.sum() @ messages[:, 0], COUNT @ messages[:, 1]])
    step = clip / secure.levels(bits, N)
    assert (np.abs(got - expected) <= step * np.array([[1], [COUNT.sum()]]) + 1e-6).all()
    if bits == 12:
        assert np.abs(got - expected).max() > 1e-3
    assert metrics["saturated"] == 0
    if bits == 12:
        shares = np.stack([weights / weights.sum(), COUNT], axis=1)
        steps = np.array([[clip / secure.shared_levels(bits, N)], [step]])
        gone = np.abs(shares[..., None] * messages) < steps
        assert metrics["vanished"] == pytest.approx(gone[COUNT].mean())
        assert 0.01 < metrics["vanished"] < 0.1
        fewer = with_secure_aggregation(teller(), bits, clip, neighbours=4)
        np.testing.assert_array_equal(run(fewer, batch, client_map)[0], got)


@pytest.mark.parametrize("bits", few(1, [6, 16, 32]))
def test_the_error_of_a_mean_is_below_the_bound(bits):
    """In Python's integers and NumPy, for weights from equal to one heavy client."""
    rng, clip = np.random.default_rng(bits), 1.0
    algorithm = with_secure_aggregation(teller(), bits, clip)
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    bound = clip / secure.levels(bits, N)
    worst = 0
    for scale in (0.0, 1.0, 3.0, 10.0):
        weights = np.exp(scale * rng.normal(size=N)).astype(np.float32)
        largest = rng.choice([1.0, 0.02])
        messages = rng.uniform(-largest, largest, (N, 2, D)).astype(np.float32)
        messages[:, :, 0] = clip  # the sum nearly overflows
        batch = batch_of(messages, weights=weights)
        state, _ = round_fn(algorithm.init(params(), N), batch)
        got, got_sum = (to_vector(field) for field in state.server["got"].values())
        exact = messages.astype(np.float64)
        shares = weights.astype(np.float64) / weights.sum(dtype=np.float64)
        error = np.abs(got - shares @ exact[:, 0])
        assert (error < bound + 2e-6 * clip).all()
        assert (np.abs(got_sum - exact[:, 1].sum(0)) < N * bound + 1e-5 * clip).all()
        assert got[0] > 0  # no overflow
        worst = max(worst, error.max())
    if bits < 32:
        assert worst > bound / 8  # the bound says something


def test_a_mean_of_float16_whose_sum_float16_does_not_hold():
    """Nine numbers of 9,000; the largest number of float16 is 65,504."""
    messages = np.full((N, 2, D), 100, np.float16)
    messages[:, 0] = 9000 + 8 * np.arange(N)[:, None]
    algorithm = with_secure_aggregation(teller(), 32, 10_000.0)
    state = algorithm.init(params(jnp.float16), N)
    state, _ = jax.jit(build_round(algorithm, "vmap"))(state, batch_of(messages))
    mean, total = (to_vector(field) for field in state.server["got"].values())
    assert mean.dtype == np.float16
    np.testing.assert_allclose(mean, messages[:, 0].astype(float).mean(0), rtol=1e-3)
    np.testing.assert_allclose(total, 900, rtol=1e-3)


@pytest.mark.parametrize(("bits", "slots"), [(2, 1), (8, 100), (16, 20), (24, 1000), (32, 50)])
def test_integers_of_shares_do_not_overflow(bits, slots):
    """All numbers at the clip, with shares that float32 rounds."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        weights = rng.exponential(size=slots).astype(np.float32) ** rng.integers(1, 8)
        shares = weights / weights.sum(dtype=np.float32)
        whole = secure.shared_levels(bits, slots)
        encoded = secure.encode(jnp.ones((slots, 1)), jnp.asarray(shares), 1.0, whole)
        total = np.asarray(encoded).astype(np.int64).sum()
        assert 2 ** (bits - 1) - 1 - slots - 2e-5 * 2**bits * slots <= total < 2 ** (bits - 1)


def test_numbers_beyond_the_clip_are_saturated_and_counted():
    messages = np.clip(draw(1), -3, 3).astype(np.float32)
    messages[1, 0, 2], messages[3, 1, 0] = 1e30, -50
    batch = batch_of(messages, participates=COUNT)
    got, metrics = run(with_secure_aggregation(teller(), 32, 4.0), batch)
    cut = np.clip(messages, -4, 4)[COUNT]
    expected = np.stack([cut[:, 0].mean(0), cut[:, 1].sum(0)])
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert metrics["saturated"] == pytest.approx(2 / (7 * 2 * D))
    assert metrics["vanished"] == 0


@pytest.mark.slow
def test_what_is_no_number_becomes_zero_and_is_counted():
    """Where values that are not finite are kept, they are in no sum of integers."""
    messages = np.clip(draw(1), -3, 3).astype(np.float32)
    messages[1, 0, 2] = messages[3, 1, 0] = np.nan
    algorithm = with_secure_aggregation(teller(), 32, 4.0)
    round_fn = jax.jit(build_round(algorithm, "vmap", "keep"))
    batch = batch_of(messages, participates=COUNT)
    state, metrics = round_fn(algorithm.init(params(), N), batch)
    numbers = np.nan_to_num(messages)[COUNT]
    expected = np.stack([numbers[:, 0].mean(0), numbers[:, 1].sum(0)])
    got = np.stack([to_vector(field) for field in state.server["got"].values()])
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert metrics["saturated"] == pytest.approx(2 / (7 * 2 * D))


@pytest.mark.parametrize(
    ("name", "client_map"),
    [("scaffold", "vmap")]
    + [pytest.param("fedavg", m, marks=pytest.mark.slow) for m in CLIENT_MAPS],
)
def test_it_is_the_plain_method_up_to_the_resolution(name, client_map, x64):
    plain = getattr(algorithms, name)(loss_fn, client_lr=0.2)
    expected, _ = finish(plain, drawn(6), client_map)
    actual, _ = finish(with_secure_aggregation(plain, 32, 8.0), drawn(6), client_map)
    chex.assert_trees_all_close(actual, expected, atol=1e-6)


FEW = ("fedcm", *REFUSED)
PARTS = ("fedper", "lg_fedavg", "fedbn", "fedrep", "fedbabu")  # clients send a part of the model


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c.id in FEW else pytest.mark.slow) for c in MAIN],
    ids=lambda case: case.id,
)
@pytest.mark.slow
def test_every_method(case):
    plain = case.build(case.problem.loss)
    start, batches = case.problem.initial_params(), drawn(2)
    if case.id in REFUSED:
        with pytest.raises(ValueError, match=rf"algorithm is {case.id}, .*{REFUSED[case.id]}"):
            with_secure_aggregation(plain, 32, 8.0).init(start, CLIENTS)
        return
    algorithm = with_secure_aggregation(plain, 24, 8.0)
    state = jax.jit(lambda p, b: algorithm.init(p, CLIENTS, b))(start, batches[0])
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    for batch in batches:
        state, metrics = round_fn(state, batch)
    assert np.isfinite(case.problem.flat(algorithm.params(state))).all()
    assert all(np.isfinite(value) for value in metrics.values())
    size = case.problem.flat(start).size
    sent = [len(p.reduce) * size * 24 for p in plain.phases if not p.once and p.reduce]
    if case.id in PARTS:
        sent = [plain.uplink(start) // 4 * 24]
    assert algorithm.uplink(start) == sum(-(-number // 8) for number in sent)
    assert metrics["bytes_up"] == metrics["participants"] * algorithm.uplink(start)
    nobody = batches[0]._replace(participates=jnp.zeros(4, bool))
    chex.assert_trees_all_equal(round_fn(state, nobody)[0], state)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"bits is 33; it must be between 2 and 32"):
        with_secure_aggregation(teller(), 33, 1.0)
    with pytest.raises(ValueError, match=r"clip is 0; it must be finite and greater than 0"):
        with_secure_aggregation(teller(), 32, 0)
    for clip in (1e-39, 3e38, 1e300):
        with pytest.raises(
            ValueError, match=r"it must be finite and at least 1e-30 and at most 1e"
        ):
            with_secure_aggregation(teller(), 32, clip)
    with pytest.raises(ValueError, match=r"neighbours is 1; it must be at least 2"):
        with_secure_aggregation(teller(), 32, 1.0, neighbours=1)
    with pytest.raises(ValueError, match=r"neighbours is 3; it must be even"):
        with_secure_aggregation(teller(), 32, 1.0, neighbours=3)
    few = with_secure_aggregation(teller(), 4, 1.0)
    with pytest.raises(ValueError, match=r"bits is 4; .* at least 5, .* 9 messages"):
        run(few, batch_of(draw()))
