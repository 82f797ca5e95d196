"""Sweeps: every run is the separate run; maps, groups and padding change nothing but time."""

import functools
import math
import re
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import SweepResult, algorithms, data, simulate, sweep
from fedjax_lab.machine.device_memory import device_memory
from fedjax_lab.simulation import sweep_program
from fedjax_lab.simulation.evaluate import build_evaluation
from fedjax_lab.simulation.sweep_points import list_points
from fedjax_lab.simulation.sweep_program import group_size
from fedjax_lab.storage.rows import MetricsFile
from tests.simulation.test_run import (
    CLASSES,
    FEATURES,
    counting_loss,
    first_params,
    loss_fn,
    make_clients,
    spoilt_clients,
)

OPTIONS = {
    **{"rounds": 2, "cohort_size": 3, "local_steps": 2, "batch_size": 4, "eval_every": 2},
    "replace": True,  # shuffled passes take longer to compile
}
SLOW = pytest.mark.slow
UNEQUAL = data.Devices(min_local_steps=1, dropout=0.3)


def evaluation():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(11, FEATURES)).astype(np.float32)
    test = data.Examples(x, rng.integers(CLASSES, size=11).astype(np.int32))

    def count(params, examples):
        logits = examples.x @ params["w"]
        right = logits.argmax(-1) == examples.y
        return right.astype(logits.dtype), jnp.square(logits).sum(-1)

    return build_evaluation(count, test, batch_size=4)


def run(build=None, params=None, clients=None, **changes):
    build = build or functools.partial(algorithms.fedavg, loss_fn)
    arguments = OPTIONS | {"points": {"client_lr": [0.3, 0.1]}, "seeds": (5, 6)} | changes
    params = first_params() if params is None else params
    return sweep(build, params, clients or make_clients(), **arguments)


def assert_is_the_run(result, p, r, single, rtol):
    """Run (p, r) of a sweep against ``simulate``'s result."""
    assert result.rounds.tolist() == [row["round"] for row in single.history]
    assert {"round", *result.history} == set(single.history[-1])
    for name, values in result.history.items():
        expected = [row[name] for row in single.history]
        np.testing.assert_allclose(values[p, r], expected, rtol=rtol, atol=rtol, err_msg=name)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[p, r], b, rtol=rtol, atol=rtol),
        result.params,
        single.params,
    )


def start(key):
    return {"w": 0.1 * jax.random.normal(key, (FEATURES, CLASSES))}


EPOCHS = {"local_epochs": 1, "local_steps": None, "replace": False, "rounds": 3}
METHODS = {
    # A row for each client.
    "scaffold": (algorithms.scaffold, {}, {"rounds": 4, "weights": "examples", "devices": UNEQUAL}),
    # A start that depends on the data.
    "fafed": (algorithms.fafed, {"momentum": 0.5, "second_moment_decay": 0.9}, {}),
    "fedavg": (algorithms.fedavg, {}, EPOCHS),
    "gradma_s": (functools.partial(algorithms.gradma_s, memory_size=4), {}, {}),
    "stem": (algorithms.stem, {"momentum": 0.5}, {"devices": UNEQUAL}),
}


@pytest.mark.parametrize(
    "method",
    ["scaffold", *(pytest.param(m, marks=SLOW) for m in METHODS if m != "scaffold")],
)
@pytest.mark.slow
def test_a_run_equals_the_separate_run_in_float64(x64, method):
    factory, fixed, options = METHODS[method]
    build = functools.partial(factory, loss_fn, **fixed)
    options = {"evaluate": evaluation(), "params": start, **options}
    points = [{"client_lr": 0.3}, {"client_lr": 0.1}]
    result = run(build, points=points, **options)
    del options["params"]
    options |= {"seed": 6, "client_map": "scan"}
    single = simulate(
        build(**points[1]), start(jax.random.key(6)), make_clients(), **OPTIONS | options
    )
    assert_is_the_run(result, 1, 1, single, 1e-12)


@pytest.fixture(scope="module")
def single():
    """Three rounds, of which the last one is a chunk of its own."""
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.3, server_lr=0.5)
    options = OPTIONS | {"rounds": 3, "seed": 5, "client_map": "scan"}
    return simulate(algorithm, first_params(), make_clients(), **options)


