"""Runs in simulated time: the clock, client maps, stores, resume, and who may not have it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, plan, simulate, sweep, with_buffered_aggregation
from fedjax_lab.clients.costs import Costs
from fedjax_lab.data import ClientTimes, Devices, diurnal_availability
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.report.runs import load_runs
from fedjax_lab.report.sections import sections_of
from fedjax_lab.simulation.client_data import with_times
from fedjax_lab.wrappers import with_compression, with_dp
from tests.simulation.test_run import (
    CLASSES,
    FEATURES,
    FEDAVG,
    SCAFFOLD,
    N,
    assert_same_bits,
    first_params,
    loss_fn,
    make_clients,
)
from tests.simulation.test_run import (
    run as run_odd,
)

run = functools.partial(run_odd, rounds=6)  # chunks of one length: one program
SLOW = pytest.mark.slow
NUMBERS = 4 * FEATURES * CLASSES  # bytes of the params
BUFFERED = with_buffered_aggregation(FEDAVG, 3, 6)
RATES = {"download": 10.0, "upload": 5.0}
DRAWN = {"cohort_size": 3, "local_steps": 2, "batch_size": 4}


def times(**others):
    return ClientTimes.log_normal(N, 1, step_seconds=2.0, step_spread=0.8, **RATES, **others)


WAITING = times(over_selection=1.5, deadline=45.0, availability=diurnal_availability(N, 5, low=0.4))


def cohorts(size, rounds=6):
    """Ids of the first cohorts of ``run`` without times, int [rounds, size]."""
    schedule = Schedule(cohort_size=size, batch_size=4, local_steps=2, replace=True)
    draw = jax.jit(lambda clients, t: schedule.draw(clients, jax.random.key(5), t).client_ids)
    return np.stack([draw(make_clients(), jnp.int32(t)) for t in range(rounds)])


def test_the_clock_is_a_sum_and_bytes_cost_time():
    """Five of six are drawn for three; SCAFFOLD sends and receives two models, FedAvg one."""
    found = times(over_selection=5 / 3)
    ids = cohorts(5)
    for algorithm, models in ((FEDAVG, 1), (SCAFFOLD, 2)):
        exchange = models * NUMBERS * (1 / found.download + 1 / found.upload)
        seconds = exchange[ids] + 2 * found.step_seconds[ids]
        expected = np.cumsum(np.sort(seconds, 1)[:, 2])
        rows = run(algorithm, times=found).history
        clock = [row["simulated_seconds"] for row in rows]
        np.testing.assert_allclose(clock, expected[1::2], rtol=1e-5)
        assert [row["dropped_clients"] for row in rows] == [2.0] * 3
        assert rows[-1]["bytes_up"] == 6 * 3 * models * NUMBERS
        mean = [np.mean(np.diff(expected, prepend=0)[i : i + 2]) for i in (0, 2, 4)]
        np.testing.assert_allclose([row["round_seconds"] for row in rows], mean, rtol=1e-5)


def fedavg_with(costs):
    (phase,) = FEDAVG.phases
    return dataclasses.replace(FEDAVG, phases=(phase._replace(costs=costs),))


@pytest.mark.methods
def test_a_client_takes_as_long_as_its_rank_and_its_gradients_ask_for():
    """Ranks 1 and 4 of r_max 4; three gradients a step under both descriptions of time."""
    found = times()
    expected = (
        NUMBERS * np.where(np.arange(N) % 2, 1.0, 0.25) * (1 / found.download + 1 / found.upload)
    )
    ranked = fedavg_with(Costs(parts=(4, lambda ids: jnp.where(ids % 2, 4, 1))))
    resolved = with_times(make_clients(), found, ranked, first_params()).times
    np.testing.assert_allclose(resolved.exchange_seconds, expected, rtol=1e-6)
    method = fedavg_with(Costs(gradients=3))
    resolved = with_times(make_clients(), found, method, first_params()).times
    np.testing.assert_allclose(resolved.step_seconds, 3 * found.step_seconds, rtol=1e-6)
    # Five steps of half a second would be in time, and one of 1.5 seconds is.
    devices = Devices(step_time=0.5, time_budget=2.5)
    row = run(method, local_steps=5, devices=devices, rounds=2).history[-1]
    assert (row["local_steps"], row["simulated_seconds"]) == (1, 3.0)


@pytest.mark.methods
def test_asynchronous_rounds_on_devices_have_their_own_clock():
    """K_i are all 2, a step is 3 seconds: one round that only starts clients, then 6, 0, 6, ..."""
    rows = run(BUFFERED, devices=Devices(step_time=3.0), eval_every=1).history
    assert [row["round_seconds"] for row in rows] == [0, 6, 0, 6, 0, 6]


@SLOW
def test_compression_shortens_it():
    plain, small = (
        run(algorithm, times=times()).history[-1]
        for algorithm in (FEDAVG, with_compression(FEDAVG, "top_k:0.75"))
    )
    assert small["bytes_up"] < plain["bytes_up"]
    assert small["simulated_seconds"] < plain["simulated_seconds"]


@pytest.mark.parametrize(
    ("algorithm", "other"),
    [
        (BUFFERED, "vmap"),
        (SCAFFOLD, "vmap"),
        (SCAFFOLD, "shard_map"),
        (BUFFERED, "chunk:2"),
    ],
)
@SLOW
def test_client_maps_see_the_same_time(algorithm, other):
    """Who takes part and when is the same to the last bit; the params, up to rounding."""
    chosen = times() if algorithm is BUFFERED else WAITING
    one, two = (run(algorithm, times=chosen, client_map=m) for m in ("scan", other))
    for before, after in zip(one.history, two.history, strict=True):
        assert before.keys() == after.keys()
        assert {"simulated_seconds", "bytes_up"} <= before.keys()
        for name in {"simulated_seconds", "dropped_clients", "staleness", "bytes_up"} & {*before}:
            assert before[name] == after[name]
        assert before["loss"] == pytest.approx(after["loss"], rel=1e-5)
    np.testing.assert_allclose(one.params["w"], two.params["w"], atol=1e-5)


@pytest.mark.parametrize(
    "algorithm", [BUFFERED, pytest.param(SCAFFOLD, marks=SLOW)], ids=lambda a: a.name
)
@pytest.mark.methods
def test_a_resumed_run_is_the_uninterrupted_one(algorithm, tmp_path):
    chosen = times() if algorithm is BUFFERED else WAITING
    whole = run(algorithm, times=chosen)
    settings = {"times": chosen, "run_dir": tmp_path, "checkpoint_every": 2}
    run(algorithm, rounds=4, **settings)
    resumed = run(algorithm, **settings)
    assert_same_bits(resumed.state, whole.state)
    assert resumed.history == whole.history
    if algorithm is BUFFERED:
        other = ClientTimes(chosen.step_seconds * 2, chosen.download, chosen.upload)
        with pytest.raises(FileExistsError, match=r"times\.arrays"):
            run(algorithm, **{**settings, "times": other})


def test_a_round_without_anybody_changes_nothing_and_takes_no_time():
    there = np.array([[True] * N, [False] * N])
    result = run(SCAFFOLD, times=times(availability=there), rounds=4, eval_every=1)
    first, second, third, fourth = result.history
    assert second["available_clients"] == fourth["available_clients"] == 0
    assert second["simulated_seconds"] == first["simulated_seconds"]
    assert second["norm"] == first["norm"]
    assert third["norm"] != second["norm"]
    assert fourth["bytes_up"] == third["bytes_up"] == 2 * 3 * 2 * NUMBERS


@SLOW
@pytest.mark.parametrize("client_store", ["sharded", "host"])
def test_stores_give_the_same_bits(client_store):
    """With places in the cohort that nobody takes."""
    few = times(availability=np.linspace(0.1, 0.6, N), over_selection=1.4)
    settings = {"times": few, "client_map": "shard_map:2"}
    whole = run(SCAFFOLD, client_store="device", **settings)
    other = run(SCAFFOLD, client_store=client_store, **settings)
    assert_same_bits(other.state.server, whole.state.server)
    assert other.history == whole.history
    rows = other.state.clients
    rows = rows.read(np.arange(N)) if client_store == "host" else rows
    assert_same_bits(rows, whole.state.clients)


@SLOW
def test_a_sweep_equals_its_runs():
    build = functools.partial(algorithms.fedavg, loss_fn)
    settings = {"cohort_size": 3, "local_steps": 2, "batch_size": 4, "eval_every": 2}
    found = sweep(
        build,
        first_params(),
        make_clients(),
        points={"client_lr": [0.1, 0.3]},
        seeds=[5],
        times=WAITING,
        rounds=6,
        replace=True,
        **settings,
    )
    one = run(FEDAVG, times=WAITING, **settings)
    for name in ("simulated_seconds", "dropped_clients", "available_clients", "loss"):
        expected = [row[name] for row in one.history]
        np.testing.assert_allclose(found.history[name][1, 0], expected, rtol=1e-5)


def test_what_does_not_go_together_is_refused():
    for wrong in ({"over_selection": 1.5}, {"deadline": 9.0}):
        with pytest.raises(ValueError, match=r"fedavg\+buffered is asynchronous"):
            run(BUFFERED, times=times(**wrong))
    with pytest.raises(TypeError, match=r"times is Devices; it must be a data\.ClientTimes"):
        run(FEDAVG, times=Devices())
    with pytest.raises(ValueError, match=rf"times.step_seconds has 7 clients; N is {N}"):
        run(FEDAVG, times=ClientTimes(np.ones(7)))
    with pytest.raises(ValueError, match=rf"times.step_seconds has 7 clients; N is {N}"):
        plan(FEDAVG, first_params(), make_clients(), times=ClientTimes(np.ones(7)), **DRAWN)
    with pytest.raises(ValueError, match=r"devices\.time_budget is 2\.0, and times is set"):
        run(FEDAVG, times=times(), devices=Devices(time_budget=2.0))
    counted = with_dp(FEDAVG, 1.0, 1.0, delta=1e-5)
    with pytest.raises(
        ValueError, match="availability or over_selection; the accounting of fedavg"
    ):
        run(counted, times=WAITING)
    with pytest.raises(ValueError, match="'simulated_seconds', a name that rows"):
        run(FEDAVG, times=times(), evaluate=lambda params: {"simulated_seconds": math.pi})


@SLOW
def test_all_that_is_drawn_depends_on_seed_round_and_client():
    """The same clients take part whatever method, map or number of rounds in a chunk it is."""
    clients = make_clients()
    there = []
    for chunk, algorithm in ((2, FEDAVG), (3, SCAFFOLD)):
        chosen = ClientTimes(times().step_seconds, availability=0.5, over_selection=1.5)
        result = simulate(
            algorithm,
            first_params(),
            clients,
            times=chosen,
            rounds=6,
            eval_every=chunk,
            cohort_size=3,
            local_steps=2,
            batch_size=4,
            seed=5,
        )
        there.append(result.history[-1]["simulated_seconds"])
    assert there[0] == pytest.approx(there[1], rel=1e-6)
    other = data.draw_batch(
        clients, jax.random.key(5), 3, cohort_size=3, local_steps=2, batch_size=4
    )
    assert other.seconds is None


class OwnDevices(Devices):
    """Devices with arguments of their own."""

    def __init__(self, steps):
        super().__init__()
        object.__setattr__(self, "steps", steps)

    def local_steps(self, key, round, ids, planned):
        return jnp.full_like(planned, self.steps)


def test_methods_of_two_gradients_take_devices_of_any_kind():
    """Beside client times, only these say how long a step is."""
    method = algorithms.fedsam(loss_fn, client_lr=0.1, perturbation_radius=0.05)
    for options in (
        {"devices": Devices(min_local_steps=1), "times": ClientTimes()},
        {"devices": OwnDevices(2)},
    ):
        result = run(method, rounds=2, **options)
        assert np.isfinite(result.params["w"]).all()
    assert result.history[-1]["local_steps"] == 2


@pytest.mark.parametrize("upload", [5.0, np.linspace(5.0, 9.0, N)], ids=["number", "array"])
def test_a_report_compares_methods_whose_messages_take_unequal_time(upload, tmp_path):
    """The clients are the same, though SCAFFOLD's rounds last longer; other clients are not."""

    def evaluate(params):
        return {"accuracy": np.abs(params["w"]).sum() / 100}

    chosen = ClientTimes(2.0, upload=upload, availability=np.arange(N) < N - 1, deadline=500.0)
    shared = {"evaluate": evaluate, "eval_every": 3}
    for algorithm in (FEDAVG, SCAFFOLD):
        run(algorithm, times=chosen, run_dir=tmp_path / algorithm.name, **shared)
    other = dataclasses.replace(chosen, step_seconds=3.0)
    run(FEDAVG, times=other, run_dir=tmp_path / "other", **shared)
    sections = sections_of(load_runs([tmp_path]))
    found = sorted([group.runs[0].path.name for group in s.groups] for s in sections)
    assert [sorted(names) for names in found] == [["fedavg", "scaffold"], ["other"]]
    shown = "5" if np.ndim(upload) == 0 else "5 to 9, mean 7"
    assert all(f"upload: {shown}" in section.title for section in sections)
