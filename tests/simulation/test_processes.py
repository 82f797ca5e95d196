"""Runs in several processes of ``jax.distributed``, next to the same run in one."""

import json
import os
import signal
import time

import jax
import numpy as np
import pytest

from fedjax_lab import data, load_run
from fedjax_lab.storage.run_dir import METRICS, SUMMARY, differences
from fedjax_lab.wrappers import client_params
from tests.simulation import test_stores, test_streams
from tests.simulation.in_processes import answers, digest, evaluate, launch, own_biases

SLOW = pytest.mark.slow
SHARDED = {"method": "scaffold", "settings": {"client_store": "sharded"}}


def alone(method="scaffold", **settings):
    """The hash of a run on four devices of this process."""
    settings = {"client_map": "shard_map:4", **settings}
    return digest(test_stores.run(method, evaluate=evaluate, **settings))


@pytest.fixture(scope="module")
def said():
    jobs = [
        {**SHARDED, "differs": {"1": {"seed": 7, "rounds": 9}}},
        {**SHARDED, "settings": {"client_map": "pmap"}},
        {"scores": True, "moved": {"1": 1}},
        {"scores": True},
        {**SHARDED, "signal_at": [1, 3]},  # the last: it ends later runs, too
    ]
    return answers(2, 2, jobs)


@pytest.mark.methods
def test_two_processes_give_the_same_bits_as_one():
    [[one, other]] = answers(2, 2, [SHARDED])
    assert one == other
    assert one["hash"] == alone(client_store="sharded")
    assert one["warnings"] == []


def test_arguments_that_differ_are_told_in_every_process(said):
    one, other = said[0]
    assert one == other
    assert one["error"].startswith("ValueError: all processes must have the same arguments, but")
    assert (
        "process 1: rounds (process 0 has 6, it has 9); seed (process 0 has 0, it has 7)"
        in (one["error"])
    )


def test_a_map_that_leaves_processes_without_work_is_refused(said):
    for answer in said[1]:
        assert answer["error"] == (
            "ValueError: client_map is 'pmap'; with 2 processes it must be 'auto', or 'shard_map' "
            "over all of their 4 devices."
        )


def test_a_signal_to_one_process_ends_the_run_in_all(said):
    one, other = said[4]
    assert one == {**other, "signal": None}
    assert other["signal"] == signal.SIGTERM
    assert (one["stopped"], one["rounds"]) == ("interrupt", 3)


def test_an_evaluation_whose_examples_differ_is_refused_in_every_process(said):
    """It need not be an argument of a run: a function of the user's own may call it."""
    one, other = said[2]
    assert one == other
    assert one["error"].startswith("all processes must have the same arguments, but process 1: the")
    assert "evaluation's examples (process 0 has" in one["error"]


def test_models_whose_rows_other_processes_have_are_scored(said):
    """Against each client's model of the same run in one process, with NumPy."""
    method, state = own_biases()
    clients, expected = test_stores.make_clients(), []
    for i in range(test_stores.CLIENTS):
        model = client_params(method, state, i)
        start = int(clients.starts[i])
        held = np.asarray(clients.indices)[start : start + int(clients.sizes[i])]
        x, y = (np.asarray(leaf)[held] for leaf in clients.examples)
        expected.append(np.mean((np.tanh(x @ np.asarray(model["w"]) + float(model["b"])) - y) ** 2))
    for answer in said[3]:
        np.testing.assert_allclose(answer["scores"], expected, rtol=1e-5)


def test_differences_are_said_in_the_words_given():
    told = differences({"a": {"b": 1}}, {"a": {"b": 2}}, words=("one has", "the other"))
    assert told == ["a.b (one has 1, the other 2)"]


@SLOW
@pytest.mark.parametrize("layout", [(2, 2), (4, 1)])
def test_the_bits_are_the_same_for_any_store_and_number_of_processes(layout):
    cases = [("fedavg", {}), ("scaffold", {"client_store": "device"}), ("gradma", {})]
    cases += [("scaffold", {"client_store": "host", "eval_every": 2}), ("scaffold", {"rounds": 4})]
    jobs = [{"method": method, "settings": settings} for method, settings in cases]
    for (method, settings), found in zip(cases, answers(*layout, jobs), strict=True):
        assert {answer.get("hash", answer) for answer in found} == {alone(method, **settings)}


