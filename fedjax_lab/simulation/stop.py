"""Stopping a run with Ctrl-C, or with the SIGTERM of schedulers."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent import futures
from pathlib import Path

_EARLY = "stopped before the first round; there is nothing to save"
_LATER = "finishing this chunk of rounds, then saving; again to stop now"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WORKER, _LOOK = "fedjax_lab compiles", 0.05  # seconds
_PATIENCE = 2.0  # seconds that Python gets to react to the second signal
# (name of the signal, what it ended); the runs of a process share it, so that a loop ends, too.
_ended: list[tuple[str, Hashable]] = []


def forget_signal() -> None:
    """Allow runs again in this process after a signal has ended one.

    One signal ends a loop of runs: after Ctrl-C or SIGTERM has ended a ``simulate`` or ``sweep``,
    every later ``simulate``, ``sweep`` or ``tune`` of the process raises ``KeyboardInterrupt``. The
    call that resumes the interrupted run (the same ``run_dir`` and ``rounds``) is allowed, and
    forgets the signal, too.
    """
    _ended.clear()


def end_later_runs(number: int | None, what: Hashable = None) -> None:
    """Let later runs of this process raise ``KeyboardInterrupt``.

    Args:
      number: number of the signal; None: it came to another process.
      what: identifies the interrupted call, which may be repeated; None: it may not.
    """
    name = "a signal in another process" if number is None else signal.Signals(number).name
    _ended[:] = [(name, what)]


def check_not_ended(run_dir: str | Path | None = None, rounds: int = 0) -> Hashable:
    """Check that no signal has ended an earlier run of this process.

    Returns:
      What identifies this call; None without ``run_dir``.

    Raises:
      KeyboardInterrupt: one has, and this is not the same call.
    """
    this_call = None if run_dir is None else (Path(run_dir).resolve(), rounds)
    for name, before in _ended:
        if this_call is None or this_call != before:
            raise KeyboardInterrupt(
                f"{name} has ended an earlier run of this process, and ends the later ones, too. "
                "To run again in this process, call fedjax_lab.forget_signal() first."
            )
    forget_signal()
    return this_call


class Stop:
    """Records a request to stop.

    Attributes:
      signal: number of the first signal; None before it.
      at_once: whether nothing has been computed yet, so that the first signal stops at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.at_once = True

    def is_set(self) -> bool:
        """Return True if a signal has arrived."""
        return self.signal is not None

    def unless_set(self, action: Callable[[], None]) -> bool:
        """Run a slow action; return at once if a signal arrives before anything was computed.

        A compiler ignores signals. It therefore runs in a thread, which continues until the
        compiler is done.

        Returns:
          Whether it finished.

        Raises:
          Exception: the action's own error.
        """
        if not self.at_once or threading.current_thread() is not threading.main_thread():
            action()
            return True
        worker = futures.ThreadPoolExecutor(1, _WORKER)
        done = worker.submit(action)
        worker.shutdown(wait=False)
        while not done.done() and not self.is_set():
            futures.wait([done], _LOOK)
        if not done.done():
            return False
        done.result()
        return True


def compiles_still() -> bool:
    """Return True if a compiler still works for a run that has been stopped."""
    return any(thread.name.startswith(_WORKER) for thread in threading.enumerate())


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Yield a ``Stop`` that the first Ctrl-C or SIGTERM sets; a second one interrupts at once.

    Python's handlers wait while a program compiles or runs. A thread that receives the signal
    through a socket acknowledges it on stderr at once. If Python does not react to the second
    signal, that thread ends the process. The files on disk are complete at any time.

    Outside the main thread, where no signal arrives, nothing is installed.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.signal = number

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    hears, speaks = socket.socketpair()
    speaks.setblocking(False)
    # A full socket may lose a third signal; there is no need to say so.
    wakeup = signal.set_wakeup_fd(speaks.fileno(), warn_on_full_buffer=False)
    over = threading.Event()
    watch = threading.Thread(target=_acknowledge, args=(hears, over, wakeup, stop), daemon=True)
    watch.start()
    try:
        yield stop
    finally:
        over.set()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        speaks.close()
        watch.join()
        hears.close()


def _acknowledge(hears: socket.socket, over: threading.Event, outer: int, stop: Stop) -> None:
    """Acknowledge each signal; ends when the socket is closed."""
    count = 0
    while numbers := hears.recv(1):
        if outer >= 0:
            with contextlib.suppress(OSError):
                os.write(outer, numbers)
        if numbers[0] not in _SIGNALS:
            continue
        count += 1
        if count == 1:
            _say(_EARLY if stop.at_once else _LATER)
        elif count == 2 and not over.wait(_PATIENCE):
            _say("stopped")
            os._exit(128 + numbers[0])


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"\n{text}", file=sys.stderr, flush=True)