@pytest.mark.parametrize(
    ("run_map", "client_map"),
    [
        pytest.param("auto", "auto", marks=pytest.mark.methods),  # one run on each of 3 devices
        pytest.param("chunk:2", "chunk:2", marks=SLOW),
        pytest.param("vmap", "scan", marks=SLOW),
        pytest.param("shard_map", "vmap", marks=SLOW),  # 3 runs on 8 devices
    ],
)
def test_all_maps_of_runs_and_clients_give_the_runs_of_simulate(run_map, client_map, single):
    points = {"client_lr": [0.3], "server_lr": [1.0, 0.0, 0.5]}
    options = {"seeds": (5,), "rounds": 3, "run_map": run_map, "client_map": client_map}
    result = run(points=points, **options)
    assert_is_the_run(result, 2, 0, single, 1e-5)
    np.testing.assert_array_equal(result.params["w"][1, 0], first_params()["w"])
    assert result.run_map == {"auto": "shard_map:3"}.get(run_map, run_map)
    assert result.params["w"].shape == (3, 1, FEATURES, CLASSES)
    assert result.history["loss"].shape == (3, 1, 2)


@pytest.mark.slow
def test_groups_give_the_same_runs_with_one_program():
    options = {"points": {}, "seeds": range(11), "rounds": 4, "run_map": "scan"}
    counted, traces, once = counting_loss()
    build = functools.partial(algorithms.fedavg, counted, client_lr=0.1)
    whole = run(build, **options)
    assert whole.runs_at_once == 11
    # A program of many runs is traced as one of a single run; the check of labels is one more.
    assert len(traces) == once + 1
    with pytest.raises(ValueError, match="max_bytes is 1; it must be at least") as error:
        run(build, **options, max_bytes=1)
    needed = int(re.search(r"at least ([\d,]+)", str(error.value))[1].replace(",", ""))
    traces.clear()
    divided = run(build, **options, max_bytes=needed + 2400)  # of which a run adds about 200
    assert divided.runs_at_once < 11
    assert len(traces) <= 3 * once + 1  # for the sizes 11, 1 and this one, not for each group
    assert not divided.interrupted
    jax.tree.map(np.testing.assert_array_equal, whole.params, divided.params)
    jax.tree.map(np.testing.assert_array_equal, whole.history, divided.history)


