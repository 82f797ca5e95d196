"""A run directory holds one run, has one writer, and says what was wrong with it."""

import dataclasses
import errno
import functools
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, data, sweep
from fedjax_lab.clients.planner import MapChoice
from fedjax_lab.simulation import identity
from fedjax_lab.simulation.chunk_planner import ChunkPlanner
from fedjax_lab.simulation.evaluate import build_client_evaluation, build_evaluation
from fedjax_lab.simulation.stop import stop_on_signal
from fedjax_lab.storage import run_dir as folder
from fedjax_lab.storage.fingerprint import hash_arrays, hash_function, hash_program
from fedjax_lab.storage.lock import one_writer
from fedjax_lab.storage.rows import MetricsFile
from tests.federations import of_sizes
from tests.simulation import test_run
from tests.simulation.test_run import (
    FEDAVG,
    N,
    assert_same_bits,
    first_params,
    loss_fn,
    make_clients,
    run,
)
from tests.tiers import few

SHORT = {"rounds": 2, "algorithm": FEDAVG}


def another_loss(params, examples, key):
    return 2 * loss_fn(params, examples, key)


another_loss.__qualname__ = another_loss.__name__ = "loss_fn"


def scheduled(factor):
    return optax.exponential_decay(0.3, 1, factor)


def optimised(rate):
    return algorithms.fedopt(loss_fn, optax.adam(rate), client_lr=0.3)


def transformed(limit):
    return algorithms.fedavg(loss_fn, client_lr=0.3, gradient_transform=optax.clip(limit))


def with_teacher(value):
    teacher = jnp.full((3,), value)  # a constant of the program

    def distilled(params, examples, key):
        return loss_fn(params, examples, key) + teacher.sum() * jnp.square(params["w"]).sum()

    return algorithms.fedavg(distilled, client_lr=0.3)


def bare(algorithm):
    """A method of one's own, which no factory describes."""
    return dataclasses.replace(algorithm, name="mine", hyperparameters={})


def test_numbers_of_numpy_are_the_same_settings(tmp_path):
    devices = data.Devices(min_local_steps=1, time_budget=2.5)
    settings = {"rounds": 2, "seed": 3, "cohort_size": 3, "local_steps": 2, "replace": True}
    of_numpy = {name: np.array(value)[()] for name, value in settings.items()}
    own = data.Devices(min_local_steps=np.int64(1), time_budget=np.float32(2.5))
    first = run(algorithm=FEDAVG, devices=own, run_dir=tmp_path, **of_numpy)
    again = run(algorithm=FEDAVG, devices=devices, run_dir=tmp_path, **settings)
    assert first.history == again.history  # the directory is that of the same run
    config = json.loads((tmp_path / "config.json").read_text())
    assert {name: config[name] for name in settings} == settings
    assert config["devices"] == dataclasses.asdict(devices)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        (FEDAVG, algorithms.fedavg(another_loss, client_lr=0.3), "the compiled rounds"),
        pytest.param(optimised(0.1), optimised(0.2), "the compiled rounds", marks=pytest.mark.slow),
        pytest.param(
            transformed(1.0), transformed(2.0), "the compiled rounds", marks=pytest.mark.slow
        ),
        pytest.param(
            with_teacher(0.1),
            with_teacher(0.2),
            "the compiled rounds",
            marks=pytest.mark.methods,
        ),
        pytest.param(
            algorithms.fedavg(loss_fn, client_lr=scheduled(0.9)),
            algorithms.fedavg(loss_fn, client_lr=scheduled(0.8)),
            "the compiled rounds",
            marks=pytest.mark.methods,
        ),
        pytest.param(
            bare(FEDAVG),
            bare(algorithms.fedavg(loss_fn, client_lr=0.2)),
            "the compiled rounds",
            marks=pytest.mark.methods,
        ),
    ],
    ids=["loss", "optimiser", "transform", "constant", "schedule", "no factory"],
)
def test_another_program_is_refused(tmp_path, before, now, named):
    first = run(rounds=2, algorithm=before, run_dir=tmp_path)
    again = run(rounds=2, algorithm=before, run_dir=tmp_path)
    assert_same_bits(first.state, again.state)
    with pytest.raises(FileExistsError, match=named):
        run(rounds=2, algorithm=now, run_dir=tmp_path)


