"""Whole runs: resume, interruption, one compile, agreement with rounds taken by hand."""

import dataclasses
import functools
import gc
import json
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, data, load_run, models, simulate, sweep
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.evaluate import build_client_evaluation, build_evaluation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.storage.checkpoint import Checkpoints
from tests.federations import of_sizes
from tests.tiers import few

N, FEATURES, CLASSES = 6, 4, 3
SLOW = pytest.mark.slow


@functools.cache
def make_clients(seed=0, sizes=(5, 9, 12, 7, 20, 11)):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), FEATURES)).astype(np.float32)
    return of_sizes(sizes, x, rng.integers(CLASSES, size=len(x)).astype(np.int32))


def loss_fn(params, examples, key):
    noise = 1 + 0.1 * jax.random.normal(key, ())  # a run must repeat its own randomness
    logits = examples.x @ params["w"]
    scores = jax.nn.log_softmax(logits)
    return -noise * jnp.take_along_axis(scores, examples.y[:, None], axis=1)[:, 0]


def first_params():
    return {"w": jnp.zeros((FEATURES, CLASSES))}


SCAFFOLD = algorithms.scaffold(loss_fn, client_lr=0.3)
FEDAVG = algorithms.fedavg(loss_fn, client_lr=0.3)
FEDADAM = algorithms.fedadam(loss_fn, client_lr=0.3, server_lr=0.1)
GRADMA_S = algorithms.gradma_s(loss_fn, client_lr=0.3, memory_size=4)
FAFED = algorithms.fafed(loss_fn, client_lr=0.1, momentum=0.5, second_moment_decay=0.9)


def run(algorithm=SCAFFOLD, params=None, **changes):
    """A run of 7 rounds. Mini-batches are drawn with replacement, which is soonest compiled."""
    arguments = {
        "rounds": 7,
        "cohort_size": 3,
        "local_steps": 2,
        "batch_size": 4,
        "replace": True,
        "seed": 5,
        "eval_every": 2,
        "client_map": "scan",
        "evaluate": lambda params: {"norm": jnp.abs(params["w"]).sum()},
    } | changes
    params = first_params() if params is None else params
    return simulate(algorithm, params, make_clients(), **arguments)


