"""Rounds without a value enter no mean; a row of such rounds alone has none.

A client's loss is its own number here, whatever the params are, so that NumPy knows every mean.
"""

import csv
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    algorithms,
    data,
    simulate,
    sweep,
    with_buffered_aggregation,
    with_client_metrics,
    with_dp,
)
from fedjax_lab.clients.metrics import OF_EVERY_ROUND, OF_SERVER_STEP
from fedjax_lab.data import Devices
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.history import History
from fedjax_lab.simulation.loggers import CsvLogger
from tests.federations import of_sizes

N, ROUNDS, SEED = 8, 18, 1
NUMBERS = np.arange(1.0, N + 1, dtype=np.float32)
PARAMS = {"w": jnp.zeros(2)}
SETTINGS = {"cohort_size": 2, "local_steps": 2, "batch_size": 2, "replace": True}
ABSENT = {"devices": Devices(dropout=0.8), **SETTINGS}


def loss_fn(params, examples, key):
    return examples.x[:, 0] + 0 * params["w"].sum(), {"label": examples.y.astype(jnp.float32)}


FEDAVG = algorithms.fedavg(loss_fn, client_lr=0.1)


@functools.cache
def make_clients():
    x = np.repeat(NUMBERS, 2)[:, None]
    return of_sizes([2] * N, x, (10 * x[:, 0]).astype(np.int32))


def run(algorithm=FEDAVG, **changes):
    options = {"rounds": ROUNDS, "eval_every": 2, "seed": SEED, "client_map": "scan", **ABSENT}
    return simulate(algorithm, PARAMS, make_clients(), **options | changes)


@functools.cache
def losses_of_rounds(seed=SEED, **changes):
    """Mean of the participants' numbers in each round, float [ROUNDS]; NaN where nobody came."""
    schedule = Schedule(**(dict(changes) or ABSENT))
    draw = jax.jit(lambda clients, t: schedule.draw(clients, jax.random.key(seed), t))
    found = []
    for t in range(ROUNDS):
        batch = draw(make_clients(), jnp.int32(t))
        ids, came = np.asarray(batch.client_ids), np.asarray(batch.participates)
        found.append(NUMBERS[ids[came & (ids < N)]].mean() if came.any() else np.nan)
    return np.array(found)


def means(losses, length=2):
    """Means of chunks over the rounds that have a loss; None: no round has one."""
    chunks = [chunk[~np.isnan(chunk)] for chunk in losses.reshape(-1, length)]
    return [float(chunk.mean()) if len(chunk) else None for chunk in chunks]


def check(found, expected):
    assert [math.isnan(value) for value in found] == [value is None for value in expected]
    known = [value for value in expected if value is not None]
    np.testing.assert_allclose([v for v in found if not math.isnan(v)], known, rtol=1e-5)


def test_means_are_over_the_rounds_with_participants(tmp_path):
    asked = []
    measured = with_client_metrics(FEDAVG, one=lambda params, gradient: jnp.ones(()))
    file = tmp_path / "metrics.csv"
    result = run(
        measured,
        run_dir=tmp_path / "run",
        on_row=CsvLogger(file),
        stop_when=lambda row: asked.append(row["loss"]) or row["loss"] < 1,
    )
    expected = means(losses_of_rounds())
    assert None in expected
    assert sum(value is not None for value in expected) > 2
    check([row["loss"] for row in result.history], expected)
    check(asked, expected)  # a row without a loss does not end the run
    tens = [value and 10 * value for value in expected]
    check([row["label"] for row in result.history], tens)
    for name, value in (("one", 1.0), ("local_steps", 2.0), ("delta_norm", 0.0)):
        constants = [None if loss is None else value for loss in expected]
        check([row[name] for row in result.history], constants)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    stored = [json.loads(line) for line in lines]
    assert [row["loss"] is None for row in stored] == [value is None for value in expected]
    cells = [row["loss"] for row in csv.DictReader(file.read_text().splitlines())]
    assert [cell == "" for cell in cells] == [value is None for value in expected]
    again = run(measured, run_dir=tmp_path / "run")  # read from the files
    assert again.history == result.history