def test_the_record_names_schedules_transforms_and_loss(tmp_path):
    def method(factor, norm, decay):
        transform = optax.chain(optax.clip_by_global_norm(norm), optax.add_decayed_weights(decay))
        rate = optax.exponential_decay(0.1, 1, factor)
        return algorithms.fedavg(loss_fn, client_lr=rate, gradient_transform=transform)

    run(rounds=1, algorithm=method(0.998, 10.0, 1e-3), run_dir=tmp_path)
    config = folder.read_config(tmp_path)
    found = config["hyperparameters"]
    assert found["client_lr"]["function"] == "optax.exponential_decay"
    assert found["client_lr"]["arguments"]["decay_rate"] == 0.998
    assert found["gradient_transform"] == {
        "function": "optax.chain",
        "arguments": [
            {"function": "optax.clip_by_global_norm", "arguments": {"max_norm": 10.0}},
            {"function": "optax.add_decayed_weights", "arguments": {"weight_decay": 1e-3}},
        ],
    }
    assert config["functions"]["loss_fn"]["function"] == f"{loss_fn.__module__}.loss_fn"


def test_a_directory_of_before_version_0_5_goes_on(tmp_path, monkeypatch):
    """It has texts for functions and transforms, and its checkpoints are bound to them."""
    rate, transform = scheduled(0.9), optax.clip(1.0)

    def method(rate, transform=transform):
        return algorithms.fedavg(loss_fn, client_lr=rate, gradient_transform=transform)

    texts = {"client_lr": "function exponential_decay.<locals>.schedule"}
    texts |= {"gradient_transform": "GradientTransformation", "step_transform": None}
    old = dataclasses.replace(method(rate), hyperparameters={"server_lr": 1.0, **texts})
    with monkeypatch.context() as before:
        before.setattr(identity, "describe", lambda value: None)
        run(rounds=2, algorithm=old, run_dir=tmp_path)
    config = json.loads((tmp_path / folder.CONFIG).read_text())
    del config["functions"]  # no checkpoint is bound to it
    folder.write_json(tmp_path / folder.CONFIG, config)
    longer = run(rounds=4, algorithm=method(rate), run_dir=tmp_path)
    assert [row["round"] for row in longer.history] == [2, 4]
    assert folder.read_config(tmp_path) == {**config, "rounds": 4}
    cosine = method(optax.cosine_decay_schedule(0.3, 9))
    with pytest.raises(FileExistsError, match=r"the compiled rounds.*hyperparameters\.client_lr"):
        run(rounds=4, algorithm=cosine, run_dir=tmp_path)


def test_fine_tuning_is_recorded_and_a_directory_without_the_record_goes_on(tmp_path):
    def tuned(steps):
        return algorithms.with_fine_tuning(FEDAVG, loss_fn, steps=steps, client_lr=0.1)

    run(rounds=2, algorithm=tuned(2), run_dir=tmp_path / "new")
    found = folder.read_config(tmp_path / "new")["hyperparameters"]
    assert (found["fine_tune_steps"], found["fine_tune_lr"]) == (2, 0.1)
    with pytest.raises(FileExistsError, match=r"hyperparameters\.fine_tune_steps"):
        run(rounds=4, algorithm=tuned(3), run_dir=tmp_path / "new")
    old = dataclasses.replace(tuned(2), hyperparameters=FEDAVG.hyperparameters)
    run(rounds=2, algorithm=old, run_dir=tmp_path / "old")
    config = folder.read_config(tmp_path / "old")
    longer = run(rounds=4, algorithm=tuned(2), run_dir=tmp_path / "old")
    assert [row["round"] for row in longer.history] == [2, 4]
    assert folder.read_config(tmp_path / "old") == {**config, "rounds": 4}


def test_other_params_data_and_evaluations_are_refused(tmp_path, monkeypatch):
    def evaluate(weight):
        return lambda params: {"norm": weight * jnp.abs(params["w"]).sum()}

    settings = {**SHORT, "run_dir": tmp_path}
    run(**settings, evaluate=evaluate(1.0))
    run(**settings, evaluate=evaluate(1.0))
    with pytest.raises(FileExistsError, match="the first params"):
        run(**settings, evaluate=evaluate(1.0), params={"w": jnp.ones((4, 3))})
    with pytest.raises(FileExistsError, match="the function evaluate"):
        run(**settings, evaluate=evaluate(2.0))
    with pytest.raises(FileExistsError, match="the function diagnose"):
        run(**settings, evaluate=evaluate(1.0), diagnose=lambda state: {"zero": 0.0})
    changed = make_clients()
    examples = changed.examples._replace(x=changed.examples.x.at[0, 0].add(1))
    changed = dataclasses.replace(changed, examples=examples)
    monkeypatch.setattr(test_run, "make_clients", lambda: changed)
    with pytest.raises(FileExistsError, match="the clients' data"):
        run(**settings, evaluate=evaluate(1.0))


