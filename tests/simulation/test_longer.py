"""A run becomes longer, ends early, or starts from a state: like one that was never touched."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import (
    algorithms,
    build_round,
    forget_signal,
    models,
    simulate,
    with_attack,
    with_dp,
)
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.runner import run as run_config
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.report.distribution import client_scores
from fedjax_lab.report.runs import load_runs
from fedjax_lab.simulation.prepare import with_arguments
from fedjax_lab.simulation.run_folder import RunFolder
from fedjax_lab.simulation.run_log import RunLog
from fedjax_lab.wrappers.attacks import attackers
from fedjax_lab.wrappers.ranks import with_ranks
from tests.simulation.test_run import (
    FAFED,
    FEDAVG,
    SCAFFOLD,
    N,
    assert_same_bits,
    first_params,
    interrupt,
    loss_fn,
    make_clients,
    run,
)

DECAYING = algorithms.scaffold(loss_fn, client_lr=optax.exponential_decay(0.3, 1, 0.9))


def lines(path):
    return (path / "metrics.jsonl").read_text()


def read(path):
    return json.loads(path.read_text())


def assert_same_runs(a, b, a_dir, b_dir):
    assert_same_bits(a.state, b.state)
    assert a.history == b.history
    assert lines(a_dir) == lines(b_dir)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((2, 4, 10), marks=pytest.mark.slow),
        pytest.param((1, 5, 7, 10), marks=pytest.mark.slow),
        pytest.param((7, 8, 8, 10), marks=pytest.mark.methods),
    ],
)
def test_more_rounds_equal_one_run_of_them(tmp_path, lengths):
    """Also where the shorter run ended in the midst of what is a chunk of the longer one."""
    whole = run(DECAYING, rounds=10, run_dir=tmp_path / "whole")
    for rounds in lengths:
        grown = run(DECAYING, rounds=rounds, run_dir=tmp_path / "grown")
        assert read(tmp_path / "grown" / "config.json")["rounds"] == rounds
        assert read(tmp_path / "grown" / "summary.json")["round"] == rounds
    assert [row["round"] for row in whole.history] == [2, 4, 6, 8, 10]
    assert_same_runs(whole, grown, tmp_path / "whole", tmp_path / "grown")


@pytest.mark.slow
def test_an_interrupted_run_may_become_longer_or_shorter(tmp_path):
    assert run(rounds=10, run_dir=tmp_path / "cut", on_row=interrupt).interrupted
    forget_signal()
    for rounds in (7, 12):
        whole = run(rounds=rounds, run_dir=tmp_path / str(rounds))
        again = run(rounds=rounds, run_dir=tmp_path / "cut")
        assert_same_runs(whole, again, tmp_path / str(rounds), tmp_path / "cut")


def test_fewer_rounds_than_there_are_is_refused(tmp_path):
    run(rounds=6, run_dir=tmp_path)
    before = lines(tmp_path), read(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"rounds is 4; it must be at least 6, the number"):
        run(rounds=4, run_dir=tmp_path)
    assert before == (lines(tmp_path), read(tmp_path / "config.json"))
    assert run(rounds=6, run_dir=tmp_path).stopped is None  # and nobody holds it


@pytest.mark.methods
def test_where_no_place_to_go_on_from_is_left_only_the_same_rounds_are_possible(tmp_path):
    whole = run(rounds=5, run_dir=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    with pytest.raises(ValueError, match=r"rounds is 8; .* can only have 5: .*eval_every \(2\)"):
        run(rounds=8, run_dir=tmp_path)
    assert_same_bits(run(rounds=5, run_dir=tmp_path).state, whole.state)


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "moment",
    [
        (RunLog, "rows"),
        pytest.param((RunLog, "checkpoint"), marks=pytest.mark.methods),
        pytest.param((RunFolder, "restore"), marks=pytest.mark.methods),
        pytest.param((RunLog, "summarise"), marks=pytest.mark.methods),
    ],
    ids=lambda moment: moment[1],
)
def test_a_kill_while_a_run_becomes_longer_loses_nothing(tmp_path, monkeypatch, moment):
    whole = run(rounds=8, run_dir=tmp_path / "whole")
    run(rounds=5, run_dir=tmp_path / "grown")

    def kill(*arguments, **more):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(*moment, kill)
        with pytest.raises(Killed):
            run(rounds=8, run_dir=tmp_path / "grown")
    assert read(tmp_path / "grown" / "config.json")["rounds"] == 8
    again = run(rounds=8, run_dir=tmp_path / "grown")
    assert_same_runs(whole, again, tmp_path / "whole", tmp_path / "grown")


def test_a_schedule_that_depends_on_the_rounds_cannot_become_longer(tmp_path):
    def cosine(rounds):
        return algorithms.fedavg(loss_fn, client_lr=optax.cosine_decay_schedule(0.3, rounds))

    run(cosine(4), rounds=4, run_dir=tmp_path)
    with pytest.raises(FileExistsError, match=r"had 4 rounds, and now 8 are .* cosine"):
        run(cosine(8), rounds=8, run_dir=tmp_path)
    with pytest.raises(FileExistsError, match=r"seed \(there 5, now 1\)\. .* nothing else was"):
        run(cosine(4), rounds=8, seed=1, run_dir=tmp_path)  # the seed is why, not a schedule


@pytest.mark.slow
def test_more_rounds_on_the_command_line(tmp_path):
    config = RunConfig.of(
        dataset="digits", model="linear", num_clients=4, cohort_size=2, local_steps=1,
        batch_size=4, eval_every=2, client_map="scan",
    )  # fmt: skip

    def command(name, **changes):
        changes = {**changes, "run_dir": str(tmp_path / name)}
        return run_config(RunConfig.of(**{**config.to_dict(), **changes}), progress=False)

    whole = command("whole", rounds=4)
    command("grown", rounds=3)
    grown = command("grown", rounds=4)
    assert_same_runs(whole, grown, tmp_path / "whole", tmp_path / "grown")
    configs = [read(tmp_path / name / "config.json") for name in ("whole", "grown")]
    assert configs[0] == configs[1]  # also the settings, by which it may be run again
    command("cosine", rounds=2, client_lr_schedule="cosine")
    with pytest.raises(
        FileExistsError, match=r"client_lr_ends \(there 2, now 4\).* cannot be extended"
    ):
        command("cosine", rounds=4, client_lr_schedule="cosine")


def after(round):
    return lambda row: row["round"] >= round


def test_stop_when_ends_a_run_like_one_of_so_many_rounds(tmp_path):
    short = run(rounds=4, run_dir=tmp_path / "short")
    hooked, asked = [], []

    def enough(row):
        asked.append(row)
        return row["norm"] >= short.history[-1]["norm"]  # what a float32 gave in the same program

    settings = {"rounds": 8, "run_dir": tmp_path / "stopped"}
    stopped = run(**settings, on_row=hooked.append, stop_when=enough)
    assert stopped.stopped == "stop_when"
    assert not stopped.interrupted
    assert hooked == asked == short.history
    assert_same_runs(short, stopped, tmp_path / "short", tmp_path / "stopped")
    summary = read(tmp_path / "stopped" / "summary.json")
    assert (summary["stopped"], summary["round"], summary["interrupted"]) == ("stop_when", 4, False)
    assert (tmp_path / "stopped" / "checkpoints" / "4").is_dir()
    assert load_runs([tmp_path / "stopped"])[0].finished
    # The same call returns what there is; another condition, or none, goes on.
    again = run(**settings, stop_when=enough)
    assert (again.stopped, again.history) == ("stop_when", short.history)
    assert run(**settings, stop_when=after(6)).history[-1]["round"] == 6
    whole = run(rounds=8, run_dir=tmp_path / "whole")
    last = run(**settings, stop_when=after(8))
    assert last.stopped is None  # it was the last round anyway
    assert_same_runs(whole, last, tmp_path / "whole", tmp_path / "stopped")


def test_a_run_that_goes_on_has_no_summary_of_its_former_end(tmp_path):
    """If it is killed, or read meanwhile, nothing says that it ended, or scores another model."""

    def killed_at(round):
        def stop_when(row):
            if row["round"] == round:
                raise RuntimeError("killed")

        return stop_when

    summary = tmp_path / "summary.json"
    run(rounds=8, run_dir=tmp_path, stop_when=after(2))
    summary.write_text(json.dumps({**read(summary), "client_test_accuracy": [0.5, 0.25]}))
    with pytest.raises(RuntimeError, match="killed"):
        run(rounds=8, run_dir=tmp_path, stop_when=killed_at(4))
    [found] = load_runs([tmp_path])
    assert (found.rows[-1]["round"], found.summary, client_scores(found)) == (4, {}, [])
    run(rounds=8, run_dir=tmp_path)
    assert read(summary)["round"] == 8
    with pytest.raises(RuntimeError, match="killed"):  # before there is a new row
        run(rounds=10, run_dir=tmp_path, stop_when=killed_at(8))
    assert read(tmp_path / "config.json")["rounds"] == 10
    assert not summary.exists()


def test_stop_when_is_asked_of_the_rows_from_before_an_interruption(tmp_path):
    settings = {"rounds": 8, "run_dir": tmp_path, "algorithm": FEDAVG}
    assert run(**settings, on_row=interrupt).interrupted
    rows = []
    result = run(**settings, stop_when=lambda row: rows.append(row["round"]) or row["round"] == 4)
    assert rows == [2, 4]
    assert (result.stopped, len(result.history)) == ("stop_when", 2)


def test_an_error_of_stop_when_leaves_the_directory_whole(tmp_path):
    settings = {"rounds": 8, "algorithm": FEDAVG}
    whole = run(**settings, run_dir=tmp_path / "whole")
    with pytest.raises(KeyError, match="accuracy"):
        run(**settings, run_dir=tmp_path / "broken", stop_when=lambda row: row["accuracy"] > 0.9)
    again = run(**settings, run_dir=tmp_path / "broken")
    assert_same_runs(whole, again, tmp_path / "whole", tmp_path / "broken")


@pytest.mark.methods
def test_stop_when_sees_no_row_of_a_run_that_diverged(tmp_path):
    params = {"w": jnp.full(first_params()["w"].shape, 1e38)}
    settings = {"algorithm": FEDAVG, "params": params, "rounds": 4, "on_nonfinite": "keep"}
    asked = []
    with pytest.warns(UserWarning, match="diverged"):
        result = run(**settings, stop_when=lambda row: asked.append(row), run_dir=tmp_path)
    assert (result.stopped, asked) == ("diverged", [])


def test_stop_when_reads_null_as_the_nan_that_it_was(tmp_path):
    settings = {"rounds": 4, "algorithm": FEDAVG, "evaluate": lambda params: {"score": np.nan}}
    for _ in range(2):  # a run, and its rows from metrics.jsonl
        asked = []
        run(**settings, run_dir=tmp_path, stop_when=lambda row, to=asked: to.append(row["score"]))
        np.testing.assert_array_equal(asked, [np.nan, np.nan])
    assert lines(tmp_path).count('"score": null') == 2


def test_stop_when_must_be_a_function():
    with pytest.raises(TypeError, match=r"stop_when is 0\.9; it must be a function of a row"):
        run(stop_when=0.9)


def start_of(algorithm):
    """The state before round 0 of ``run``, made by hand."""
    schedule = Schedule(cohort_size=3, batch_size=4, local_steps=2, replace=True)
    batch = schedule.draw(make_clients(), jax.random.key(5), jnp.int32(0))
    return jax.jit(lambda: algorithm.init(first_params(), N, batch))(), schedule


@pytest.mark.parametrize(
    "algorithm", [SCAFFOLD, pytest.param(FAFED, marks=pytest.mark.slow)], ids=["scaffold", "fafed"]
)
def test_a_run_from_its_own_first_state_is_the_same_run(algorithm):
    state, _ = start_of(algorithm)
    expected = run(algorithm, rounds=4)
    actual = simulate_from(algorithm, state, rounds=4)
    assert_same_bits(actual.state, expected.state)
    assert actual.history == expected.history
    jax.tree.map(np.asarray, state)  # the caller keeps it


def simulate_from(algorithm, state, params=None, **changes):
    settings = {"rounds": 3, "cohort_size": 3, "local_steps": 2, "batch_size": 4, "replace": True}
    settings |= {"seed": 5, "eval_every": 2, "client_map": "scan"}
    settings |= {"evaluate": lambda params: {"norm": jnp.abs(params["w"]).sum()}}
    return simulate(algorithm, params, make_clients(), state=state, **{**settings, **changes})


@pytest.mark.methods
def test_a_run_from_a_trained_state_equals_rounds_by_hand():
    trained = run(rounds=4).state
    result = simulate_from(SCAFFOLD, trained, rounds=3)
    round_fn, (_, schedule) = jax.jit(build_round(SCAFFOLD, "vmap")), start_of(SCAFFOLD)
    state = trained
    for t in range(3):  # counted from 0
        state, _ = round_fn(state, schedule.draw(make_clients(), jax.random.key(5), jnp.int32(t)))
    for a, b in zip(jax.tree.leaves(result.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert [row["round"] for row in result.history] == [2, 3]
    # Also as NumPy arrays, such as a file holds.
    stored = jax.tree.map(np.asarray, trained)
    assert_same_bits(simulate_from(SCAFFOLD, stored, rounds=3).state, result.state)


@pytest.mark.parametrize(
    ("wrap", "first", "second", "where", "expected"),
    [
        (
            lambda share: with_attack(FEDAVG, "sign_flip", share=share),
            *(0.0, 0.5),
            lambda state: np.flatnonzero(state.clients.attacks),
            attackers(N, 0.5, seed=0),
        ),
        (
            lambda clip: with_dp(FEDAVG, clip, 1.0),
            *(0.25, 2.0),
            lambda state: state.server.clip,
            [2.0],
        ),
        (
            lambda mixing: algorithms.apfl(
                loss_fn, client_lr=0.3, mixing=mixing, adaptive_mixing=False
            ),
            *(0.25, 0.75),
            lambda state: state.clients.mixing,
            np.full(N, 0.75),
        ),
        (
            lambda clip: with_dp(FEDAVG, clip, 1.0, adaptive_quantile=0.5),
            *(0.25, 2.0),
            lambda state: state.server.clip < 1,  # it goes on from where it was
            [True],
        ),
    ],
    ids=["attack", "dp", "apfl", "adaptive"],
)
def test_a_state_brings_no_arguments_of_its_method(wrap, first, second, where, expected):
    """Else a run's config would name other ones than those it ran with."""
    before, _ = start_of(wrap(first))
    result = simulate_from(wrap(second), before, rounds=1)
    np.testing.assert_array_equal(where(result.state), expected)