@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_groups_are_equal_and_as_few_as_memory_allows(multiple):
    for num_runs in range(1, 30):
        for capacity in range(0, 30):
            size = group_size(num_runs, multiple, capacity)
            units, most = math.ceil(num_runs / multiple), max(1, capacity // multiple)
            assert size % multiple == 0
            assert size <= most * multiple
            assert math.ceil(num_runs / size) == math.ceil(units / most)


def test_points_are_all_combinations_or_a_list():
    combined = list_points({"client_lr": [0.3, 0.1], "server_lr": np.array([1.0, 0.5])})
    assert combined == [{"client_lr": a, "server_lr": b} for a in (0.3, 0.1) for b in (1.0, 0.5)]
    listed = list_points([{"a": 0.3, "b": np.float32(0.5)}, {"b": jnp.float32(1.0), "a": 0.1}])
    assert listed == [{"a": 0.3, "b": 0.5}, {"a": 0.1, "b": 1.0}]
    assert [list(point) for point in listed] == [["a", "b"]] * 2
    assert list_points({}) == [{}]
    assert list_points({"a": [1, np.float32(0.5), np.int32(3)]}) == [{"a": x} for x in (1, 0.5, 3)]
    assert all(type(point["a"]) is float for point in list_points({"a": [1, 2]}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"points": {"client_lr": ["a"]}}, TypeError, "points has 'a' .* it must be a number"),
        ({"points": {"client_lr": [True]}}, TypeError, "points has True for client_lr"),
        ({"points": {"client_lr": 0.1}}, ValueError, r"points\['client_lr'\] is 0.1; it must be a"),
        ({"points": {"client_lr": []}}, ValueError, r"points\['client_lr'\] is \[\]"),
        ({"points": {"client_rl": [0.1]}}, ValueError, "Did you mean 'client_lr'"),
        ({"points": {"server_lr": [0.1]}}, ValueError, "points lacks client_lr"),
        ({"points": {"client_lr": [-0.1]}}, ValueError, "client_lr is -0.1"),
        ({"points": []}, ValueError, "points is empty"),
        ({"points": [{"client_lr": 0.1}, {"lr": 0.1}]}, ValueError, "must have the same names"),
        ({"seeds": ()}, ValueError, r"seeds is \[\]"),
        ({"seeds": (1, 1)}, ValueError, r"seeds is \[1, 1\]"),
        ({"seeds": (-1,)}, ValueError, "seeds is -1"),
        ({"seeds": (0.5,)}, TypeError, "seeds is 0.5; it must be an integer"),
        ({"run_map": "pmap"}, ValueError, "run_map is 'pmap'; it must be auto"),
        ({"run_map": "chunk:0"}, ValueError, "run_map is 'chunk:0'"),
        ({"run_map": "vmpa"}, ValueError, "run_map is 'vmpa'; .*Did you mean 'vmap'"),
        ({"client_map": "shard_map"}, ValueError, "client_map is 'shard_map'; within a sweep"),
        ({"max_bytes": 0}, ValueError, "max_bytes is 0"),
        ({"rounds": 0}, ValueError, "rounds is 0"),
        ({"cohort_size": 7}, ValueError, "cohort_size is 7; it must be between 1 and 6"),
        ({"build": lambda client_lr: 3}, TypeError, "build returned a int; it must return an Alg"),
        (
            {"evaluate": lambda params: {"norm": float(params["w"].sum())}},
            TypeError,
            r"evaluate cannot be traced; .*without float\(\)",
        ),
        (
            {"evaluate": lambda params: {"w": params["w"]}},
            ValueError,
            r"evaluate returned w of shape \(4, 3\); it must be a scalar",
        ),
        (
            {"evaluate": lambda params: params["w"].sum()},
            TypeError,
            "evaluate returned an array; it must be a dict",
        ),
        ({"evaluate": 3}, TypeError, "evaluate is 3; it must be a function"),
        *(
            (
                {"evaluate": lambda params, name=name: {name: params["w"].sum()}},
                ValueError,
                f"evaluate returned '{name}', a name that rows already have",
            )
            for name in ("loss", "run", "diverged", "gradients", "round")
        ),
        ({"points": [0.1, 0.2]}, TypeError, r"points is \[0.1, 0.2\]; it must map names to lists"),
        ({"clients": {"a": 3}}, TypeError, "clients is dict, not FederatedArrays"),
        ({"params": {"w": 0.5}}, TypeError, r"params\['w'\] is float, not an array"),
        ({"params": {}}, ValueError, "params is {}, without any array"),
        (
            {"build": lambda client_lr: algorithms.fedavg(loss_fn, client_lr=float(client_lr))},
            TypeError,
            "build needs to know a value, .* the values of client_lr are traced",
        ),
    ],
)
def test_bad_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        run(**changes)


def result_of(accuracy, points):
    """A result with accuracies [P, R, E]."""
    accuracy = np.asarray(accuracy, float)
    seeds, rounds = range(accuracy.shape[1]), np.arange(accuracy.shape[2])
    history = {"accuracy": accuracy}
    return SweepResult(points, list(seeds), rounds, history, {}, 0.0, 0.0, False, "scan", 1)


POINTS = [{"client_lr": rate} for rate in (1.0, 0.1, 0.01)]


def test_the_best_point():
    result = result_of(
        [[[0.9, 0.2], [0.9, 0.4]], [[0.1, 0.5], [0.1, 0.3]], [[0, 0], [0, 0]]], POINTS
    )
    assert result.best("accuracy") == POINTS[1]
    assert result.best("accuracy", at="best") == POINTS[0]
    assert result.best("accuracy", mode="min") == POINTS[2]
    with pytest.raises(ValueError, match=r"metric is 'acuracy'.*Did you mean 'accuracy'"):
        result.best("acuracy")
    with pytest.raises(ValueError, match="mode is 'most'"):
        result.best("accuracy", mode="most")


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_point_without_a_number_never_wins(mode):
    nan, inf = math.nan, math.inf
    diverged = [[0.7, nan], [0.8, 0.8]]
    result = result_of([diverged, [[0.5, 0.5], [0.5, 0.5]], [[inf, inf], [-inf, -inf]]], POINTS)
    assert result.best("accuracy", mode=mode) == POINTS[1]
    # Nor does what a run had before it diverged count, if one asks for its best.
    assert result.best("accuracy", mode=mode, at="best") == POINTS[1]
    assert " 0.8" not in result.table("accuracy", mode=mode, at="best")
    nothing = result_of([diverged], POINTS[:1])
    with pytest.raises(ValueError, match="no point has a finite 'accuracy'"):
        nothing.best("accuracy", mode=mode)