PROGRAM = """
import jax, jax.numpy as jnp
from fedjax_lab.storage.fingerprint import hash_function, hash_program
table = {"b": jnp.arange(3.0), "a": {"x", "y"}}
def loss(w):
    return jnp.where(w > 0, jnp.sin(w), table["b"].sum() * w).sum()
print(hash_program(jax.jit(jax.grad(loss)).lower(jnp.ones(4))), hash_function(jax.jit(loss)))
"""


@pytest.mark.slow
def test_hashes_are_the_same_in_another_process():
    told = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert told[0].stdout == told[1].stdout
    assert len(told[0].stdout.split()) == 2


def test_large_constants_are_part_of_a_programs_hash():
    def program(value):
        table = np.zeros(100_000, np.float32)
        table[50_000] = value
        return hash_program(jax.jit(lambda x: x + jnp.asarray(table)).lower(jnp.zeros(100_000)))

    assert program(1.0) == program(1.0)
    assert program(1.0) != program(2.0)


def test_where_a_program_was_written_does_not_matter():
    was = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)  # as users have it
    try:
        here = jax.jit(lambda x: 2 * x).lower(jnp.zeros(3))
        there = jax.jit(lambda x: 2 * x).lower(jnp.zeros(3))
    finally:
        jax.config.update("jax_traceback_in_locations_limit", was)
    assert here.as_text(debug_info=True) != there.as_text(debug_info=True)
    assert hash_program(here) == hash_program(there)


def test_a_call_changes_no_hash():
    """An evaluation that was used before is the same function."""
    clients = test_run.make_clients()

    def count(params, examples):
        correct = (examples.x @ params["w"]).argmax(-1) == examples.y
        return correct.astype(jnp.float32), jnp.zeros(len(examples.y))

    evaluate = build_evaluation(count, clients)
    before = hash_function(evaluate)
    evaluate(test_run.first_params())
    assert hash_function(evaluate) == before


def test_a_library_function_counts_by_its_name_and_its_arguments():
    """So its code may change, where that of the caller's own functions may not."""

    def count(weight):
        return lambda params, examples: (weight * examples.y, examples.y)

    def build(weight=1.0, size=2):
        return build_evaluation(count(weight), data.Examples(np.ones((2, 1)), np.ones(2)), size)

    clients = test_run.make_clients()
    assert hash_function(build()) == hash_function(build())
    assert len({hash_function(f) for f in (build(), build(2.0), build(size=1))}) == 3
    assert hash_function(build_client_evaluation(count(1.0), clients)) != hash_function(build())

    @functools.wraps(build())
    def wrapped(params):
        return {}

    assert hash_function(wrapped) != hash_function(build())


def test_a_directory_of_version_0_4_goes_on(tmp_path):
    """It has hashes of functions by all of their code, with which nothing can be compared."""
    settings = {"rounds": 2, "run_dir": tmp_path / "run", "evaluate": lambda params: {"a": 1.0}}
    run(**settings)
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["content"]["evaluate"].startswith("2:")
    config["content"]["evaluate"] = "0123456789abcdef"
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    shutil.rmtree(tmp_path / "run/checkpoints")  # their owner is the one of the old hash
    with pytest.warns(UserWarning, match="0.4 or an earlier one began; whether evaluate is still"):
        run(**settings)
    assert json.loads((tmp_path / "run/config.json").read_text()) == config
    with (
        pytest.warns(UserWarning, match="is still the same function is not checked"),
        pytest.raises(FileExistsError, match="the function diagnose"),
    ):
        run(**settings, diagnose=lambda state: {"b": 1.0})


def test_hashes_of_functions_follow_what_they_do():
    def build(value, text="a"):
        def function(params):
            return {"score": value, text: helper(params)}

        return function

    def helper(params):
        return params + 1

    assert hash_function(None) is None
    assert hash_function(build(1.0)) == hash_function(build(1.0))
    hashes = {
        hash_function(f)
        for f in (build(1.0), build(2.0), build(1.0, "b"), build(np.ones(2)), build(np.zeros(2)))
    }
    assert len(hashes) == 5
    assert hash_arrays({"a": jnp.ones(2)}) != hash_arrays({"a": jnp.ones((2, 1))})
    assert hash_arrays({"a": jnp.ones(2)}) != hash_arrays({"a": jnp.ones(2, jnp.int32)})


class Scorer:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, params):
        return {"score": self.weight}

    def score(self, params):
        return {"score": self.weight}