@SLOW
@pytest.mark.parametrize("layout", [(2, 2), (4, 1)])
def test_cohorts_by_chance_and_in_turns_have_the_same_bits(layout):
    """Poisson cohorts, and cyclic ones of 4 clients with noise of three bands."""
    noise = {"clip_norm": 1.0, "noise_multiplier": 0.5}
    cases = [
        {"sampling": "poisson", "client_store": "sharded"},
        {"sampling": "poisson", "client_store": "host", "eval_every": 2},
        {"sampling": "poisson", "dp": noise},
        {"sampling": "poisson", "cohort_size": 1, "client_store": "host", "eval_every": 1},
        {"sampling": "cyclic", "cohort_size": 5, "dp": {**noise, "noise_bands": 3}},
    ]
    jobs = [{"method": "scaffold", "settings": settings} for settings in cases]
    for settings, found in zip(cases, answers(*layout, jobs), strict=True):
        assert {answer.get("hash", str(answer)) for answer in found} == {
            alone("scaffold", **settings)
        }


@pytest.mark.parametrize(
    "store", [pytest.param("sharded", marks=SLOW), pytest.param("host", marks=pytest.mark.methods)]
)
def test_a_run_goes_on_in_any_number_of_processes_and_stops_for_any_of_them(tmp_path, store):
    settings = {"rounds": 9, "run_dir": str(tmp_path / "run"), "client_map": "shard_map"}
    job = {**SHARDED, "settings": {**settings, "client_store": store}, "block": 100}
    [first] = answers(2, 2, [{**job, "stop_at": [1, 3]}])
    assert [answer["stopped"] for answer in first] == ["stop_when"] * 2
    [second] = answers(4, 1, [{**job, "stop_at": [3, 6]}])
    assert [answer["rounds"] for answer in second] == [6] * 4
    [last] = answers(1, 4, [job])
    assert last[0]["hash"] == alone(rounds=9)
    # What is there is handed to processes that did not run it, and without the disk's help.
    [again] = answers(2, 2, [job])
    assert [answer["hash"] for answer in again] == [alone(rounds=9)] * 2


@SLOW
def test_a_process_may_compile_for_longer_than_an_exchange_waits():
    # On CPU an exchange waits for 30 seconds.
    [[one, other]] = answers(2, 2, [{**SHARDED, "late": [1, 40]}])
    assert one["hash"] == other["hash"] == alone(client_store="sharded")


@SLOW
def test_so_may_an_evaluation_that_all_share():
    jobs = [{**SHARDED, "shares": True, **more} for more in ({"late": [1, 40]}, {})]
    [[one, other], [again, _]] = answers(2, 2, jobs)
    assert one["hash"] == other["hash"] == again["hash"]


@SLOW
@pytest.mark.parametrize("layout", [(2, 2), (4, 1)])
def test_streamed_examples_give_the_same_bits(tmp_path, layout):
    folder = str(data.write_stream(tmp_path / "train", (test_streams.X, test_streams.Y)))
    cases = [("scaffold", {}), ("scaffold", {"client_store": "host"}), ("fafed", {})]
    jobs = [{"method": name, "settings": more, "stream": folder} for name, more in cases]
    for (method, more), found in zip(cases, answers(*layout, jobs), strict=True):
        settings = {"client_map": "shard_map:4", "evaluate": evaluate, **more}
        expected = digest(test_streams.run(method, test_streams.resident(), **settings))
        assert [answer.get("hash", answer) for answer in found] == [expected] * layout[0]


@SLOW
def test_a_run_goes_on_with_fewer_devices_to_rounding(tmp_path):
    settings = {"rounds": 9, "run_dir": str(tmp_path / "run"), "client_map": "shard_map"}
    job = {**SHARDED, "settings": settings}
    answers(2, 2, [{**job, "stop_at": [0, 3]}])
    [[one, other]] = answers(2, 1, [job])
    assert one["hash"] == other["hash"]
    assert one["rounds"] == 9
    assert "whose first rounds ran on 4 devices; the next ones run on 2" in one["warnings"][0]
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    expected = test_stores.run("scaffold", evaluate=evaluate, rounds=9, client_map="scan").history
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], 1e-5)


