"""The time of a run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Time spent in all calls: in rounds and evaluation, and compiling.

    Args:
      spent: (seconds, compile_seconds) of earlier calls.
      compiled: seconds spent compiling in this call so far.

    Attributes:
      seconds: time spent in rounds and evaluation, without compilation.
      compile_seconds: time spent compiling.
    """

    def __init__(self, spent: tuple[float, float] = (0.0, 0.0), compiled: float = 0.0):
        self.seconds, self._compiled_before = spent
        self._began = time.perf_counter() - self.seconds - compiled
        self.compile_seconds = self._compiled_before + compiled

    def measure(self, compiled: float) -> None:
        """Set both times."""
        self.compile_seconds = self._compiled_before + compiled
        self.seconds = time.perf_counter() - self._began - compiled

    def record(self) -> dict[str, float]:
        """Return both times, by name."""
        return {"seconds": self.seconds, "compile_seconds": self.compile_seconds}

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the time that is spent inside."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began