def interrupt(row):
    """Ctrl-C after round 4."""
    if row["round"] == 4:
        os.kill(os.getpid(), signal.SIGINT)


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_equals_its_rounds_taken_one_by_one():
    algorithm, clients = SCAFFOLD, make_clients()
    result = run(algorithm)
    schedule = Schedule(cohort_size=3, batch_size=4, local_steps=2, replace=True)
    round_fn = build_round(algorithm, "vmap")

    @jax.jit
    def one_round(state, t):
        return round_fn(state, schedule.draw(clients, jax.random.key(5), t))

    state = algorithm.init(first_params(), N)
    uplink = 0
    for t in range(7):
        state, metrics = one_round(state, jnp.int32(t))
        uplink += int(metrics["participants"]) * 2 * 4 * FEATURES * CLASSES
    np.testing.assert_allclose(result.params["w"], algorithm.params(state)["w"], atol=1e-5)
    assert [row["round"] for row in result.history] == [2, 4, 6, 7]
    assert result.history[-1]["bytes_up"] == uplink == 7 * 3 * 2 * 48
    assert result.history[-1]["gradients"] == 7 * 3 * 2
    norm = float(jnp.abs(state.server.params["w"]).sum())
    assert result.history[-1]["norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.methods
def test_rounds_that_do_not_communicate_cost_no_bytes():
    algorithm = algorithms.fedpd(loss_fn, client_lr=0.3, skip_probability=0.5)
    result = run(algorithm=algorithm, rounds=8, eval_every=8)
    row = result.history[-1]
    talks = 8 * row["communicated"]  # the mean over the rounds
    assert 0 < talks < 8
    assert row["bytes_up"] == 3 * talks * 48
    assert row["bytes_down"] == 3 * talks * (2 * 48 + 1)


@pytest.mark.slow
def test_a_measured_map_is_one_of_the_two_and_is_remembered(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chunk = {"rounds": 5, "eval_every": 5}  # as many rounds as are measured
    expected = run(FEDAVG, **chunk)
    for how in ("(measured)", "(measured before)"):
        actual = run(FEDAVG, client_map="measure", progress=True, **chunk)
        assert how in capsys.readouterr().err
        np.testing.assert_allclose(actual.params["w"], expected.params["w"], atol=1e-5)
    (answer,) = tmp_path.glob("fedjax_lab/plans/*.json")
    assert len(json.loads(answer.read_text())["seconds"]) == 2


@pytest.mark.parametrize(
    "client_map",
    ["shard_map", *(pytest.param(m, marks=SLOW) for m in ("auto", "vmap", "chunk:2", "pmap"))],
)
def test_client_maps_give_the_same_run(client_map):
    expected, actual = (run(rounds=6, client_map=name) for name in ("scan", client_map))
    np.testing.assert_allclose(actual.params["w"], expected.params["w"], atol=1e-5)
    assert actual.history[-1]["loss"] == pytest.approx(expected.history[-1]["loss"], rel=1e-4)


def counting_loss():
    """(loss, a list that each of its traces makes longer, their number in a chunk of a run)."""
    traces = []

    def counted(params, examples, key):
        traces.append(None)
        return loss_fn(params, examples, key)

    algorithm = algorithms.fedavg(counted, client_lr=0.1)
    state, clients, key = algorithm.init(first_params(), N), make_clients(), jax.random.key(0)
    chunk = build_chunk(
        Computation(algorithm, Schedule(3, 4, 2, replace=True)), Placement(parse_client_map("scan"))
    )
    chunk.lower(state, clients, key, jnp.int32(0), length=2)
    once = len(traces)
    assert once
    traces.clear()
    return counted, traces, once


@pytest.mark.slow
def test_a_loss_is_traced_once_per_length_of_chunk():
    counted, traces, once = counting_loss()
    run(algorithms.fedavg(counted, client_lr=0.1), rounds=41)
    # As many rounds as one likes: the same one trace. The last chunk is shorter.
    # Once before, for what labels it compares.
    assert len(traces) == 2 * once + 1


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (SCAFFOLD, {}),  # a row for each client; the last chunk is shorter
        # a start that depends on the data
        pytest.param(FAFED, {"rounds": 6}, marks=pytest.mark.methods),
        pytest.param(GRADMA_S, {"replace": False}, marks=SLOW),
        pytest.param(FEDADAM, {"replace": False}, marks=SLOW),
    ],
    ids=["scaffold", "fafed", "gradma_s", "fedadam"],
)
def test_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path, algorithm, changes):
    whole = run(run_dir=tmp_path / "whole", algorithm=algorithm, **changes)

    cut = {"run_dir": tmp_path / "cut", "algorithm": algorithm, **changes}
    first = run(**cut, on_row=interrupt)
    assert first.interrupted
    assert first.stopped == "interrupt"
    assert first.history[-1]["round"] == 4
    second = run(**cut)
    assert second.stopped is None
    assert_same_bits(whole.state, second.state)
    assert whole.history == second.history
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert lines[0] == lines[1]
    third = run(**cut)  # nothing is left to do
    assert_same_bits(whole.state, third.state)
    assert whole.history == third.history


def test_rows_after_the_last_checkpoint_are_run_again(tmp_path):
    whole = run(run_dir=tmp_path / "whole")
    run(run_dir=tmp_path / "cut", checkpoint_every=4, rounds=7)
    # As if the run had been killed after row 6, while it wrote the last line.
    checkpoints = tmp_path / "cut" / "checkpoints"
    for step in checkpoints.iterdir():
        if step.name == "7":
            for path in sorted(step.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            step.rmdir()
    metrics = tmp_path / "cut" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    again = run(run_dir=tmp_path / "cut", checkpoint_every=4)
    assert_same_bits(whole.state, again.state)
    assert whole.history == again.history


@pytest.mark.methods
def test_another_config_in_the_same_directory_is_refused(tmp_path):
    run(run_dir=tmp_path)
    with pytest.raises(FileExistsError, match=r"seed \(there 5, now 6\)"):
        run(run_dir=tmp_path, seed=6)
    other = algorithms.scaffold(loss_fn, client_lr=0.2)
    with pytest.raises(FileExistsError, match=r"client_lr.*0\.3.*0\.2"):
        run(run_dir=tmp_path, algorithm=other)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileExistsError, match=r"has files but no config\.json"):
        run(run_dir=tmp_path)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)


