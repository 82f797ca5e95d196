"""Processes of a run wait for each other before they join JAX's runtime.

JAX itself waits for minutes without output, and ends all processes with a trace if one is missing.
Here process 0 listens at the coordinator's port, and the others register; the waiting processes
print which ones are missing. When all are there, JAX gets the port. Each message is one line of
JSON.
"""

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any

_LIMIT = "FEDJAX_LAB_JOIN_SECONDS"
_SECONDS = 300.0  # until those who are there give up
_PATIENCE = 5.0  # seconds until it is said who is awaited
_AGAIN = 30.0  # and said again
_LOOK = 0.1  # seconds between looks
_LONGEST = 4096  # bytes of a line


def await_all(address: str, count: int, place: int) -> None:
    """Wait until all processes are there.

    Args:
      address: HOST:PORT of process 0.
      count: number of processes.
      place: index of this process.

    Raises:
      ConnectionError: not all processes registered in time.
      ValueError: two processes have the same index, processes disagree about their number, or the
        limit in the environment is not a number.
      OSError: process 0 cannot listen at the port.
    """
    if count < 2:
        return
    host, _, port = address.rpartition(":")
    wait = _Wait(_limit(), place)
    try:
        if place:
            _report(host.strip("[]"), int(port), {"process": place, "of": count}, wait)
        else:
            bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)
            _gather(int(bound.rpartition(":")[2]), count, wait)
    except _TooLateError as error:
        raise ConnectionError(str(error)) from None


def _limit() -> float:
    text = os.environ.get(_LIMIT) or str(_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"{_LIMIT} is {text!r}; it must be a number greater than 0.")
    return seconds


class _TooLateError(Exception):
    """Not all processes registered in time."""


class _Wait:
    """Wait for other processes; prints who is missing once it is long."""

    def __init__(self, seconds: float, place: int):
        self._began, self._seconds, self._place = time.monotonic(), seconds, place
        self._next = _PATIENCE

    def for_(self, missing: str) -> None:
        """Sleep briefly.

        Args:
          missing: the missing processes.

        Raises:
          _TooLateError: the time limit has passed.
        """
        passed = time.monotonic() - self._began
        if passed > self._seconds:
            raise _TooLateError(
                f"process {self._place} has waited for {missing} for {passed:.0f} seconds, and "
                f"ends. Look at their output; {_LIMIT} sets the time limit."
            )
        if passed > self._next:
            self._next = passed + _AGAIN
            print(
                f"fedjax_lab: process {self._place} is waiting for {missing}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_LOOK)


def _gather(port: int, count: int, wait: _Wait) -> None:
    """Register all processes, in process 0."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    here: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        stack.enter_context(server)
        server.setblocking(False)
        try:
            while missing := sorted(set(range(1, count)) - set(here)):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        connection = stack.enter_context(server.accept()[0])
                        _welcome(connection, count, here)
                for place in [place for place, other in here.items() if _has_gone(other)]:
                    del here[place]
                wait.for_(_named(missing))
        except (_TooLateError, ValueError) as error:
            kind = "late" if isinstance(error, _TooLateError) else "wrong"
            _tell(here.values(), {kind: str(error)})
            raise
        _tell(here.values(), {})


def _welcome(connection: socket.socket, count: int, here: dict[int, socket.socket]) -> None:
    """Register a process; other connections are ignored."""
    connection.settimeout(_PATIENCE)
    try:
        answer = _line_of(connection)
        place, theirs = int(answer["process"]), int(answer["of"])
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()
        return
    wrong = ""
    if theirs != count:
        wrong = f"process {place} knows of {theirs} processes, and process 0 of {count}."
    elif not 0 < place < count or here.setdefault(place, connection) is not connection:
        wrong = f"two processes say that they are process {place}."
    if wrong:
        _tell([connection], {"wrong": wrong})
        raise ValueError(wrong)


def _report(host: str, port: int, who: dict[str, int], wait: _Wait) -> None:
    """Register with process 0, in the other processes."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=_PATIENCE) as connection:
                _tell([connection], who)
                answer = _answer(connection, wait)
        except (OSError, ValueError):  # not there yet, or gone to come again
            wait.for_(f"process 0 at {host}:{port}")
            continue
        if "late" in answer:
            raise _TooLateError(answer["late"])
        if "wrong" in answer:
            raise ValueError(answer["wrong"])
        return


def _answer(connection: socket.socket, wait: _Wait) -> dict[str, str]:
    connection.settimeout(_LOOK)
    while True:
        try:
            return dict(_line_of(connection))
        except TimeoutError:
            wait.for_("process 0, which waits for others")


def _tell(connections: Iterable[socket.socket], what: dict[str, Any]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE)
            connection.sendall(json.dumps(what).encode() + b"\n")


def _line_of(connection: socket.socket) -> Any:
    """Receive one line of JSON, which is short enough for one packet."""
    line = connection.recv(_LONGEST)
    if not line:
        raise ConnectionError("the other side has gone")
    return json.loads(line)


def _has_gone(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _named(places: list[int]) -> str:
    return f"process{'es' * (len(places) > 1)} {', '.join(map(str, places))}"