@SLOW
def test_a_directory_that_holds_another_run_is_refused_by_all(tmp_path):
    (tmp_path / "something.txt").write_text("else")
    job = {**SHARDED, "settings": {"run_dir": str(tmp_path)}}
    [[one, other]] = answers(2, 2, [job])
    assert one["error"].startswith("FileExistsError: run_dir is")
    assert other["error"].startswith("ElsewhereError: process 0 stopped with FileExistsError: run")


COMMAND = [
    *("run", "--model", "linear", "--eval-every", "20", "--cohort-size", "4", "--num-clients", "8"),
    *("--local-steps", "2", "--batch-size", "8", "--replace", "--algorithm", "scaffold"),
    *("--client-map", "shard_map", "--checkpoint-every", "20"),
]


def command(processes, devices, rounds, path):
    arguments = [*COMMAND, "--rounds", str(rounds), "--run-dir", str(path)]
    cache = {"JAX_COMPILATION_CACHE_DIR": os.environ["FEDJAX_LAB_TEST_CACHE"]}
    environment = {**os.environ, **cache}
    return launch(processes, devices, *arguments, module="fedjax_lab", env=environment)


def finish(children, timeout=900):
    """(exit statuses, what they said on stderr)."""
    said = [child.communicate(timeout=timeout) for child in children]
    return [child.returncode for child in children], [errors for _, errors in said]


@SLOW
@pytest.mark.parametrize(("processes", "devices"), [(4, 1), (2, 2)])
def test_of_four_processes_one_is_killed_and_the_run_goes_on(tmp_path, processes, devices):
    rounds = 200
    children = command(4, 1, rounds, tmp_path / "run")
    metrics = tmp_path / "run" / METRICS
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert all(child.poll() is None for child in children)
        time.sleep(0.05)
    children[2].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    statuses, errors = finish(children)
    assert time.monotonic() - killed < 150  # JAX itself waits for 100 s at most
    assert statuses.pop(2) == -signal.SIGKILL
    # JAX ends a process that has not noticed by itself when process 0 ends.
    assert set(statuses) <= {4, -signal.SIGABRT}
    assert statuses[0] == 4
    for process in (0, 1, 3):
        ours = f"process {process} of 4: another process has ended or does not" in errors[process]
        assert ours or "another task died" in errors[process]
    # As many processes again, or others with as many devices in all.
    statuses, errors = finish(command(processes, devices, rounds, tmp_path / "run"))
    assert statuses == [0] * processes, errors
    statuses, errors = finish(command(1, 4, rounds, tmp_path / "whole"))
    assert statuses == [0], errors
    assert metrics.read_bytes() == (tmp_path / "whole" / METRICS).read_bytes()
    summaries = [json.loads((tmp_path / d / SUMMARY).read_text()) for d in ("run", "whole")]
    assert summaries[0]["client_accuracy"] == summaries[1]["client_accuracy"]


@SLOW
@pytest.mark.parametrize("told", [(1,), (0, 1, 2)])
def test_ctrl_c_in_one_process_or_in_all_stops_all_after_the_same_chunk(tmp_path, told):
    children = command(3, 1, 100_000, tmp_path)
    while not (tmp_path / METRICS).exists() or not (tmp_path / METRICS).read_text():
        time.sleep(0.05)
    for process in told:
        children[process].send_signal(signal.SIGINT)
    statuses, errors = finish(children)
    assert statuses == [130] * 3, errors
    assert "the same command resumes it" in errors[0]
    summary = json.loads((tmp_path / SUMMARY).read_text())
    rows = (tmp_path / METRICS).read_text().splitlines()
    assert summary["stopped"] == "interrupt"
    assert summary["round"] == json.loads(rows[-1])["round"] == 20 * len(rows)
    assert load_run(tmp_path).round == summary["round"]  # of the checkpoint


def test_one_process_alone_is_not_several():
    assert jax.process_count() == 1