# orbax leaves a coroutine behind when a read fails
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", few(1, [flip, halve, lambda path: path.unlink()]))
def test_of_damaged_checkpoints_the_one_before_is_taken_or_none(tmp_path, damage):
    whole = run(run_dir=tmp_path, rounds=4)

    def harm(step):
        for path in (tmp_path / "checkpoints" / step).rglob("d/*"):  # where orbax keeps the arrays
            damage(path)

    harm("4")
    with pytest.warns(
        UserWarning,
        match=r"4 (cannot be read|is damaged).* The last intact checkpoint is that of round 2",
    ):
        again = run(run_dir=tmp_path, rounds=4)
    assert_same_bits(whole.state, again.state)
    assert whole.history == again.history
    harm("2")
    harm("4")
    with pytest.raises(ValueError, match=r"checkpoint .*4 .* No other checkpoint is intact"):
        run(run_dir=tmp_path, rounds=4)
    gc.collect()


def test_arrays_that_changed_on_disk_are_noticed(tmp_path):
    """Damage that the storage format cannot see, because it was written properly."""
    state = {"a": jnp.arange(4.0), "b": (), "c": [jnp.int32(3)]}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state, {"rows": 1})
    round, restored, extra = checkpoints.restore(like=state)
    assert (round, extra) == (2, {"rows": 1})
    assert_same_bits(restored, state)
    with pytest.raises(ValueError, match="another model or method"):
        checkpoints.restore(like={**state, "a": jnp.arange(5.0)})
    meta = next((tmp_path / "2" / "meta").rglob("metadata"))
    content = json.loads(meta.read_text())
    meta.write_text(json.dumps(content | {"digest": "0" * 64}))
    with pytest.raises(ValueError, match="is damaged"):
        checkpoints.restore(like=state)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        Checkpoints(tmp_path / "empty").restore(like=state)


def test_metrics_on_disk_are_the_history(tmp_path):
    result = run(run_dir=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == result.history
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hyperparameters"]["control_update"] == "II"
    assert config["algorithm"] == "scaffold"
    assert config["versions"]["jax"] == jax.__version__
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["round"] == 7
    assert summary["compile_seconds"] > 0


def test_writing_checkpoints_takes_no_time_of_the_run(tmp_path, monkeypatch):
    waited, clock, save = [0.0], time.perf_counter, Checkpoints.save

    def slowly(*args):
        waited[0] += 1000.0
        save(*args)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + waited[0])
    monkeypatch.setattr(Checkpoints, "save", slowly)
    result = run(run_dir=tmp_path / "run")
    assert waited[0] > 1000.0  # the first one comes before the last row
    assert result.seconds < 1000.0
    times = json.loads((tmp_path / "run" / "times.jsonl").read_text().splitlines()[-1])
    assert times["seconds"] < 1000.0
    swept = sweep(
        functools.partial(algorithms.fedavg, loss_fn), first_params(), make_clients(),
        points={"client_lr": [0.1]}, seeds=[0], rounds=4, eval_every=2, cohort_size=3,
        local_steps=1, batch_size=4, replace=True, run_dir=tmp_path / "sweep",
    )  # fmt: skip
    assert swept.seconds < 1000.0


def test_the_caller_keeps_its_params():
    params = first_params()
    run(params=params, rounds=2)
    np.testing.assert_array_equal(params["w"], 0)  # donated buffers could not be read


def test_infinities_and_nans_of_rows_survive_a_resumption(tmp_path):
    def evaluate(params):
        return {"up": jnp.inf, "rest": jnp.array([-jnp.inf, jnp.nan, 1.0])}

    whole = run(rounds=4, evaluate=evaluate)
    run(rounds=2, evaluate=evaluate, run_dir=tmp_path)
    rows = run(rounds=4, evaluate=evaluate, run_dir=tmp_path).history
    np.testing.assert_equal(rows, whole.history)
    assert [row["up"] for row in rows] == [np.inf, np.inf]
    file = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["rest"] for row in file] == [[None, None, 1.0]] * 2
    assert load_run(tmp_path).history == file


