"""Cohorts and mini-batches: uniform, complete, and independent of what should not matter."""

import contextlib
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import data
from fedjax_lab.data import cohort, local_work
from fedjax_lab.data.example_order import WORDS, shuffled
from fedjax_lab.data.uniform import _floyd, _redrawn
from tests.tiers import few

key = jax.random.key(7)


@jax.jit
def shuffle(keys, places, n):
    """As many random orders as there are keys."""
    words = jax.vmap(lambda key: jax.random.bits(key, (WORDS,)))(keys)
    return shuffled(words, places, n)


ranked = jax.jit(shuffled)
floyd = jax.jit(_floyd, static_argnums=(1, 2))


def federation(sizes):
    """Clients of the given sizes, whose examples are shuffled over the data set."""
    owners = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    examples = data.Examples(np.arange(len(owners), dtype=np.float32), np.zeros_like(owners))
    return data.partition(examples, owners, len(sizes), min_size=0), owners


drawer = jax.jit(
    data.draw_batch,
    static_argnames=(
        "cohort_size",
        "batch_size",
        "local_steps",
        "local_epochs",
        "replace",
        "weights",
        "full_examples",
    ),
)


def draw(clients, key=key, round=0, **settings):
    return drawer(clients, key, round, **settings)


@pytest.mark.parametrize(
    ("num_clients", "size"), [(1, 1), (2, 1), (300, 300), (300, 299), (300, 69), (1000, 2)]
)
def test_cohort_is_distinct_and_in_range(num_clients, size):
    clients, _ = federation([1] * num_clients)
    ids = np.asarray(jax.jit(lambda k: data.sample_clients(k, clients, size))(key))
    assert ids.dtype == np.int32
    assert ids.shape == (size,)
    assert len(set(ids.tolist())) == size
    assert ids.min() >= 0
    assert ids.max() < num_clients
    if size == num_clients:
        np.testing.assert_array_equal(ids, np.arange(num_clients))


@pytest.mark.parametrize(("num_clients", "size"), [(20, 3), (6, 3), (7, 5), (40, 1)])
def test_every_subset_and_order_is_equally_likely(num_clients, size):
    # 7 choose 5 takes Floyd's algorithm as well; permutations are drawn in the next test.
    clients, _ = federation([1] * num_clients)
    keys = jax.random.split(key, 40000)
    ids = np.asarray(jax.jit(jax.vmap(lambda k: data.sample_clients(k, clients, size)))(keys))
    subsets = {s: i for i, s in enumerate(itertools.combinations(range(num_clients), size))}
    found = np.bincount([subsets[tuple(row)] for row in np.sort(ids, 1)], minlength=len(subsets))
    assert stats.chisquare(found).pvalue > 1e-3
    for place in range(size):
        assert stats.chisquare(np.bincount(ids[:, place], minlength=num_clients)).pvalue > 1e-3


def test_large_cohorts_are_uniform():
    clients, _ = federation([1] * 50)
    keys = jax.random.split(key, 20000)
    ids = np.asarray(jax.jit(jax.vmap(lambda k: data.sample_clients(k, clients, 45)))(keys))
    for place in (0, 22, 44):
        assert stats.chisquare(np.bincount(ids[:, place], minlength=50)).pvalue > 1e-3
    # The five that are left out: their sum over 50 has a known mean and variance.
    left_out = 1225 - ids.sum(1)
    assert left_out.mean() == pytest.approx(5 * 24.5, rel=0.01)
    assert left_out.var() == pytest.approx(5 * (50**2 - 1) / 12 * 45 / 49, rel=0.05)


@pytest.mark.parametrize(("available", "count"), [(1, 1), (6, 6), (7, 5), (20, 16), (400, 80)])
def test_floyds_algorithm_at_once_is_his_loop(available, count):
    for seed in range(20):
        words, order = jax.random.bits(jax.random.key(seed), (2, count), "uint32").tolist()
        chosen = []
        for place, word in enumerate(words):
            largest = available - count + place
            drawn = word * (largest + 1) >> 32
            chosen.append(largest if drawn in chosen else drawn)
        expected = [number for _, number in sorted(zip(order, chosen, strict=True))]
        assert floyd(jax.random.key(seed), available, count).tolist() == expected