@pytest.mark.methods
@pytest.mark.parametrize(
    "changes",
    [
        {"client_store": "host"},
        {"sampling": "poisson", "devices": None, "cohort_size": 1},
        {"client_map": "shard_map"},
    ],
    ids=["host", "poisson", "shard_map"],
)
def test_so_are_those_of_other_stores_maps_and_cohorts(changes):
    algorithm = algorithms.scaffold(loss_fn, client_lr=0.1)  # has rows
    draws = {n: v for n, v in {**ABSENT, **changes}.items() if n in (*ABSENT, "sampling")}
    expected = means(losses_of_rounds(**draws))
    check([row["loss"] for row in run(algorithm, **changes).history], expected)


@pytest.mark.methods
def test_so_are_those_of_a_stream():
    x = np.asarray(make_clients().examples.x)
    examples = data.Examples(x, (10 * x[:, 0]).astype(np.int32))
    streamed = data.stream(examples, np.repeat(np.arange(N), 2), num_clients=N)
    options = {"rounds": ROUNDS, "eval_every": 2, "seed": SEED, "client_map": "scan", **ABSENT}
    result = simulate(FEDAVG, PARAMS, streamed, **options)
    check([row["loss"] for row in result.history], means(losses_of_rounds()))


@pytest.mark.methods
def test_so_are_those_of_a_sweep():
    def build(client_lr):
        return algorithms.fedavg(loss_fn, client_lr=client_lr)

    options = {"rounds": ROUNDS, "eval_every": 2, "run_map": "scan", **ABSENT}
    points, seeds = {"client_lr": [0.1]}, [SEED, SEED + 1]
    result = sweep(build, PARAMS, make_clients(), points=points, seeds=seeds, **options)
    for i, seed in enumerate(seeds):
        check(result.history["loss"][0, i], means(losses_of_rounds(seed)))
    assert not result.diverged.any()


@pytest.mark.methods
def test_an_asynchronous_round_without_a_step_has_no_values_of_a_step():
    """The first two of six rounds only start clients, whose losses are known."""

    def drift(params, examples, key):  # a message has the norm sqrt(2) * 0.1 * 2
        return params["w"].sum() + 0 * examples.x[:, 0]

    algorithm = with_buffered_aggregation(algorithms.fedavg(drift, client_lr=0.1), 2, 6)
    rows = run(algorithm, rounds=6, eval_every=2, devices=None).history
    assert [row["server_updates"] for row in rows] == [0.0, 1.0, 1.0]
    assert not any(math.isnan(row["loss"]) for row in rows)
    assert math.isnan(rows[0]["delta_norm"])
    assert math.isnan(rows[0]["staleness"])
    # tau is 0, 1, 2, 2 in the rounds with a step.
    norms = 0.2 * np.sqrt(2) / np.sqrt(1 + np.array([0, 1, 2, 2]))
    assert [row["staleness"] for row in rows[1:]] == [0.5, 2.0]
    found = [row["delta_norm"] for row in rows[1:]]
    np.testing.assert_allclose(found, norms.reshape(2, 2).mean(1), rtol=1e-5)


@pytest.mark.methods
def test_private_noise_moves_the_model_in_a_round_without_participants():
    algorithm = with_dp(FEDAVG, clip_norm=1.0, noise_multiplier=1.0)
    draws = {**SETTINGS, "cohort_size": 1, "sampling": "poisson"}
    rows = run(algorithm, devices=None, **draws, eval_every=1).history
    expected = means(losses_of_rounds(**draws), 1)
    assert None in expected
    check([row["loss"] for row in rows], expected)
    check([row["clipped_clients"] for row in rows], [e if e is None else 0.0 for e in expected])
    assert all(row["delta_norm"] > 0 for row in rows)
    assert all(row["clip_norm"] == 1 for row in rows)


@pytest.mark.methods
def test_private_clients_of_which_none_is_finite_end_the_run():
    """They count as participants and send zeros, which leaves no loss."""

    def steep(params, examples, key):
        return jnp.exp(100 + params["w"].sum()) * examples.x[:, 0]

    algorithm = with_dp(algorithms.fedavg(steep, client_lr=0.1), 1.0, 0.1)
    with (
        pytest.warns(UserWarning, match="2 of 2 clients gave values that are not finite"),
        pytest.warns(UserWarning, match="diverged: in round 0 no client was finite"),
    ):
        result = run(algorithm, devices=None, rounds=2)
    assert result.stopped == "diverged"
    assert math.isnan(result.history[-1]["loss"])
    assert result.history[-1]["nonfinite_clients"] > 0


