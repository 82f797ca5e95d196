"""How a run is stopped from outside: Ctrl-C, and the SIGTERM of schedulers."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 2.0  # seconds that Python gets to react to the second signal


class Stop:
    """Whether the run is to stop.

    Attributes:
      signal: the number of the first signal; None before it.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """A ``Stop`` that the first Ctrl-C or SIGTERM sets; the second one interrupts at once.

    Python's handlers wait while a program compiles or runs. The signal is acknowledged on stderr
    without waiting, by a thread that hears of it through a socket; and where Python does not
    react to the second one, that thread ends the process. What is on the disk is whole at any
    time.

    Outside the main thread, where no signal arrives, nothing is set.
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
    watch = threading.Thread(target=_acknowledge, args=(hears, over, wakeup), daemon=True)
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


def _acknowledge(hears: socket.socket, over: threading.Event, outer: int) -> None:
    """Answer each signal as it comes; ends with the socket."""
    count = 0
    while numbers := hears.recv(1):
        if outer >= 0:
            with contextlib.suppress(OSError):
                os.write(outer, numbers)
        if numbers[0] not in _SIGNALS:
            continue
        count += 1
        if count == 1:
            _say("finishing this chunk of rounds, then saving; again to stop now")
        elif count == 2 and not over.wait(_PATIENCE):
            _say("stopped")
            os._exit(128 + numbers[0])


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"\n{text}", file=sys.stderr, flush=True)