def test_a_state_brings_no_ranks():
    params = models.init_adapters(jax.random.key(0), {"w": jnp.ones((4, 4))}, "w", 2)
    old, new = (with_ranks(FEDAVG, ranks) for ranks in ([1, 1, 2], [2, 1, 1]))
    state = with_arguments(new, old.init(params, 3))
    np.testing.assert_array_equal(state.clients.rank, [2, 1, 1])


@pytest.mark.slow
def test_a_directory_is_bound_to_its_first_state(tmp_path):
    state, _ = start_of(FEDAVG)
    first = simulate_from(FEDAVG, state, run_dir=tmp_path)
    again = simulate_from(FEDAVG, state, run_dir=tmp_path)
    assert_same_bits(first.state, again.state)
    assert simulate_from(FEDAVG, state, run_dir=tmp_path, rounds=5).history[-1]["round"] == 5
    with pytest.raises(FileExistsError, match="the first state"):
        simulate_from(FEDAVG, first.state, run_dir=tmp_path)
    with pytest.raises(FileExistsError, match="the first state"):
        simulate_from(FEDAVG, None, first_params(), run_dir=tmp_path)


def test_a_state_that_is_not_the_methods_is_refused():
    state, _ = start_of(SCAFFOLD)
    control = state.server._replace(control={"w": jnp.zeros((2, 3))})
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), state.clients)
    cases = [
        (FEDAVG, state, r"state is not one of fedavg: it has .*control"),
        (SCAFFOLD, start_of(FEDAVG)[0], r"state is not one of scaffold: it lacks .*control"),
        (SCAFFOLD, state._replace(server=control), r"state\.server\.control\['w'\] is float32\[2,"),
        (
            SCAFFOLD,
            state._replace(clients=wide),
            r"state\.clients\['w'\] is float16\[6, 4, 3\]; it",
        ),
        (SCAFFOLD, state._replace(num_clients=jnp.int32(7)), r"state\.num_clients is 7; .* 6"),
        (SCAFFOLD, {"w": 1.0}, r"state is dict; it must be a FedState"),
    ]
    for algorithm, given, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            simulate_from(algorithm, given)
    with pytest.raises(ValueError, match="params and state are both given"):
        simulate_from(SCAFFOLD, state, first_params())
    with pytest.raises(
        TypeError, match="params is None; pass the initial global model, or a state"
    ):
        simulate_from(SCAFFOLD, None)
