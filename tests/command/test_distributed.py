"""``run --distributed``: where the processes find each other, and what is said if they cannot."""

import json
import os
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from fedjax_lab.command import launch
from fedjax_lab.command.cli import main
from fedjax_lab.command.commands import RunCommand
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.distributed import join
from fedjax_lab.simulation import processes as processes_module

ADDRESS, COUNT, PLACE = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@pytest.fixture
def asked(monkeypatch):
    """What JAX is asked for; it finds nothing out by itself."""
    calls = []
    limit = 300

    def initialize(address=None, count=None, place=None, initialization_timeout=None):
        calls.append((address, count, place))
        assert initialization_timeout == limit
        for value, told in (
            (address, "coordinator_address should be defined."),
            (count, "Number of processes must be defined."),
            (place, "The process id of the current process must be defined."),
        ):
            if value is None:
                raise ValueError(told)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name in (ADDRESS, COUNT, PLACE):
        monkeypatch.delenv(name, raising=False)
    return calls


def command(**settings):
    return RunCommand(RunConfig(), distributed=True, **settings)


def test_flags_come_before_the_environment(asked, monkeypatch):
    for name, value in ((ADDRESS, "host:1"), (COUNT, "3"), (PLACE, "2")):
        monkeypatch.setenv(name, value)
    join(command())
    join(command(coordinator="other:2", num_processes=5, process_id=0))
    assert asked == [("host:1", 3, 2), ("other:2", 5, 0)]


def test_without_the_flag_nobody_is_joined(asked):
    join(RunCommand(RunConfig()))
    assert asked == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            "distributed: --coordinator (or JAX_COORDINATOR_ADDRESS), --num-processes (or "
            "JAX_NUM_PROCESSES), --process-id (or JAX_PROCESS_ID) is missing; it is detected only "
            "on a TPU pod",
        ),
        (
            {"coordinator": "host:1", "num_processes": 2},
            "distributed: --process-id (or JAX_PROCESS_ID) is missing",
        ),
        ({"coordinator": "host"}, "coordinator is 'host'; it must be HOST:PORT"),
        ({"num_processes": 0}, "num_processes is 0; it must be at least 1"),
        (
            {"num_processes": 2, "process_id": 2},
            "process_id is 2; with 2 processes it must be at most 1",
        ),
        ({"process_id": -1}, "process_id is -1; it must be at least 0"),
    ],
)
def test_what_is_missing_or_wrong_is_named(asked, settings, message):
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(").replace(")", r"\)")):
        join(command(**settings))


def test_a_number_in_the_environment_is_one(asked, monkeypatch):
    monkeypatch.setenv(COUNT, "two")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES is 'two'; it must be a whole number"):
        join(command())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"coordinator": "host:1", "num_processes": 3, "process_id": 2},
            "process 2 waits for all 3 processes at host:1, at most 8 seconds",
        ),
        ({}, "this process waits for the others at the coordinator, at most 8 seconds"),
    ],
)
def test_who_waits_for_how_many_at_which_address_is_one_line(settings, line, monkeypatch, capsys):
    limits = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *who, **more: limits.append(more))
    monkeypatch.setenv("FEDJAX_LAB_JOIN_SECONDS", "7.5")
    join(command(**settings))
    assert capsys.readouterr().err == f"fedjax-lab: {line}\n"
    join(command(**settings, quiet=True))
    assert capsys.readouterr().err == ""
    assert limits == [{"initialization_timeout": 8}] * 2


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon"])
def test_the_limit_is_a_number(text, monkeypatch):
    monkeypatch.setenv("FEDJAX_LAB_JOIN_SECONDS", text)
    with pytest.raises(ValueError, match=f"FEDJAX_LAB_JOIN_SECONDS is '{text}'; it must be a numb"):
        join(command(coordinator="host:1", num_processes=2, process_id=1))


def test_jax_ends_a_process_that_nobody_joins(tmp_path):
    """JAX writes why, and ends the process by SIGABRT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    joined = ["--distributed", "--coordinator", address, "--num-processes", "2"]
    ended = subprocess.run(
        [sys.executable, "-m", "fedjax_lab", "run", *joined, "--process-id", "0"],
        env={**os.environ, "FEDJAX_LAB_JOIN_SECONDS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == -signal.SIGABRT
    assert f"process 0 waits for all 2 processes at {address}, at most 1 seconds" in ended.stderr
    assert "DEADLINE_EXCEEDED" in ended.stderr


def test_seeds_are_compared_before_the_first_run(monkeypatch, capsys):
    def differs(mine):
        raise ValueError(f"all processes must be given the same, and not {mine}")

    monkeypatch.setattr(launch, "start", lambda *arguments: None)
    monkeypatch.setattr(launch.Processes, "agree", lambda self, mine: differs(mine))
    assert main(["run", "--seeds", "3", "4", "--quiet"]) == 2
    assert "and not {'seeds': [3, 4]}" in capsys.readouterr().err


def test_what_failed_in_another_process_is_one_line(monkeypatch, capsys):
    def fails(command):
        raise processes_module.ElsewhereError("process 0 stopped with PermissionError: no")

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
    processes = processes_module._SeveralProcesses()
    with pytest.raises(ConnectionError if is_loss else type(error)), processes.reporting_losses():
        raise error


def test_the_flags_of_a_process_go_with_distributed(capsys, tmp_path):
    arguments = ["--run-dir", str(tmp_path / "run"), "--quiet"]
    assert main(["run", *arguments, "--num-processes", "2"]) == 2
    assert "num_processes is 2; --num-processes requires --distributed" in capsys.readouterr().err


RUN = ["--model", "linear", "--rounds", "1", "--eval-every", "1", "--cohort-size", "4", "--run-dir"]


@pytest.mark.methods
def test_srun_needs_to_say_nothing(tmp_path):
    """Four processes with the variables that ``srun`` sets end like one process of four devices."""
    job = next(n for n in range(os.getpid(), os.getpid() + 4096) if is_free(n % 4096 + 61440))
    slurm = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "4"}

    def start(folder, devices, **more):
        call = [sys.executable, "-m", "fedjax_lab", "run", "--cpu-devices", str(devices)]
        flags = ["--distributed"] if more else []
        with (tmp_path / f"{folder}{more.get('SLURM_PROCID', '')}.txt").open("wb") as said:
            return subprocess.Popen(
                [*call, *flags, *RUN, tmp_path / folder],
                env={**os.environ, "XLA_FLAGS": "", **more},
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    several = [
        start("four", 1, **slurm, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(4)
    ]
    assert [process.wait(300) for process in several] == [0] * 4
    assert start("one", 4).wait(300) == 0
    rows = [json.loads((tmp_path / f / "metrics.jsonl").read_text()) for f in ("four", "one")]
    assert rows[0].keys() == rows[1].keys()
    for name, value in rows[1].items():
        np.testing.assert_array_equal(rows[0][name], value, err_msg=name)


def is_free(port):
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0