def closed_over(value):
    return lambda params: value


def decorated(weight):
    def decorate(function):
        @functools.wraps(function)
        def call(params):
            return weight * function(params)

        return call

    return decorate(lambda params: 1.0)


@pytest.mark.parametrize(
    "build",
    [
        Scorer,
        lambda weight: Scorer(weight).score,
        lambda weight: functools.partial(max, weight),
        lambda weight: lambda params: {weight, 7} | {"a"},
        lambda weight: closed_over(jax.random.key(int(weight))),
        lambda weight: closed_over(np.array([weight, None], object)),
        lambda weight: closed_over({weight, 7}),
        lambda weight: closed_over(data.Devices(step_time=weight)),
        lambda weight: jax.jit(closed_over(weight)),
        lambda weight: lambda params: closed_over(weight)(params),  # with a function of the module
        decorated,
    ],
)
def test_hashes_see_into_callables_of_all_kinds(build):
    assert hash_function(build(1.0)) == hash_function(build(1.0))
    assert hash_function(build(1.0)) != hash_function(build(2.0))


def test_the_second_signal_interrupts_at_once(capfd):
    with stop_on_signal() as stop:
        stop.at_once = False  # a round has been computed
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "finishing this chunk of rounds" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_other_threads_get_no_signal():
    found = []

    def work():
        with stop_on_signal() as stop:
            found.append(stop.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def hold(path, ready, over):
    with one_writer(path):
        ready.set()
        over.wait()


def test_one_writer_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, over = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready, over), daemon=True)
    process.start()
    assert ready.wait(60)
    with pytest.raises(
        BlockingIOError, match=rf"which process {process.pid} on \S+ \(since .*writing"
    ):
        run(**SHORT, run_dir=tmp_path)
    process.kill()  # and what it leaves blocks nobody
    process.join()
    assert (tmp_path / ".lock").exists()
    assert run(**SHORT, run_dir=tmp_path).history[-1]["round"] == 2


def test_what_a_kill_leaves_before_the_config_does_not_matter(tmp_path):
    (tmp_path / ".config.json.0a1b2c3d.tmp").write_text('{"half')
    (tmp_path / ".lock").touch()
    assert run(**SHORT, run_dir=tmp_path).history[-1]["round"] == 2


@pytest.mark.parametrize(
    "harm",
    few(
        1,
        [
            lambda text: "".join(text.splitlines(True)[:1]),  # rows are lost
            lambda text: "",
            lambda text: text.replace('"round": 2', '"round": 3'),
            lambda text: text.replace("{", "", 1),
        ],
    ),
)
def test_rows_that_are_not_the_checkpoints_are_written_again(tmp_path, harm):
    whole = run(run_dir=tmp_path, algorithm=FEDAVG)
    metrics = tmp_path / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(harm(text))
    with pytest.warns(UserWarning, match=r"metrics.jsonl lacks some of the 4 rows"):
        again = run(run_dir=tmp_path, algorithm=FEDAVG)
    assert again.history == whole.history
    assert metrics.read_text() == text


def test_a_checkpoint_of_another_seed_is_refused(tmp_path):
    for seed in (1, 2):
        run(**SHORT, run_dir=tmp_path / str(seed), seed=seed)
    shutil.rmtree(tmp_path / "1" / "checkpoints")
    shutil.copytree(tmp_path / "2" / "checkpoints", tmp_path / "1" / "checkpoints")
    with pytest.raises(ValueError, match=r"and the config\.json next to it"):
        run(**SHORT, run_dir=tmp_path / "1", seed=1)