def test_the_table_has_mean_and_interval():
    values = np.array([[0.5, 0.7, 0.9], [0.2, math.nan, 0.4]])
    lines = result_of(values[..., None], POINTS[:2]).table("accuracy", digits=3).splitlines()
    low, high = stats.t.interval(0.95, 2, loc=0.7, scale=stats.sem(values[0]))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["client_lr", "accuracy"]
    assert cells[2] == ["1", f"0.700 ± {(high - low) / 2:.3f}"]
    assert cells[3] == ["0.1", "-"]
    assert len(cells) == 4


def test_the_memory_of_a_device():
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 123})
    assert device_memory(gpu) == 123
    lines = Path("/proc/meminfo").read_text()
    physical = 1024 * int(re.search(r"MemTotal: +(\d+) kB", lines)[1])
    assert device_memory() == pytest.approx(physical / 8, rel=0.01)


@pytest.mark.slow
def test_a_run_that_diverges_has_no_score():
    """Its model stays as it was, and would else have an accuracy."""

    def steep(params, examples, key):
        return loss_fn(params, examples, key) + jnp.square(params["w"]).sum()

    build = functools.partial(algorithms.fedavg, steep)
    points = {"client_lr": [0.1, 3e38]}
    result = run(build, points=points, seeds=(5,), evaluate=evaluation())
    for name in ("loss", "accuracy", "test_loss"):
        assert np.isfinite(result.history[name][0]).all()
        assert np.isnan(result.history[name][1, 0, -1])
    assert result.history["nonfinite_clients"][1, 0, -1] > 0
    assert result.diverged.tolist() == [[False], [True]]


@pytest.mark.parametrize(
    ("on_nonfinite", "is_lost"), [("exclude", False), ("stop", True), ("keep", True)]
)
def test_a_client_that_is_not_finite(on_nonfinite, is_lost):
    options = {"points": {"client_lr": [0.1]}, "seeds": (5,), "on_nonfinite": on_nonfinite}
    clients = spoilt_clients(0, 1, 2, 3)  # of six, of whom three take part
    with pytest.warns(UserWarning, match="33 examples of the clients 0, 1, 2, 3 have values"):
        result = run(clients=clients, evaluate=scored, **options)
    assert result.diverged.item() is is_lost
    assert np.isnan(result.history["size"][0, 0, -1]) == is_lost
    assert ("nonfinite_clients" in result.history) == (on_nonfinite != "keep")


def scored(params):
    return {"size": jnp.abs(params["w"]).sum()}


def diverging(value, gradient, server):
    """FedAvg on a quadratic; after the first step the loss has a value more, and a factor."""

    def loss(params, examples, key):
        squares = jnp.square(params["w"].sum() - examples.x[:, 0])
        is_later = params["w"].sum() != 0
        bad = jax.lax.stop_gradient(jnp.where(is_later, value, 0.0))
        return jnp.where(is_later, gradient, 1.0) * squares + bad

    rate = lambda t: jnp.where(t == 1, server, 1.0)  # noqa: E731
    return algorithms.fedavg(loss, client_lr=0.1, server_lr=rate)


SPOILT = {
    "none": {"value": 0.0, "gradient": 1.0, "server": 1.0},
    "loss is NaN": {"value": np.nan, "gradient": 1.0, "server": 1.0},
    "loss is infinite": {"value": np.inf, "gradient": 1.0, "server": 1.0},
    "gradients are not finite": {"value": 0.0, "gradient": np.nan, "server": 1.0},
    "model is infinite": {"value": 0.0, "gradient": 1.0, "server": np.inf},
}


