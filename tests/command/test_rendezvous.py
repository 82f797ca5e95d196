"""Processes that wait for each other: who is awaited is said, and nobody waits for ever."""

import concurrent.futures
import json
import socket
import time

import jax
import pytest

from fedjax_lab.command import launch, rendezvous
from fedjax_lab.command.cli import main
from fedjax_lab.command.rendezvous import await_all
from fedjax_lab.simulation import team


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LOOK", 0.01)
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.1)
    monkeypatch.setenv("FEDJAX_LAB_JOIN_SECONDS", "0.8")


@pytest.fixture
def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def outcomes(address, *who, count=3, delay=0.0):
    """What each of them gets: None, or its error."""

    def one(number, place):
        time.sleep(delay * number)
        try:
            return await_all(address, count, place)
        except (ConnectionError, ValueError) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(who)) as pool:
        return list(pool.map(one, range(len(who)), who))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_go_on_when_the_last_one_has_come(address, order):
    assert outcomes(address, *order, delay=0.05) == [None] * 3
    with socket.create_server(("127.0.0.1", int(address.partition(":")[2]))):
        pass  # the port is free again


def test_who_is_missing_is_said_and_waited_for_no_longer_than_the_limit(address, capfd):
    one, other = outcomes(address, 0, 2, count=5)
    said = capfd.readouterr().err
    assert "process 0 is waiting for processes 1, 3, 4\n" in said
    assert "process 2 is waiting for process 0, which waits for others\n" in said
    assert isinstance(one, ConnectionError)
    assert "process 0 has waited for processes 1, 3, 4 for 1 seconds" in str(one)
    assert isinstance(other, ConnectionError)


def test_without_process_0_it_is_that_one(address, capfd):
    [error] = outcomes(address, 1)
    assert f"process 1 is waiting for process 0 at {address}\n" in capfd.readouterr().err
    assert f"process 1 has waited for process 0 at {address}" in str(error)


def test_a_process_that_went_again_is_missing(address):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(outcomes, address, 0, count=3)
        time.sleep(0.1)
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as gone:
            gone.sendall(json.dumps({"process": 2, "of": 3}).encode() + b"\n")
            time.sleep(0.1)
        [other] = outcomes(address, 1, count=3)
    assert "process 0 has waited for process 2 for" in str(first.result()[0])
    assert isinstance(other, ConnectionError)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"process": 1, "of": 2}, "process 1 knows of 2 processes, and process 0 of 3"),
        ({"process": 0, "of": 3}, "two processes say that they are process 0"),
    ],
)
def test_those_of_another_run_are_told(address, asked, message):
    def stranger():
        time.sleep(0.1)
        try:
            return await_all(address, asked["of"], asked["process"] or 3)
        except ValueError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(outcomes, address, 0)
        if asked["process"]:
            assert message in str(stranger())
        else:
            time.sleep(0.1)
            host, port = address.split(":")
            with socket.create_connection((host, int(port))) as other:
                other.sendall(json.dumps(asked).encode())
                assert message in json.loads(other.recv(1000))["wrong"]
    assert message in str(first.result()[0])


def test_what_is_no_process_of_a_run_is_not_listened_to(address):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, address, 0, count=2)
        time.sleep(0.1)
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as other:
            other.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert other.recv(100) == b""
        assert outcomes(address, 1, count=2) == [None]
        assert first.result() == [None]


def test_the_limit_is_a_number(address, monkeypatch):
    monkeypatch.setenv("FEDJAX_LAB_JOIN_SECONDS", "-1")
    with pytest.raises(ValueError, match="FEDJAX_LAB_JOIN_SECONDS is '-1'"):
        await_all(address, 2, 0)


def test_a_process_that_nobody_joins_ends_with_one_line_and_status_4(address, monkeypatch, capsys):
    monkeypatch.setattr(launch, "start", lambda *arguments: None)
    joined = ["--distributed", "--coordinator", address, "--num-processes", "2"]
    assert main(["run", *joined, "--process-id", "0"]) == 4
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("fedjax-lab: process 0 has waited for process 1 for 1 seconds")


def test_seeds_are_compared_before_the_first_run(monkeypatch, capsys):
    def differs(mine):
        raise ValueError(f"all processes must be given the same, and not {mine}")

    monkeypatch.setattr(launch, "start", lambda *arguments: None)
    monkeypatch.setattr(launch.Team, "agree", lambda self, mine: differs(mine))
    assert main(["run", "--seeds", "3", "4", "--quiet"]) == 2
    assert "and not {'seeds': [3, 4]}" in capsys.readouterr().err


def test_what_failed_in_another_process_is_one_line(monkeypatch, capsys):
    def fails(command):
        raise team.ElsewhereError("process 0 stopped with PermissionError: no")

    monkeypatch.setattr(launch, "start", lambda *arguments: None)
    monkeypatch.setattr(launch, "join", fails)
    assert main(["run", "--run-dir", "x", "--quiet"]) == 2
    assert capsys.readouterr().err == ("fedjax-lab: process 0 stopped with PermissionError: no\n")


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (ValueError("Connection to the data base was refused"), False),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"), True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
    ],
)
def test_errors_of_the_users_own_are_no_losses(error, is_loss):
    processes = team._Processes()
    with pytest.raises(ConnectionError if is_loss else type(error)), processes.reporting_losses():
        raise error
