"""Runs on examples that stay on the host: the bits of runs on examples that are on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, models, simulate, sweep
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.client_data import StreamedClientData, client_data_of
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.evaluate import build_client_evaluation, build_evaluation
from fedjax_lab.simulation.evaluate_personal import build_personal_evaluation
from fedjax_lab.simulation.plan import plan
from tests.simulation import test_stores as stores
from tests.simulation.test_run import assert_same_bits

CLIENTS = 12
SETTINGS = {"rounds": 7, "cohort_size": 4, "local_steps": 2, "batch_size": 4, "eval_every": 4}
ROOMY, TIGHT = 100_000, 6_000  # bytes: TIGHT is enough for two rounds and not for four


rng = np.random.default_rng(1)
OWNERS = np.repeat(np.arange(CLIENTS), rng.integers(3, 31, CLIENTS))
rng.shuffle(OWNERS)
X = rng.normal(size=(len(OWNERS), 5)).astype(np.float32)
Y = rng.normal(size=len(OWNERS)).astype(np.float32)
METHODS = {
    **{name: stores.METHODS[name] for name in ("fedavg", "scaffold", "gradma", "fafed", "cfedavg")},
    "mime": algorithms.mime(stores.loss_fn, client_lr=0.1, momentum=0.9),
    "stem": algorithms.stem(stores.loss_fn, client_lr=0.1, momentum=0.5),
}
FULL = {"mime": {"full_examples": True}}


def resident():
    return data.partition((X, Y), OWNERS, CLIENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return data.write_stream(tmp_path_factory.mktemp("stream") / "train", (X, Y))


def streamed(folder, memory=ROOMY):
    return data.stream(folder, OWNERS, CLIENTS, memory=memory)


def as_run(schedule, rounds, eval_every, key=None):
    key = jax.random.key(0) if key is None else key
    return Computation(METHODS["fedavg"], schedule, rounds=rounds, eval_every=eval_every, key=key)


def run(name, clients, **settings):
    return simulate(
        METHODS[name], stores.PARAMS, clients, **{**SETTINGS, **FULL.get(name, {}), **settings}
    )


def assert_same_run(actual, expected):
    assert_same_bits(actual.state, expected.state)
    assert actual.history == expected.history


# Every method one way, and every client map; TIGHT cuts chunks, down to single rounds.
CASES = [(name, "scan", TIGHT) for name in METHODS if name != "scaffold"]
CASES += [("scaffold", "vmap", TIGHT), ("scaffold", "shard_map:4", TIGHT)]
CASES += [("mime", "shard_map:4", TIGHT), ("stem", "vmap", ROOMY)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(
    ("name", "client_map", "memory"),
    [pytest.param("scaffold", "scan", TIGHT, marks=pytest.mark.methods), *SLOW],
)
def test_a_stream_gives_the_same_bits(folder, name, client_map, memory):
    memory += 2_500 * (name in FULL)  # for one round and not for two
    actual = run(name, streamed(folder, memory), client_map=client_map)
    assert_same_run(actual, run(name, resident(), client_map=client_map))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"local_steps": None, "local_epochs": 2, "weights": "examples"},
        {"replace": True},
        {"devices": data.Devices(min_local_steps=1, dropout=0.3)},
        {"sample_cohort": lambda key, round: (round + jnp.arange(4)) % CLIENTS},
        {"eval_every": 1},
        {"on_nonfinite": "stop"},
        {"sampling": "poisson"},
        {"sampling": "cyclic", "cohort_size": 5},  # three groups of four
        {"sampling": "cyclic", "cohort_size": 7, "local_steps": None, "local_epochs": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_whatever_is_drawn_is_there(folder, settings):
    actual = run("fedavg", streamed(folder), client_map="scan", **settings)
    assert_same_run(actual, run("fedavg", resident(), client_map="scan", **settings))


def test_a_chunk_has_the_examples_that_its_rounds_draw(folder):
    schedule = Schedule(3, 4, local_steps=2, full_examples=True)
    key, clients = jax.random.key(5), resident()
    client_data = client_data_of(as_run(schedule, 5, 3, key), streamed(folder))
    draw = jax.jit(schedule.draw)
    pieces = list(client_data.pieces(0, 3))
    assert sum(length for _, length in pieces) == 3
    for first, length in pieces:
        found = client_data.take(first, length)
        for round in range(first, first + length):
            there, here = (draw(c, key, round) for c in (clients, found))
            for field in ("examples", "full_examples"):
                wanted = np.asarray(getattr(there, field))
                np.testing.assert_array_equal(
                    np.asarray(here.source.x)[getattr(here, field)], X[wanted]
                )
                np.testing.assert_array_equal(
                    np.asarray(here.source.y)[getattr(here, field)], Y[wanted]
                )
    client_data.close()


@pytest.mark.slow
def test_a_device_never_holds_more_than_two_chunks(folder, monkeypatch):
    stream, held = streamed(folder, TIGHT), []
    schedule = Schedule(**{k: v for k, v in SETTINGS.items() if k not in ("rounds", "eval_every")})
    count = client_data_of(as_run(schedule, 12, 4), stream).count
    put = jax.device_put

    def counted(*given):
        placed = put(*given)
        held.append(sum(array.shape == (count, 5) for array in jax.live_arrays()))
        return placed

    monkeypatch.setattr("fedjax_lab.simulation.client_data.jax.device_put", counted)
    run("fedavg", stream, rounds=12, client_map="scan")
    assert max(held) == 2
    assert count * (24 + 4) * 2 + stream.index_bytes <= TIGHT


@pytest.mark.parametrize(
    ("memory", "eval_every", "expected"),
    [
        (TIGHT, 4, 2),
        *(pytest.param(*n, marks=pytest.mark.slow) for n in ((ROOMY, 4, 4), (TIGHT, 9, 1))),
    ],
)
def test_chunks_are_as_long_as_fits(folder, memory, eval_every, expected):
    schedule = Schedule(4, 4, local_steps=2)
    client_data = StreamedClientData(as_run(schedule, 20, eval_every), streamed(folder, memory))
    assert client_data.longest == expected
    assert f"chunks of {expected} rounds" in client_data.note
    client_data.close()


def test_a_round_that_does_not_fit_is_refused(folder):
    with pytest.raises(ValueError, match=r"memory is 2,000 bytes, .* draws up to 32 examples"):
        run("fedavg", streamed(folder, 2_000))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [ROOMY, TIGHT])
def test_a_run_goes_on_bit_for_bit(tmp_path, folder, memory):
    settings = {"client_map": "scan", "eval_every": 2}
    whole = run("scaffold", resident(), **settings)
    half = run(
        "scaffold",
        streamed(folder, memory),
        run_dir=tmp_path,
        stop_when=lambda row: row["round"] == 4,
        **settings,
    )
    assert half.stopped == "stop_when"
    resumed = run("scaffold", streamed(folder, memory), run_dir=tmp_path, **settings)
    assert_same_run(resumed, whole)
    other = data.stream((X, Y + 1), OWNERS, CLIENTS, memory=memory)
    with pytest.raises(FileExistsError, match="the clients' data"):
        run("scaffold", other, run_dir=tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client_map", "memory"), [("scan", TIGHT), ("scan", ROOMY), ("shard_map:4", TIGHT)]
)
def test_rows_and_examples_on_the_host(folder, client_map, memory):
    settings = {"client_map": client_map, "rounds": 11}
    whole = run("scaffold", resident(), client_store="device", **settings)
    host = run("scaffold", streamed(folder, memory), client_store="host", **settings)
    assert_same_bits(host.state.server, whole.state.server)
    assert_same_bits(host.state.clients.read(np.arange(CLIENTS)), whole.state.clients)
    assert host.history == whole.history


@pytest.mark.slow
def test_float64_stays_float64(x64, folder):
    wide = X.astype(np.float64) + 1e-12, Y.astype(np.float64)
    method = algorithms.fedavg(stores.loss_fn, client_lr=0.1)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), stores.PARAMS)
    of = {}
    for name, divide in (("resident", data.partition), ("streamed", data.stream)):
        of[name] = simulate(method, params, divide(wide, OWNERS, CLIENTS), **SETTINGS)
    assert of["streamed"].params["w"].dtype == jnp.float64
    assert_same_run(of["streamed"], of["resident"])


@pytest.mark.slow
def test_examples_that_are_not_finite_are_told_of():
    broken = X.copy()
    broken[7, 2] = np.nan
    stream = data.stream((broken, Y), OWNERS, CLIENTS)
    schedule = Schedule(CLIENTS, 4, local_steps=2, full_examples=True)
    client_data = client_data_of(as_run(schedule, 4, 2), stream)
    with pytest.warns(UserWarning, match="the examples 7 hold values that are not finite"):
        client_data.take(0, 2)
    client_data.take(2, 2)  # said once
    client_data.close()


@pytest.mark.slow
def test_a_plan_of_a_stream(folder):
    schedule = {"cohort_size": 4, "local_steps": 2, "batch_size": 4}
    found, other = (
        plan(METHODS["fedavg"], stores.PARAMS, clients, **schedule)
        for clients in (streamed(folder), resident())
    )
    assert found.plan == other.plan
    assert found.figures.collectives == other.figures.collectives


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (
            lambda c: sweep(lambda: METHODS["fedavg"], stores.PARAMS, c, points={}, **SETTINGS),
            "a sweep needs",
        ),
        (lambda c: build_client_evaluation(lambda *_: None, c), "build_client_evaluation needs"),
        (
            lambda c: build_personal_evaluation(lambda *_: None, lambda *_: None, c),
            "build_personal_evaluation needs",
        ),
    ],
)
def test_what_needs_resident_data_refuses_a_stream(folder, needs, said):
    with pytest.raises(TypeError, match=f"clients is a FederatedStream, .* {said}"):
        needs(streamed(folder))


def test_held_out_clients_of_a_stream(folder):
    _, unseen = data.split_clients(streamed(folder), 3, seed=1)
    _, same = data.split_clients(resident(), 3, seed=1)
    held, _ = unseen.read(np.asarray(unseen.indices), unseen.indices.size)
    own = np.isin(OWNERS, OWNERS[np.asarray(same.indices)])
    np.testing.assert_array_equal(held.x, X[own])
    np.testing.assert_array_equal(held.y, Y[own])
    counts = models.squared_error_counts(lambda params, x, key: x @ params["w"] + params["b"])
    expected = np.mean((X[own] @ np.linspace(-1, 1, 5) - Y[own]) ** 2)
    for test in (held, same):
        error = build_evaluation(counts, test)(stores.PARAMS)["mean_squared_error"]
        np.testing.assert_allclose(error, expected, rtol=1e-5)
    with pytest.raises(TypeError, match=r"test is a FederatedStream, .*: stream\.read\("):
        build_evaluation(counts, unseen)


@pytest.mark.parametrize(
    "options",
    [
        {"times": data.ClientTimes(availability=np.arange(40)[None] == 0)},
        {"sampling": "poisson", "rounds": 20, "eval_every": 1, "seed": 1, "cohort_size": 3},
    ],
)
def test_a_stream_has_room_for_what_padded_slots_draw(options):
    """One client has nearly all examples, and local steps take other ones each."""
    owners = np.repeat(np.arange(40), [400, *[1] * 39])
    x = np.random.default_rng(0).normal(size=(439, 5)).astype(np.float32)
    examples, settings = data.Examples(x, x[:, 0]), SETTINGS | {"local_steps": 5} | options
    method = algorithms.fedavg(stores.loss_fn, client_lr=0.01)
    assert_same_run(
        simulate(method, stores.PARAMS, data.stream(examples, owners, memory=ROOMY), **settings),
        simulate(method, stores.PARAMS, data.partition(examples, owners, 40), **settings),
    )


def test_a_run_that_is_evaluated_later_than_it_ends_can_be_extended(tmp_path, folder):
    """What a stream's program holds depends on ``eval_every`` and not on the number of rounds."""
    settings = {"eval_every": 10, "run_dir": tmp_path}
    run("fedavg", streamed(folder), rounds=4, **settings)
    longer = run("fedavg", streamed(folder), rounds=13, **settings)
    assert_same_run(longer, run("fedavg", streamed(folder), rounds=13, eval_every=10))
    late = run("fedavg", streamed(folder), rounds=4, eval_every=2**62)
    assert [row["round"] for row in late.history] == [4]


def test_labels_of_any_integer_dtype_are_counted():
    labels = np.arange(40, dtype=np.uint64) % 3
    stream = data.stream((X[:40], labels), "iid", 4, memory=ROOMY)
    assert np.asarray(stream.label_histogram()).sum(0).tolist() == [14, 13, 13]