def test_redrawing_makes_all_sequences_equally_likely():
    keys = jax.random.split(key, 60000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda k: _redrawn(k, 5, 3)))(keys))
    sequences = {s: i for i, s in enumerate(itertools.permutations(range(5), 3))}
    found = np.bincount([sequences[tuple(row)] for row in drawn.tolist()], minlength=60)
    assert stats.chisquare(found).pvalue > 1e-3


def test_large_cohorts_of_many_clients_are_uniform():
    clients, _ = federation([1] * 5000)
    keys = jax.random.split(key, 200)
    ids = np.asarray(jax.jit(jax.vmap(lambda k: data.sample_clients(k, clients, 1000)))(keys))
    assert all(np.unique(row).size == 1000 for row in ids)
    assert stats.kstest(ids[:, [0, 500, 999]].reshape(-1) / 5000, "uniform").pvalue > 1e-3
    assert ids.mean() == pytest.approx(2499.5, rel=0.01)


def test_empty_clients_are_never_drawn():
    clients, _ = federation([0, 3, 0, 2, 5, 0, 0, 1])
    keys = jax.random.split(key, 2000)
    ids = np.asarray(jax.jit(jax.vmap(lambda k: data.sample_clients(k, clients, 2)))(keys))
    np.testing.assert_array_equal(np.unique(ids), [1, 3, 4, 7])
    np.testing.assert_array_equal(data.sample_clients(key, clients, 4), [1, 3, 4, 7])
    with pytest.raises(ValueError, match="cohort_size is 5; it must be between 1 and 4"):
        data.sample_clients(key, clients, 5)


@pytest.mark.parametrize("start", [1, 20, 40])
def test_order_is_a_bijection(start):
    sizes = [*range(start, start + 20), start * 101, start * start, start * start + 1]
    for n in sizes:
        # Positions beyond n would be an error; pad to one shape to compile once.
        places = np.minimum(np.arange(5000, dtype=np.int32), n - 1)
        keys = jax.random.split(jax.random.key(n), 2)
        values = np.asarray(shuffle(keys, np.stack([places, places]), np.int32(n)))[:, :n]
        np.testing.assert_array_equal(np.sort(values, 1), np.stack([np.arange(n)] * 2))
        if n > 20:
            assert (values[0] != values[1]).any()