RNG = np.random.default_rng(0)
PLAIN = {name: np.zeros(6) for name in ("bytes_up", "bytes_down")}


def row_of(**metrics):
    metrics = {**PLAIN, "local_steps": np.full(6, 2.0), **metrics}
    return History(Computation(FEDAVG, Schedule(2, 1, 1), params=PARAMS)).account(metrics)


def test_who_has_a_value_is_no_matter_of_nan():
    """A loss that is NaN stays in the mean; what nobody has does not, whatever stands there."""
    came = np.array([2, 0, 1, 0, 2, 2.0])
    own, of_every_round = RNG.random(6), RNG.random(6)
    names = {name: own for name in ("loss", "mine", *OF_SERVER_STEP)}
    others = dict.fromkeys(OF_EVERY_ROUND - {"server_updates", "communicated"}, of_every_round)
    row = row_of(participants=came, **names, **others)
    for name in names:
        assert row[name] == pytest.approx(own[came > 0].mean(), rel=1e-12), name
    for name in others:
        assert row[name] == pytest.approx(of_every_round.mean(), rel=1e-12), name
    assert row["local_steps"] == 2
    spoilt = np.where(np.arange(6) == 2, np.nan, own)
    assert math.isnan(row_of(participants=came, loss=spoilt)["loss"])
    row = row_of(participants=np.zeros(6), loss=own)
    assert math.isnan(row["loss"])
    assert math.isnan(row["local_steps"])


def test_gradients_are_exact_though_the_mean_of_the_steps_is_rounded():
    steps, rounds = 50_001, 600  # of 31 clients together in a round
    mean = np.full(rounds, np.float32(steps) / np.float32(31))
    came, nothing = np.full(rounds, 31.0), np.zeros(rounds)
    metrics = {"participants": came, "local_steps": mean}
    metrics |= {"bytes_up": nothing, "bytes_down": nothing}
    assert row_of(**metrics)["gradients"] == steps * rounds


def test_a_step_of_the_server_and_a_message_that_is_not_sent():
    came, own = np.array([2, 0, 1, 0, 2, 2.0]), RNG.random(6)
    steps = np.array([0, 1, 0, 0, 1, 1.0])
    row = row_of(participants=came, delta_norm=own, loss=own, server_updates=steps)
    assert row["delta_norm"] == pytest.approx(own[[1, 4, 5]].mean(), rel=1e-12)
    assert row["loss"] == pytest.approx(own[came > 0].mean(), rel=1e-12)
    assert row["server_updates"] == 0.5
    sent = np.array([1, 1, 0, 0, 1, 0.0])
    row = row_of(participants=came, delta_norm=own, loss=own, communicated=sent)
    assert row["delta_norm"] == pytest.approx(own[[0, 4]].mean(), rel=1e-12)
    assert row["communicated"] == 0.5


def test_a_round_whose_clients_are_not_finite_has_a_loss_that_is_not_finite():
    came, lost = np.array([2, 0, 1, 0, 2, 2.0]), np.array([0, 3, 0, 0, 0, 0.0])
    row = row_of(participants=came, nonfinite_clients=lost, loss=np.ones(6), mine=came)
    assert math.isnan(row["loss"])
    assert row["mine"] == 7 / 4
    assert row["nonfinite_clients"] == 3


def test_rows_say_that_the_model_waits_for_clients_without_data():
    """Of clients that all take part in each round, the last one of the longer list has no data."""
    algorithm = algorithms.mifa(loss_fn, client_lr=0.1, start="wait")
    whole = {"rounds": 2, "eval_every": 2, "cohort_size": N, "client_map": "scan"}
    owners = np.repeat(np.arange(N), 2)
    for more, steps in ((0, 1.0), (1, 0.0)):
        clients = data.partition(make_clients().examples, owners, num_clients=N + more, min_size=0)
        [row] = simulate(algorithm, PARAMS, clients, **SETTINGS | whole).history
        assert row["server_updates"] == steps
        assert math.isnan(row["delta_norm"]) == (more > 0)
