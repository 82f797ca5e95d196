"""Signals: a compiler is not waited for, as long as nothing has been computed."""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest

from fedjax_lab import algorithms, forget_signal, sweep, tune
from fedjax_lab.simulation.stop import compiles_still, stop_on_signal
from tests.simulation.test_run import FEDAVG, first_params, loss_fn, make_clients, run


def interrupt_after(seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_a_compiler_is_not_waited_for(capfd):
    done = threading.Event()
    began = time.monotonic()
    with stop_on_signal() as stop:
        interrupt_after(0.1)
        assert not stop.unless_set(lambda: done.wait(20))
        assert time.monotonic() - began < 10
        assert stop.signal == signal.SIGINT
        assert compiles_still()
    done.set()
    assert "stopped before the first round; there is nothing to save" in capfd.readouterr().err


def test_later_a_signal_waits_for_what_is_running(capfd):
    with stop_on_signal() as stop:
        stop.at_once = False
        interrupt_after(0.05)
        assert stop.unless_set(lambda: time.sleep(0.4))
        assert stop.is_set()
    assert "finishing this chunk of rounds" in capfd.readouterr().err


def test_what_fails_in_the_thread_fails_here():
    def fails():
        raise ValueError("no memory")

    with stop_on_signal() as stop, pytest.raises(ValueError, match="no memory"):
        stop.unless_set(fails)


def interrupt(row):
    if row["round"] == 4:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_ends_a_loop_of_runs(tmp_path):
    settings = {"algorithm": FEDAVG, "rounds": 6}
    first = run(**settings, run_dir=tmp_path / "a", on_row=interrupt)
    assert (first.stopped, first.history[-1]["round"]) == ("interrupt", 4)
    with pytest.raises(KeyboardInterrupt, match=r"SIGTERM has ended .* fedjax_lab\.forget_signal"):
        run(**settings, run_dir=tmp_path / "b")
    assert not (tmp_path / "b").exists()
    build = lambda client_lr: algorithms.fedavg(loss_fn, client_lr=client_lr)  # noqa: E731
    given = {"rounds": 2, "cohort_size": 2, "local_steps": 1, "batch_size": 2}
    for call in (
        lambda: run(**settings),
        lambda: run(**settings | {"rounds": 8}, run_dir=tmp_path / "a"),  # it would be longer
        lambda: sweep(build, first_params(), make_clients(), points={"client_lr": [1]}, **given),
        lambda: tune({"a": build}, {"client_lr": [1]}, first_params(), make_clients(), **given),
    ):
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            call()
    assert run(**settings, run_dir=tmp_path / "a").stopped is None  # resumed, which forgets it
    assert run(**settings).stopped is None


def test_a_signal_in_the_last_chunk_ends_a_loop_too():
    settings = {"algorithm": FEDAVG, "rounds": 4}
    assert run(**settings, on_row=interrupt).stopped is None
    with pytest.raises(KeyboardInterrupt):
        run(**settings)
    forget_signal()
    assert run(**settings).stopped is None


def test_a_signal_lets_a_sweep_finish_a_chunk(capfd, monkeypatch):
    def call(stop_when=None):
        build = lambda client_lr: algorithms.fedavg(loss_fn, client_lr=client_lr)  # noqa: E731
        given = {"rounds": 8, "cohort_size": 2, "local_steps": 1, "batch_size": 2, "eval_every": 2}
        given |= {"points": {"client_lr": [0.1]}, "seeds": (0,), "stop_when": stop_when}
        found = sweep(build, first_params(), make_clients(), **given)
        forget_signal()
        return found.interrupted, found.rounds.tolist()

    assert call(interrupt) == (True, [2, 4, 6])  # rows are asked about before the next chunk
    said = capfd.readouterr().err
    assert "finishing this chunk of rounds" in said
    assert "nothing to save" not in said

    @contextlib.contextmanager
    def set_at_once():
        with stop_on_signal() as stop:
            stop.signal = signal.SIGINT
            yield stop

    monkeypatch.setattr(sys.modules[sweep.__module__], "stop_on_signal", set_at_once)
    assert call(lambda row: False) == (True, [2])