@pytest.fixture(scope="module")
def spoilt():
    """A sweep over all points of ``SPOILT``, and what it warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        options = {"points": list(SPOILT.values()), "seeds": (5,), "evaluate": scored}
        result = run(diverging, rounds=4, eval_every=1, run_map="scan", **options)
    return result, [str(one.message) for one in told]


def test_a_run_diverges_by_its_model_and_its_clients_and_not_by_its_loss(spoilt):
    """As in ``simulate``, of which the next test is."""
    result, told = spoilt
    expected = [name in ("gradients are not finite", "model is infinite") for name in SPOILT]
    assert result.diverged[:, 0].tolist() == expected
    sizes = result.history["size"][:, 0]
    assert np.isfinite(sizes[:3]).all()
    np.testing.assert_array_equal(sizes[1], sizes[0])  # gradients are those of the first point
    assert np.isnan(sizes[3]).all()  # from the second step on
    assert np.isnan(sizes[4]).tolist() == [False, True, True, True]
    for metric in ("size", "loss", "delta_norm", "bytes_up"):
        for mode in ("min", "max"):
            for at in ("last", "best"):
                assert np.isnan(result.values(metric, mode=mode, at=at)[3:]).all()
    said = [text for text in told if "although the messages are finite" in text]
    assert len(said) == 1
    assert said[0].startswith("in round 0 of a run the loss is nan")


def test_of_each_group_it_is_known_which_runs_diverged(monkeypatch):
    monkeypatch.setattr(sweep_program, "group_size", lambda *_: 2)
    points = [SPOILT["gradients are not finite"], SPOILT["none"], SPOILT["none"]]
    options = {"rounds": 2, "eval_every": 1, "run_map": "scan"}
    result = run(diverging, points=points, seeds=(5,), **options)
    assert result.runs_at_once == 2
    assert result.diverged.tolist() == [[True], [False], [False]]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", list(SPOILT))
@pytest.mark.methods
def test_so_it_does_in_simulate(spoilt, name):
    result, _ = spoilt
    options = OPTIONS | {"rounds": 4, "eval_every": 1, "seed": 5, "client_map": "scan"}
    algorithm = diverging(**SPOILT[name])
    single = simulate(algorithm, first_params(), make_clients(), evaluate=scored, **options)
    place = list(SPOILT).index(name)
    assert (single.stopped == "diverged") == result.diverged[place, 0]
    sizes = [row["size"] for row in single.history]
    np.testing.assert_allclose(result.history["size"][place, 0, : len(sizes)], sizes, rtol=1e-5)


def test_a_sweep_shorter_than_an_evaluation_can_be_extended(tmp_path):
    options = {"run_map": "scan", "evaluate": scored, "eval_every": 4}
    (tmp_path / ".sweep.json.0a1b2c3d.tmp").write_text('{"half')  # what a kill leaves
    run(rounds=2, run_dir=tmp_path, **options)
    longer = run(rounds=3, run_dir=tmp_path, **options)
    assert_equal_results(longer, run(rounds=3, **options))


def test_a_sweep_that_was_killed_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    """In the second of two groups, the first of which goes on from its end."""
    monkeypatch.setattr(sweep_program, "group_size", lambda *sizes: 2)
    options = {"run_map": "scan", "evaluate": scored, "eval_every": 2}
    uninterrupted = run(rounds=6, **options)
    append, written = MetricsFile.append, []

    def append_some(self, row):
        written.append(row)
        if len(written) == 10:  # an evaluation has two rows and a time; the fourth, halfway
            raise RuntimeError("killed")
        append(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "append", append_some)
        with pytest.raises(RuntimeError, match="killed"):
            run(rounds=4, run_dir=tmp_path, **options)
    resumed = run(rounds=6, run_dir=tmp_path, **options)
    assert not resumed.interrupted
    assert resumed.rounds.tolist() == [2, 4, 6]
    assert_equal_results(resumed, uninterrupted)
    monkeypatch.setattr(sweep_program.Group, "advance", None)  # nothing is left to run
    assert_equal_results(run(rounds=6, run_dir=tmp_path, **options), uninterrupted)
    with pytest.raises(FileExistsError, match=r"another config: sweep.seeds \(there \[5, 6\]"):
        run(rounds=6, run_dir=tmp_path, **options, seeds=(5, 7))
    with pytest.raises(ValueError, match="rounds is 2; it must be at least 6"):
        run(rounds=2, run_dir=tmp_path, **options)
    (tmp_path / "sweep.json").unlink()
    with pytest.raises(FileExistsError, match=r"which has files but no sweep\.json"):
        run(rounds=6, run_dir=tmp_path, **options)


def test_a_sweep_goes_on_with_another_number_of_devices(tmp_path, monkeypatch):
    """Three runs on three devices, then on two, one of which repeats a run."""
    options = {"points": {"client_lr": [0.3]}, "seeds": (5, 6, 7), "evaluate": scored}
    assert run(run_dir=tmp_path, **options).run_map == "shard_map:3"
    monkeypatch.setattr("fedjax_lab.simulation.sweep.useful_devices", lambda *_: 2)
    with pytest.warns(UserWarning, match="first rounds ran on 3 devices; the next ones run on 2"):
        longer = run(rounds=4, run_dir=tmp_path, **options)
    assert longer.run_map == "shard_map:2"
    assert longer.runs_at_once == 3
    whole = run(rounds=4, run_map="scan", **options)
    for name in ("history", "params"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            getattr(longer, name),
            getattr(whole, name),
        )


def assert_equal_results(one, other):
    for name in ("history", "params", "diverged", "stopped", "rounds"):
        jax.tree.map(np.testing.assert_array_equal, getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("run_map", ["scan", pytest.param("vmap", marks=SLOW)])
def test_a_run_that_is_over_keeps_its_last_values(run_map, tmp_path):
    options = {"run_map": run_map, "evaluate": scored, "eval_every": 1, "seeds": (5,)}
    others = run(rounds=4, **options)
    last = others.history["size"][0, 0, 1]

    def stop_when(row):
        return row["round"] == 2 and math.isclose(row["size"], last, rel_tol=1e-5)

    result = run(rounds=4, stop_when=stop_when, run_dir=tmp_path, **options)
    assert result.stopped.tolist() == [[True], [False]]
    assert not result.interrupted
    for name, values in result.history.items():
        expected = others.history[name].copy()
        expected[0, 0, 2:] = expected[0, 0, 1]
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6, err_msg=name)
    single = simulate(
        algorithms.fedavg(loss_fn, client_lr=0.3),
        first_params(),
        make_clients(),
        **OPTIONS | {"seed": 5, "client_map": "scan"},
    )
    np.testing.assert_allclose(result.params["w"][0, 0], single.params["w"], rtol=1e-5)
    np.testing.assert_allclose(result.params["w"][1, 0], others.params["w"][1, 0], rtol=1e-5)
    assert_equal_results(run(rounds=4, run_dir=tmp_path, **options), result)  # it stays over
    longer = run(rounds=6, stop_when=lambda row: True, run_dir=tmp_path, **options)
    assert longer.rounds.tolist() == [1, 2, 3, 4]  # now all are over
    assert longer.stopped.all()
    assert not longer.interrupted
    longer = run(rounds=6, run_dir=tmp_path, **options)
    assert longer.stopped.tolist() == [[True], [False]]
    np.testing.assert_array_equal(longer.params["w"][0, 0], result.params["w"][0, 0])


def test_a_resumed_sweep_asks_with_all_rows(tmp_path):
    """As ``simulate`` does, so that a function may count, or look at the best row so far."""
    options = {"evaluate": scored, "eval_every": 1, "run_map": "scan"}

    def asked(calls):
        rows = []

        def stop_when(row):
            rows.append(row)
            return row["round"] == 3 and row["client_lr"] < 0.2

        for rounds in calls:
            rows.clear()
            result = run(
                rounds=rounds, stop_when=stop_when, run_dir=tmp_path / str(len(calls)), **options
            )
        return result, rows

    (whole, rows), (resumed, again) = asked([5]), asked([2, 4, 5])
    assert len(rows) == 2 * 3 + 2 * 5
    assert again == rows
    assert_equal_results(resumed, whole)


def test_a_group_whose_runs_diverged_or_are_over_ends(monkeypatch):
    advanced = []
    advance = sweep_program.Group.advance

    def noted(self, first, length):
        advanced.append((first, [not run.is_over for run in self.runs]))
        return advance(self, first, length)

    monkeypatch.setattr(sweep_program.Group, "advance", noted)
    points = [SPOILT["gradients are not finite"], SPOILT["none"]]
    result = run(
        diverging, points=points, seeds=(5,), rounds=6, eval_every=1, evaluate=scored,
        run_map="scan", on_nonfinite="exclude", stop_when=lambda row: row["round"] == 3,
    )  # fmt: skip
    assert advanced == [(0, [True, True]), (1, [False, True]), (2, [False, True])]
    assert result.diverged.tolist() == [[True], [False]]
    assert result.stopped.tolist() == [[False], [True]]  # also where no other run went on
    assert not result.interrupted
    assert result.rounds.tolist() == [1, 2, 3]
    assert np.isnan(result.history["size"][0, 0]).all()


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="2 processes; a sweep runs in one"):
        sweep(algorithms.fedavg, {}, None, points=[{}], rounds=1)
