"""``fedjax-lab run --distributed``: one run in several processes."""

import math
import os
import re
import sys
import time
from typing import Any, NoReturn

import jax

from fedjax_lab.checks import check_int
from fedjax_lab.command.commands import OF_PROCESSES, PROG, RunCommand, flag_of

LOST = 4  # the exit status of a process whose run another process has left
_GRACE = 2.0  # seconds
_LIMIT = "FEDJAX_LAB_JOIN_SECONDS"

_ADDRESS = re.compile(r"\S+:\d{1,5}")


def join(command: RunCommand) -> None:
    """Connect to the other processes of the run, if the command has any.

    Missing arguments are taken from the environment, or else JAX detects a TPU pod, SLURM, Open MPI
    or Kubernetes. JAX ends this process if the others do not connect in time.

    Raises:
      ValueError: an argument is missing and cannot be detected, is out of range, or was given
        without ``distributed``.
      TypeError: a number has another type.
    """
    given = {name: getattr(command, name) for name in OF_PROCESSES}
    if not command.distributed:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is {value!r}; {flag_of(name)} requires --distributed.")
        return
    found = {name: _found(name, value) for name, value in given.items()}
    _check(found)
    if jax.distributed.is_initialized():
        return
    address, count, place = found.values()
    seconds = _seconds()
    if not command.quiet:
        who = "this process" if place is None else f"process {place}"
        others = "the others" if count is None else f"all {count} processes"
        where = "the coordinator" if address is None else address
        print(
            f"{PROG}: {who} waits for {others} at {where}, at most {seconds} seconds",
            file=sys.stderr,
            flush=True,
        )
    try:
        jax.distributed.initialize(address, count, place, initialization_timeout=seconds)
    except ValueError as error:
        missing = [
            f"{flag_of(name)} (or {variable})"
            for name, variable in OF_PROCESSES.items()
            if found[name] is None
        ]
        if not missing:
            raise
        raise ValueError(
            f"distributed: {', '.join(missing)} is missing; it is detected only on a TPU pod, "
            "and under SLURM, Open MPI or Kubernetes."
        ) from error


def leave() -> NoReturn:
    """End this process after another one was lost, because JAX's shutdown would wait for it.

    Process 0 waits until the others have printed their errors, because JAX ends those that outlive
    it.
    """
    sys.stdout.flush()
    if jax.process_index() == 0:
        time.sleep(_GRACE)
    os._exit(LOST)


def _found(name: str, value: Any) -> Any:
    variable = OF_PROCESSES[name]
    text = os.environ.get(variable)
    if value is not None or not text:
        return value
    if name == "coordinator":
        return text
    if not text.isdigit():
        raise ValueError(f"{variable} is {text!r}; it must be a whole number.")
    return int(text)


def _seconds() -> int:
    """Return for how many seconds the processes wait for each other."""
    text = os.environ.get(_LIMIT) or "300"
    try:
        seconds = math.ceil(float(text))
    except (ValueError, OverflowError):
        seconds = 0
    if seconds < 1:
        raise ValueError(f"{_LIMIT} is {text!r}; it must be a number greater than 0.")
    return seconds


def _check(found: dict[str, Any]) -> None:
    address, count, place = found.values()
    if address is not None and not _ADDRESS.fullmatch(address):
        raise ValueError(
            f"coordinator is {address!r}; it must be HOST:PORT, of the machine of process 0."
        )
    if count is not None:
        check_int("num_processes", count, minimum=1)
    if place is not None:
        check_int("process_id", place, minimum=0)
        if count is not None and place >= count:
            raise ValueError(
                f"process_id is {place}; with {count} processes it must be at most {count - 1}."
            )