def test_small_orders_are_ranks_of_their_words():
    """All orders of up to 16 examples are then equally likely, because the words are."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (200, 1, WORDS), dtype=np.uint32)
    words[150:] >>= 29  # with ties, which positions break
    for n in (1, 2, 3, 6, 15, 16):
        places = np.minimum(np.arange(16, dtype=np.int32), n - 1)
        sizes = np.full(200, n, np.int32)
        found = np.asarray(ranked(words, np.broadcast_to(places, (200, 1, 16)), sizes))[:, 0, :n]
        ranks = words[:, 0, :n].argsort(axis=1, kind="stable").argsort(axis=1)
        np.testing.assert_array_equal(found, ranks)


def test_small_and_large_clients_share_a_cohort():
    sizes = np.array([3, 16, 17, 40], np.int32)
    words = np.random.default_rng(1).integers(0, 2**32, (4, 1, WORDS), dtype=np.uint32)
    places = np.minimum(np.arange(40), sizes[:, None, None] - 1).astype(np.int32)
    found = np.asarray(ranked(words, places, sizes))[:, 0]
    for row, size in zip(found, sizes, strict=True):
        assert sorted(row[:size].tolist()) == list(range(size))


def test_order_of_a_large_client():
    n = 10**6 + 7
    places = jnp.arange(n, dtype=jnp.int32)[None]
    values = np.asarray(shuffle(jax.random.split(key, 1), places, jnp.int32(n)))[0]
    np.testing.assert_array_equal(np.sort(values), np.arange(n))
    assert abs(np.corrcoef(np.arange(n), values)[0, 1]) < 0.01
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.01


TRIALS = 20000


def values_at(places, n, trials):
    """[trials, places]: of as many orders of n; at most six places, so that one program does."""
    padded = np.zeros((TRIALS, 6), np.int32)
    padded[:, : len(places)] = places
    keys = jax.random.split(key, (trials // TRIALS, TRIALS))
    parts = [np.asarray(shuffle(some, padded, np.int32(n))) for some in keys]
    return np.concatenate(parts)[:, : len(places)]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_orders_of_few_are_equally_likely(n):
    values = values_at(range(n), n, 20 * TRIALS if n == 6 else 3 * TRIALS)
    _, found = np.unique(values @ n ** np.arange(n), return_counts=True)
    assert len(found) == math.factorial(n)
    assert stats.chisquare(found).pvalue > 1e-3


def test_orders_just_beyond_the_ranked_ones():
    """Pairs of positions, and the relative order of six, in the Feistel network of 17."""
    values = values_at((0, 1, 2, 3, 8, 16), 17, 10 * TRIALS)
    for first, second in itertools.combinations(range(6), 2):
        pairs = np.bincount(values[:, first] * 17 + values[:, second], minlength=17**2)
        assert stats.chisquare(pairs.reshape(17, 17)[~np.eye(17, dtype=bool)]).pvalue > 1e-4
    _, found = np.unique(values.argsort(axis=1) @ 6 ** np.arange(6), return_counts=True)
    assert len(found) == 720
    assert stats.chisquare(found).pvalue > 1e-3


@pytest.mark.parametrize("n", [7, 10, 13, 97])
def test_order_marginals(n):
    places = (0, 1, 2, n // 2, n - 1)
    values = dict(zip(places, values_at(places, n, TRIALS).T, strict=True))
    for place in (0, 1, n // 2, n - 1):
        assert stats.chisquare(np.bincount(values[place], minlength=n)).pvalue > 1e-3
    for first, second in ((0, 1), (1, 2), (0, n // 2), (2, n - 1)):
        gap = np.bincount((values[first] - values[second]) % n, minlength=n)
        assert gap[0] == 0
        assert stats.chisquare(gap[1:]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("sizes", "batch_size", "epochs"),
    [
        pytest.param([1, 1], 1, 1, marks=pytest.mark.slow),
        ([5, 0, 23, 1, 8, 16, 0, 2], 4, 3),
        pytest.param([3, 9, 7], 10, 2, marks=pytest.mark.slow),
        ([12, 12, 12], 4, 2),
        pytest.param([100, 36, 37], 7, 1, marks=pytest.mark.slow),
    ],
)
def test_epochs_cover_each_example_once_per_pass(sizes, batch_size, epochs):
    clients, owners = federation(sizes)
    taking = sum(size > 0 for size in sizes)
    batch = draw(clients, cohort_size=taking, batch_size=batch_size, local_epochs=epochs)
    steps = epochs * -(-max(sizes) // batch_size)
    assert batch.examples.shape == (taking, steps, batch_size)
    assert batch.examples.dtype == jnp.int32
    mask = np.ones(batch.examples.shape, bool)
    if batch.example_mask is not None:
        mask = np.asarray(batch.example_mask)
    for slot, client in enumerate(np.asarray(batch.client_ids)):
        own = np.flatnonzero(owners == client)
        per_pass = -(-len(own) // batch_size)
        taken = steps if batch.num_steps is None else int(batch.num_steps[slot])
        assert taken == epochs * per_pass
        chosen = np.asarray(batch.examples[slot])
        assert np.isin(chosen, own).all()  # masked places too
        assert not mask[slot, taken:].any()
        for e in range(epochs):
            part = slice(e * per_pass, (e + 1) * per_pass)
            np.testing.assert_array_equal(np.sort(chosen[part][mask[slot, part]]), own)
            # Only the last mini-batch of a pass is smaller, as with torch's DataLoader.
            real = mask[slot, part].sum(1)
            assert (real[:-1] == batch_size).all()
            assert real[-1] == len(own) - (per_pass - 1) * batch_size


def test_local_steps_run_through_passes():
    clients, owners = federation([5, 8, 3])
    batch = draw(clients, cohort_size=3, batch_size=4, local_steps=6)
    assert batch.num_steps is None
    real = np.asarray(batch.example_mask).sum(2)
    np.testing.assert_array_equal(real, [[4, 1] * 3, [4] * 6, [3] * 6])
    for slot, per_pass in enumerate((2, 2, 1)):
        own = np.flatnonzero(owners == slot)
        chosen = np.asarray(batch.examples[slot]).reshape(6 // per_pass, -1)
        mask = np.asarray(batch.example_mask[slot]).reshape(6 // per_pass, -1)
        orders = [row[m].tolist() for row, m in zip(chosen, mask, strict=True)]
        assert all(sorted(order) == own.tolist() for order in orders)
        assert len({tuple(order) for order in orders}) > 1


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"local_epochs": 2}, marks=pytest.mark.slow),
        {"local_steps": 7},
        {"local_steps": 7, "replace": True},
    ],
)
def test_a_clients_draws_depend_on_key_round_and_id_only(settings):
    clients, _ = federation([5, 8, 3, 30, 12, 9, 9, 9])
    settings = {**settings, "batch_size": 4}
    whole = draw(clients, cohort_size=8, round=3, **settings)
    more = {name: value + 2 if name == "local_steps" else value for name, value in settings.items()}
    part = draw(clients, cohort_size=3, round=3, **more)
    for slot, client in enumerate(np.asarray(part.client_ids)):
        # More steps begin with the same ones.
        found = np.asarray(part.examples)[slot, : whole.examples.shape[1]]
        np.testing.assert_array_equal(found, np.asarray(whole.examples)[client])
    np.testing.assert_array_equal(jax.random.key_data(part.key), jax.random.key_data(whole.key))
    for other in (
        draw(clients, cohort_size=8, round=4, **settings),
        draw(clients, key=jax.random.key(8), cohort_size=8, round=3, **settings),
    ):
        assert (other.examples != whole.examples).any()
        assert (jax.random.key_data(other.key) != jax.random.key_data(whole.key)).any()


def test_draws_do_not_depend_on_the_device():
    clients, _ = federation([5, 8, 3])
    settings = {"cohort_size": 3, "batch_size": 4, "local_steps": 6}  # as in a test above
    moved_clients, moved_key = jax.device_put((clients, key), jax.devices()[1])
    moved = draw(moved_clients, moved_key, **settings)
    np.testing.assert_array_equal(moved.examples, draw(clients, **settings).examples)


def test_with_replacement_is_uniform():
    clients, owners = federation([6, 4])
    batch = draw(clients, cohort_size=2, batch_size=50, local_steps=400, replace=True)
    assert batch.example_mask is None
    assert batch.num_steps is None
    for client in (0, 1):
        own = np.flatnonzero(owners == client)
        found = np.asarray(batch.examples[client])
        assert np.isin(found, own).all()
        counts = np.bincount(found.ravel(), minlength=10)[own]
        assert stats.chisquare(counts).pvalue > 1e-3
    assert any(len(set(row.tolist())) < 4 for row in found[:, :4])


def test_first_mini_batches_are_uniform():
    clients, owners = federation([11, 7])
    rounds = jnp.arange(20000)
    take = jax.jit(
        jax.vmap(
            lambda r: (
                data.draw_batch(
                    clients, key, r, cohort_size=2, batch_size=3, local_steps=2
                ).examples
            )
        )
    )
    found = np.asarray(take(rounds))
    for client in (0, 1):
        own = np.flatnonzero(owners == client)
        for step, place in itertools.product(range(2), range(3)):
            counts = np.bincount(found[:, client, step, place], minlength=18)[own]
            assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    ("sizes", "settings", "masked", "counted"),
    [
        ([8, 8], {"batch_size": 4, "local_steps": 9}, False, False),
        ([8, 8], {"batch_size": 4, "local_epochs": 2}, False, False),
        ([8, 8], {"batch_size": 3, "local_epochs": 2}, True, False),
        ([8, 7], {"batch_size": 4, "local_epochs": 2}, True, False),
        ([8, 4], {"batch_size": 4, "local_epochs": 2}, True, True),
        ([9, 12], {"batch_size": 4, "local_steps": 2}, False, False),
        ([9, 12], {"batch_size": 4, "local_steps": 3}, True, False),
        ([9, 12], {"batch_size": 4, "local_steps": 3, "replace": True}, False, False),
        ([9, 12], {"batch_size": 4, "local_epochs": 1, "replace": True}, False, False),
        ([4, 12], {"batch_size": 4, "local_epochs": 1, "replace": True}, True, True),
    ],
)
def test_masks_are_left_out_where_they_are_not_needed(
    monkeypatch, sizes, settings, masked, counted
):
    # The order of the examples does not matter here; without it the programs are small.
    monkeypatch.setattr(local_work, "shuffled", lambda words, positions, size: positions)
    clients, _ = federation(sizes)

    def in_order(clients):
        return data.draw_batch(clients, key, 0, cohort_size=2, **settings)

    batch = jax.eval_shape(in_order, clients)
    assert (batch.example_mask is not None) == masked
    assert (batch.num_steps is not None) == counted
    if counted:
        batch = jax.jit(in_order)(clients)
        mask = np.asarray(batch.example_mask)
        assert not mask.all()
        taken = mask.any(2).sum(1)
        np.testing.assert_array_equal(taken, batch.num_steps)


def test_rest_of_the_batch():
    clients, owners = federation([5, 0, 8, 3])
    batch = draw(
        clients,
        round=2,
        cohort_size=3,
        batch_size=2,
        local_steps=1,
        replace=True,  # quick to compile
        weights="examples",
        full_examples=True,
    )
    np.testing.assert_array_equal(batch.client_ids, [0, 2, 3])
    np.testing.assert_array_equal(batch.weights, [5.0, 8.0, 3.0])
    assert batch.weights.dtype == jnp.float32
    assert batch.round == 2
    assert batch.round.dtype == jnp.int32
    assert batch.full_examples.shape == batch.full_mask.shape == (3, 8)
    for slot, client in enumerate((0, 2, 3)):
        own = np.flatnonzero(owners == client)
        chosen = np.asarray(batch.full_examples[slot])
        np.testing.assert_array_equal(chosen[np.asarray(batch.full_mask[slot])], own)
        assert np.isin(chosen, own).all()
    np.testing.assert_array_equal(batch.source.x, clients.examples.x)
    plain = drawer.eval_shape(
        clients, key, 0, cohort_size=3, batch_size=2, local_steps=1, replace=True
    )
    assert plain.weights is plain.full_examples is plain.full_mask is plain.participates is None


def test_rounds_do_not_trace_again():
    clients, _ = federation([5, 8, 3, 4])
    traces = []

    @jax.jit
    def examples(clients, key, round):
        traces.append(round)
        settings = {"cohort_size": 2, "batch_size": 2, "local_epochs": 1, "replace": True}
        return data.draw_batch(clients, key, round, **settings).examples

    rows = [np.asarray(examples(clients, key, r)) for r in range(4)]
    assert len(traces) == 1
    assert any((rows[0] != row).any() for row in rows[1:])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"local_epochs": 1}, ValueError, "exactly one"),
        ({"local_steps": None}, ValueError, "exactly one"),
        ({"local_steps": 0}, ValueError, "local_steps is 0"),
        ({"local_steps": 1.5}, TypeError, "local_steps is 1.5"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"cohort_size": 3}, ValueError, "cohort_size is 3"),
        ({"weights": "sizes"}, ValueError, "weights is 'sizes'"),
        ({"round": -1}, ValueError, "round is -1"),
        ({"key": 0}, TypeError, "typed PRNG key"),
        ({"key": jax.random.split(key)}, ValueError, "single key"),
    ],
)
def test_errors(changes, error, message):
    clients, _ = federation([5, 8])
    settings = {"key": key, "round": 0, "cohort_size": 2, "batch_size": 2, "local_steps": 1}
    with pytest.raises(error, match=message):
        data.draw_batch(clients, **{**settings, **changes})


def test_clients_that_are_not_on_the_device():
    stream = data.stream((np.zeros((8, 1)), np.zeros(8, np.int32)), "iid", 2)
    for clients, message in (
        (stream, "clients is a FederatedStream, .*; draw_batch needs them on the device"),
        ((1, 2), "clients is tuple, not FederatedArrays; see fedjax_lab.data.partition"),
    ):
        with pytest.raises(TypeError, match=message):
            data.draw_batch(clients, key, 0, cohort_size=2, batch_size=2, local_steps=1)


class Fixed(data.Devices):
    """Clients with numbers of local steps of their own, which no field of the class has."""

    def __init__(self, steps):
        super().__init__()
        object.__setattr__(self, "steps", steps)

    def local_steps(self, key, round, client_ids, planned):
        return self.steps[client_ids]


QUICK = {"cohort_size": 2, "batch_size": 2, "local_steps": 3, "replace": True}  # to compile
TABLE = jnp.int32([1, 2, 3, 1])
OPTIONS = {
    "plain": lambda: {},
    "an array of steps": lambda: {"local_steps": np.array([1, 2, 3, 0])},
    "devices": lambda: {"devices": data.Devices(min_local_steps=1, dropout=0.3)},
    "a subclass": lambda: {"devices": Fixed(TABLE)},
    "a new function each time": lambda: {"sample_cohort": lambda key, t: (t + jnp.arange(2)) % 4},
    "poisson": lambda: {"sampling": "poisson"},
    "times": lambda: {},
}
OFTEN = ("plain", "an array of steps", "a new function each time")


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.methods) for n in OPTIONS]
)
def test_a_loop_compiles_nothing_after_its_first_round(name):
    clients, _ = federation([5, 8, 3, 4])
    if name == "times":
        times = data.ClientTimes(availability=np.full((1, 4), 0.9), deadline=9.0)
        clients = dataclasses.replace(clients, times=times.resolve(4, 1, 1))

    def draw(round):
        return data.draw_batch(clients, key, round, **(QUICK | OPTIONS[name]()))

    draw(0), draw(1)
    with compilations() as compiled:
        batches = [draw(round) for round in range(2, 5)]
    assert compiled == []
    traced = jax.jit(draw)(np.int32(4))
    batch, traced = (b._replace(key=jax.random.key_data(b.key)) for b in (batches[-1], traced))
    jax.tree.map(np.testing.assert_array_equal, batch, traced)


@contextlib.contextmanager
def compilations():
    """Collect the seconds of each compilation."""
    seconds = []

    def note(name, duration, **_):
        if "backend_compile" in name:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(note)


def test_devices_with_other_attributes_are_another_program():
    clients, _ = federation([5, 8, 3, 4])
    drawn = [
        data.draw_batch(clients, key, 0, **QUICK, devices=Fixed(steps))
        for steps in (TABLE, TABLE[::-1])
    ]
    ids = np.asarray(drawn[0].client_ids)
    np.testing.assert_array_equal(drawn[0].num_steps, np.asarray(TABLE)[ids])
    np.testing.assert_array_equal(drawn[1].num_steps, np.asarray(TABLE)[::-1][ids])


@pytest.mark.parametrize("steps", [jnp.ones(4), jnp.ones((1, 2), jnp.int32)])
def test_wrong_steps_of_a_subclass(steps):
    clients, _ = federation([5, 8, 3, 4])

    class Wrong(data.Devices):
        def local_steps(self, key, round, client_ids, planned):
            return steps

    with pytest.raises(ValueError, match=r"Wrong.local_steps returned .* integers \[2\]"):
        data.draw_batch(clients, key, 0, **QUICK, devices=Wrong())


def test_own_epochs_of_each_client():
    sizes, epochs = np.array([5, 0, 23, 1, 8]), np.array([2, 3, 1, 4, 0])
    clients, _ = federation(sizes)
    expected = epochs * -(-sizes // 4)  # 4, 0, 6, 4, 0
    own = data.draw_batch(clients, key, 3, cohort_size=4, batch_size=4, local_epochs=epochs)
    ids = np.asarray(own.client_ids)
    assert own.examples.shape == (4, 6, 4)
    np.testing.assert_array_equal(own.num_steps, expected[ids])
    np.testing.assert_array_equal(own.example_mask.any(2).sum(1), expected[ids])
    steps = data.draw_batch(
        clients, key, 3, cohort_size=4, batch_size=4, local_steps=jnp.asarray(expected)
    )
    jax.tree.map(np.testing.assert_array_equal, *(b._replace(key=None) for b in (own, steps)))
    # The mini-batches are those of as many steps for all.
    same = data.draw_batch(clients, key, 3, cohort_size=4, batch_size=4, local_steps=6)
    taken = np.arange(6) < expected[ids, None]
    np.testing.assert_array_equal(own.example_mask, same.example_mask & taken[..., None])
    np.testing.assert_array_equal(own.examples, same.examples)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"local_steps": [1, 2]}, ValueError, r"local_steps has shape \(2,\); .* 3 integers"),
        ({"local_epochs": [1, 2, -3]}, ValueError, r"local_epochs\[2\] is -3; .* from 0"),
        ({"local_steps": [1.0, 2, 3]}, TypeError, "local_steps has dtype float64"),
        ({"local_steps": [0, 0, 0]}, ValueError, "local_steps is 0 for all clients"),
        ({"local_steps": [[1], [2, 3]]}, ValueError, "local_steps is no array"),
        ({"local_steps": [1, 2, 3], "local_epochs": 1}, ValueError, "exactly one"),
        ({"local_epochs": np.full(3, 2**30)}, ValueError, "largest number of local steps"),
    ],
)
def test_wrong_arrays_of_steps(options, error, message):
    clients, _ = federation([5, 8, 3])
    with pytest.raises(error, match=message):
        data.draw_batch(clients, key, 0, cohort_size=2, batch_size=2, **options)


def test_arrays_of_epochs_need_known_sizes():
    clients, _ = federation([5, 8, 3])
    options = {"cohort_size": 2, "batch_size": 2, "local_epochs": [1, 2, 3]}
    with pytest.raises(TypeError, match="close over the clients"):
        jax.eval_shape(lambda clients: data.draw_batch(clients, key, 0, **options), clients)
    assert (
        jax.eval_shape(lambda: data.draw_batch(clients, key, 0, **options)).examples.shape[1] == 8
    )


@pytest.mark.parametrize(
    ("num_clients", "options"),
    [
        (5000, {"cohort_size": 300}),  # drawn again where clients are equal
        pytest.param(50, {"cohort_size": 7, "sampling": "poisson"}, marks=pytest.mark.methods),
        pytest.param(50, {"cohort_size": 7, "sampling": "cyclic"}, marks=pytest.mark.methods),
        (50, {"cohort_size": 20, "devices": data.Devices(2, dropout=0.3, step_time_spread=1.0)}),
        (50, {"cohort_size": 7, "availability": 0.5}),
    ],
)
def test_draws_are_those_of_float32_mode(num_clients, options):
    clients, _ = federation([4] * num_clients)
    options = dict(options)
    there = options.pop("availability", None)
    found = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            if there is not None:
                times = data.ClientTimes(availability=np.full((1, num_clients), there))
                clients = dataclasses.replace(clients, times=times.resolve(num_clients, 1, 1))
            batch = data.draw_batch(
                clients, key, jnp.int32(3), local_steps=5, batch_size=2, replace=True, **options
            )
            fields = ("client_ids", "examples", "num_steps", "participates")
            kept = [getattr(batch, name) for name in fields]
            assert all(x is None or x.dtype in (jnp.int32, bool) for x in kept)
            found.append(kept)
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("impl", few(1, ["rbg", "unsafe_rbg"]))
def test_draws_are_threefrys_whatever_the_generator(impl):
    clients, _ = federation([5, 8, 3, 4])
    options = QUICK | {"devices": data.Devices(min_local_steps=1, dropout=0.3)}
    batches = [
        data.draw_batch(clients, jax.random.key(7, impl=kind), 2, **options)
        for kind in (impl, "threefry2x32")
    ]
    assert batches[0].key.dtype == batches[1].key.dtype
    plain = [b._replace(key=jax.random.key_data(b.key)) for b in batches]
    jax.tree.map(np.testing.assert_array_equal, *plain)


@pytest.mark.parametrize(
    ("sizes", "batch_size"),
    [
        ([5, 8], 4),
        *(
            pytest.param(sizes, batch_size, marks=pytest.mark.methods)
            for sizes in ([8, 8], [8, 16], [5, 8], [1, 3], [9, 30])
            for batch_size in (1, 4, 8)
            if (sizes, batch_size) != ([5, 8], 4)
        ),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": 1},
        {"local_steps": 2},
        {"local_steps": 9},
        {"local_steps": 2, "replace": True},
        {"local_epochs": 1},
        {"local_epochs": 3},
        {"local_epochs": 1, "full_examples": True},
    ],
)
def test_what_rounds_read_gives_the_same_rounds(sizes, options, batch_size):
    clients, _ = federation(sizes)
    schedule = cohort.Schedule(2, batch_size, **options)
    read = schedule.read_in_rounds(clients)

    def text(clients):
        return str(jax.make_jaxpr(schedule.draw)(clients, key, jnp.int32(3)))

    assert text(read) == text(clients)
    assert jax.tree.structure(read) == jax.tree.structure(schedule.read_in_rounds(read))


def test_rounds_of_two_partitions_are_one_program():
    schedule = cohort.Schedule(2, 4, local_steps=3)
    examples = data.Examples(np.arange(60, dtype=np.float32), np.arange(60) % 3)
    first, second = (data.partition(examples, "dirichlet:1.0", 5, seed=seed) for seed in (0, 1))
    assert jax.tree.structure(first) != jax.tree.structure(second)
    read = [jax.tree.structure(schedule.read_in_rounds(each)) for each in (first, second)]
    assert read[0] == read[1]