def test_a_damaged_config_names_the_file_and_the_remedy(tmp_path):
    run(**SHORT, run_dir=tmp_path)
    for text, told in (('{"seed": 1', "cannot be read as JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config.json {told}.*another run_dir"):
            run(**SHORT, run_dir=tmp_path)


def test_a_run_of_another_version_goes_on_though_its_program_is_written_otherwise(tmp_path):
    whole = run(**SHORT, run_dir=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["versions"]["jax"] = "0.0.1"
    config["content"]["program"] = "of old"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(**SHORT, run_dir=tmp_path).history == whole.history


@pytest.mark.methods
def test_what_auto_comes_to_does_not_bind_a_directory(tmp_path, monkeypatch):
    """As a run that two devices began and eight go on with."""
    settings = {"algorithm": FEDAVG, "client_map": "auto", "run_dir": tmp_path}
    for count, rounds in (("shard_map:2", 2), ("shard_map:3", 4)):
        choice = MapChoice(count, "of the test")
        monkeypatch.setattr(ChunkPlanner, "choose", lambda self, length, c=choice: (c, {}))
        if rounds == 2:
            run(rounds=2, **settings)
        else:
            with pytest.warns(UserWarning, match="ran on 2 devices; the next ones run on 3"):
                result = run(rounds=4, **settings)
    alone = run(rounds=4, algorithm=FEDAVG)
    np.testing.assert_allclose(result.params["w"], alone.params["w"], atol=1e-5)
    with pytest.raises(FileExistsError, match="client_map"):
        run(rounds=4, **{**settings, "client_map": "scan"})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch, code):
    def write(*arguments):
        try:
            raise OSError(code, "deep inside")
        except OSError as error:
            raise RuntimeError("a library's own words") from error

    monkeypatch.setattr(MetricsFile, "append", write)
    with pytest.raises(OSError, match="disk is full") as found:
        run(**SHORT, run_dir=tmp_path)
    assert found.value.errno == errno.ENOSPC
    assert found.value.__cause__ is None
    monkeypatch.undo()
    assert run(**SHORT, run_dir=tmp_path).history[-1]["round"] == 2


def test_a_finished_run_says_so(tmp_path, capsys):
    run(**SHORT, run_dir=tmp_path)
    run(**SHORT, run_dir=tmp_path, progress=True)
    assert "fedavg: already finished, nothing to run" in capsys.readouterr().err


def test_vectors_stay_vectors_in_the_history(tmp_path):
    result = run(
        **SHORT,
        run_dir=tmp_path,
        evaluate=lambda params: {"per_class": jnp.abs(params["w"]).sum(0), "mean": 1},
    )
    row = result.history[-1]
    np.testing.assert_allclose(row["per_class"], np.abs(result.params["w"]).sum(0), rtol=1e-6)
    assert row["mean"] == 1.0
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (algorithms.fedavg, first_params(), make_clients()),
            r"call fedavg\(loss_fn, client_lr=...\)",
        ),
        ((FEDAVG, make_clients(), first_params()), "clients is dict.* it comes after params"),
        ((FEDAVG, first_params(), [1, 2]), "see fedjax_lab.data.partition"),
        ((FEDAVG, {"w": "text"}, make_clients()), r"params\['w'\] is str, not an array"),
    ],
)
def test_wrong_objects_get_one_sentence(arguments, message):
    with pytest.raises(TypeError, match=message):
        test_run.simulate(*arguments, rounds=1, cohort_size=2, batch_size=2, local_steps=1)


@pytest.mark.filterwarnings("ignore:in round 0", "ignore:diverged")
def test_clients_with_broken_data_are_named():
    x = np.ones((2 * N, 4), np.float32)
    x[3, 1], x[8, 0] = np.nan, np.inf
    clients = of_sizes([2] * N, x)
    options = {"rounds": 1, "cohort_size": 2, "batch_size": 2, "local_steps": 1}
    told = "2 examples of the clients 1, 4 have values"
    with pytest.warns(UserWarning, match=told):
        test_run.simulate(FEDAVG, first_params(), clients, **options)
    build = functools.partial(algorithms.fedavg, test_run.loss_fn)
    points = {"client_lr": [0.1]}
    with pytest.warns(UserWarning, match=told):
        sweep(build, first_params(), clients, points=points, seeds=(0,), **options)


SCRIPT = """
def helper(x):
    return {weight} * x

class Helper:
    def method(self, x):
        return {weight} * x

    @staticmethod
    def static(x):
        return {weight} * x

class Child(Helper):
    pass

{evaluate}
"""


@pytest.mark.parametrize(
    "evaluate",
    [
        "def evaluate(p):\n    def inner():\n        return helper(p)\n    return inner()",
        "def evaluate(params):\n    return sum(helper(x) for x in params)",
        "def evaluate(params):\n    return [helper(x) for x in params]",
        "def evaluate(params):\n    return (lambda x: (lambda: helper(x)))(params)()",
        "def evaluate(p):\n    class Inner:\n        score = helper(1.0)\n    return Inner.score",
        "evaluate = lambda params: Helper().method(params)",
        "evaluate = lambda params: [Child.static(x) for x in params]",
    ],
)
def test_hashes_follow_names_in_inner_code(evaluate):
    def hash_of(weight):
        script = {"__name__": "script"}
        exec(SCRIPT.format(weight=weight, evaluate=evaluate), script)
        return hash_function(script["evaluate"])

    assert hash_of(1.0) == hash_of(1.0)
    assert hash_of(1.0) != hash_of(2.0)