def test_a_diverging_run_is_written_as_null(tmp_path):
    params = {"w": jnp.full((FEATURES, CLASSES), 1e38)}
    with pytest.warns(UserWarning, match="diverged: the global model is not finite after round 2"):
        result = run(run_dir=tmp_path, params=params, rounds=6, on_nonfinite="keep")
    assert result.stopped == "diverged"
    assert not result.interrupted
    assert [row["round"] for row in result.history] == [2]
    assert not np.isfinite(result.history[-1]["loss"])
    assert np.isnan(result.history[-1]["norm"])  # it was not evaluated
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["loss"] is None
    assert json.loads(last)["norm"] is None
    assert json.loads((tmp_path / "summary.json").read_text())["stopped"] == "diverged"
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


healthy_clients = make_clients  # whatever a test puts in its place


def spoilt_clients(*ids):
    """The clients, of whom some hold values that are not finite."""
    clients = healthy_clients()
    owners = np.repeat(np.arange(N), np.asarray(clients.sizes))
    x = np.array(clients.examples.x)
    x[np.asarray(clients.indices)[np.isin(owners, ids)]] = np.nan
    examples = clients.examples._replace(x=jax.device_put(x))
    return dataclasses.replace(clients, examples=examples)


def ids_of_rounds(rounds):
    schedule = Schedule(cohort_size=3, batch_size=4, local_steps=2, replace=True)
    key = jax.random.key(5)
    return [np.asarray(schedule.draw(healthy_clients(), key, t).client_ids) for t in range(rounds)]


@pytest.mark.filterwarnings("ignore:.*examples of the client")
@pytest.mark.parametrize("on_nonfinite", few(2, ["exclude", "stop", "keep"]))
def test_clients_that_are_not_finite(monkeypatch, on_nonfinite):
    taking = [2 in ids for ids in ids_of_rounds(7)]
    first = taking.index(True)
    healthy = run(FEDAVG, rounds=max(first, 1), eval_every=max(first, 1))
    monkeypatch.setitem(globals(), "make_clients", lambda: spoilt_clients(2))
    told = {
        "exclude": f"in round {first} of fedavg 1 of 3 clients gave values that are not finite",
        "stop": f"diverged: on_nonfinite is 'stop': the run ends before round {first}",
        "keep": "diverged: the global model is not finite",
    }
    with pytest.warns(UserWarning, match=told[on_nonfinite]):
        result = run(FEDAVG, on_nonfinite=on_nonfinite, eval_every=7)
    if on_nonfinite == "exclude":
        assert result.stopped is None
        assert result.history[-1]["nonfinite_clients"] == sum(taking)
        assert np.isfinite(result.params["w"]).all()
        return
    assert result.stopped == "diverged"
    if on_nonfinite == "stop":
        assert [row["round"] for row in result.history] == [first][: first > 0]
        expected = healthy.params["w"] if first else first_params()["w"]
        np.testing.assert_array_equal(result.params["w"], expected)
    else:
        assert "nonfinite_clients" not in result.history[-1]


