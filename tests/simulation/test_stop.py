"""Signals: a compiler is not waited for, as long as nothing has been computed."""

import os
import signal
import threading
import time

import pytest

from fedjax_lab.simulation.stop import compiles_still, stop_on_signal


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