@pytest.mark.filterwarnings("ignore:.*examples of the client", "ignore:in round")
def test_a_round_without_a_finite_client_is_the_end(monkeypatch):
    monkeypatch.setitem(globals(), "make_clients", lambda: spoilt_clients(*range(N)))
    with pytest.warns(UserWarning, match="diverged: in round 0 no client was finite"):
        result = run(FEDAVG)
    assert result.stopped == "diverged"
    np.testing.assert_array_equal(result.params["w"], first_params()["w"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cohort_size": 7}, "cohort_size is 7; it must be between 1 and 6"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"eval_every": 0}, "eval_every is 0"),
        ({"local_steps": None}, "set exactly one"),
        ({"local_epochs": 1}, "set exactly one"),
        ({"weights": "exmaples"}, "Did you mean 'examples'"),
        ({"client_map": "chunk:0"}, "must be at least 1"),
        ({"client_map": "shard"}, "Did you mean 'shard_map'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296; it must be between 0 and 4294967295"),
        ({"on_nonfinite": "drop"}, "on_nonfinite is 'drop'; it must be one of exclude, keep, stop"),
        ({"config": {"seed": 1}}, "config has the name 'seed'"),
        ({"evaluate": lambda params: {"loss": 1.0}}, "evaluate returned 'loss', a name that rows"),
        ({"diagnose": lambda state: {"norm": 1.0}}, "diagnose returned 'norm', a name that rows"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)


def test_memory_smaller_than_the_cohort():
    algorithm = algorithms.gradma_s(loss_fn, client_lr=0.1, memory_size=2)
    with pytest.raises(ValueError, match="memory_size is 2; it must be at least the cohort's 3"):
        run(algorithm=algorithm)
    algorithm = algorithms.gradma_s(loss_fn, client_lr=0.1, memory_size=7)
    with pytest.raises(ValueError, match="memory_size is 7; it must be between 0 and 6"):
        run(algorithm=algorithm)


def test_evaluation_counts_every_example_once():
    rng = np.random.default_rng(0)
    test = data.Examples(rng.normal(size=(23, 2)).astype(np.float32), np.zeros(23, np.int32))

    def count(params, examples):
        return (examples.x[:, 0] > 0).astype(jnp.float32), params * examples.x[:, 1]

    scores = build_evaluation(count, test, batch_size=5)(jnp.float32(2.0))
    assert float(scores["accuracy"]) == pytest.approx((test.x[:, 0] > 0).mean())
    assert float(scores["test_loss"]) == pytest.approx(2 * test.x[:, 1].mean(), rel=1e-5)


def test_an_evaluation_that_means_nothing_is_refused():
    def apply(params, x, key):
        return x @ params["w"]

    x, y = np.ones((4, FEATURES), np.float32), np.array([0, 1, 2, 3], np.int32)
    counts = models.accuracy_counts(apply)
    with pytest.raises(ValueError, match=r"labels from 0 to 3; the model has 3 logits, for 0 to 2"):
        build_evaluation(counts, data.Examples(x, y))(first_params())
    with pytest.raises(ValueError, match="test has values that are not finite"):
        build_evaluation(counts, data.Examples(x * np.nan, y))
    with pytest.raises(TypeError, match=r"must return \(correct \[B\], losses \[B\]\)"):
        build_evaluation(lambda p, e: apply(p, e.x, None), data.Examples(x, y))(first_params())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, e, key: (loss_fn(p, e, key), 1), "loss_fn returned tuple; it must return one"),
        (lambda p, e, key: e.y, "loss_fn returned int32; losses must be floating-point"),
    ],
)
def test_losses_of_another_kind(loss, message):
    with pytest.raises(TypeError, match=message):
        run(algorithms.fedavg(loss, client_lr=0.1))


def test_wrong_objects_elsewhere():
    with pytest.raises(TypeError, match=r"server_optimizer is 'adam'.*such as optax\.adam"):
        algorithms.fedopt(loss_fn, "adam", client_lr=0.1)
    with pytest.raises(TypeError, match="build is the Algorithm fedavg; it must be a function"):
        sweep(
            FEDAVG,
            first_params(),
            make_clients(),
            points={},
            seeds=[0],
            rounds=1,
            cohort_size=2,
            batch_size=2,
        )


def test_accuracy_per_client():
    clients = make_clients()

    def count(params, examples):
        return (examples.y == params).astype(jnp.float32), jnp.zeros(examples.y.shape)

    accuracy = build_client_evaluation(count, clients, batch_size=7)(jnp.int32(1))
    histogram = clients.label_histogram()
    np.testing.assert_allclose(accuracy, histogram[:, 1] / histogram.sum(1), rtol=1e-6)


def test_a_regression_is_scored_by_its_own_name_on_whom_it_never_saw():
    rng = np.random.default_rng(0)
    mine = {f"user{i}": (rng.normal(size=(i + 1, 2)), rng.normal(size=i + 1)) for i in range(9)}
    clients = data.from_clients(mine)
    _, unseen = data.split_clients(clients, 4)
    w = np.array([1.0, -2.0])
    error = {name: (x @ w - y) ** 2 for name, (x, y) in mine.items()}
    counts = models.squared_error_counts(lambda params, x, key: x @ params)
    scores = build_evaluation(counts, unseen, batch_size=4)(jnp.float32(w))
    assert set(scores) == {"mean_squared_error", "test_loss"}
    expected = np.concatenate([error[name] for name in unseen.names]).mean()
    for score in scores.values():
        assert float(score) == pytest.approx(expected, rel=1e-5)
    for part in (clients, unseen):
        each = build_client_evaluation(counts, part, batch_size=4)(jnp.float32(w))
        np.testing.assert_allclose(each, [error[name].mean() for name in part.names], rtol=1e-5)
