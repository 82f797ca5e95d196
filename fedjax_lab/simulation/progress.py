"""Progress on the terminal: a bar with rate and time left, or plain lines in a log."""

import sys
import time
from typing import Any


class Progress:
    """Shows how far a run is; silent if ``enabled`` is False.

    On a terminal it is a bar. Elsewhere it prints at most one line in ten seconds, and the
    first and the last.
    """

    def __init__(self, name: str, start: int, rounds: int, enabled: bool):
        self._name, self._start, self._rounds = name, start, rounds
        self._began = self._last_line = time.monotonic()
        self._bar: Any = None  # rich is imported on a terminal only
        self._enabled = enabled
        if enabled and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            console = Console(stderr=True)
            # The line must not be wider than the terminal: rich would cut every column then.
            width = max(10, min(40, console.width // 8))
            taken = len(name) + width + 2 * len(str(rounds)) + len("/ 1000.0 rounds/s 00:00:00    ")
            self._room = console.width - taken
            self._bar = progress.Progress(
                progress.TextColumn("[bold]{task.description}"),
                progress.BarColumn(bar_width=width),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[rate]:6.1f} rounds/s"),
                progress.TimeRemainingColumn(compact=True),
                progress.TextColumn("{task.fields[note]}"),
                console=console,
            )
            self._task = self._bar.add_task(
                name, total=rounds, completed=start, rate=0.0, note="compiling"
            )
            self._bar.start()

    def go_on_from(self, round: int, finished: bool = False) -> None:
        """Say that ``round`` rounds were done before, and whether no more are to come."""
        self._start = round
        if self._bar is not None:
            self._bar.update(self._task, completed=round)
        if self._enabled and (finished or round >= self._rounds):
            print(f"{self._name}: finished already, nothing run", file=sys.stderr, flush=True)

    def update(self, round: int, values: dict[str, Any]) -> None:
        """Report that ``round`` rounds are done, with a few values to show."""
        now = time.monotonic()
        rate = (round - self._start) / max(now - self._began, 1e-9)
        numbers = {name: v for name, v in values.items() if isinstance(v, float)}
        notes = [f"{name} {value:#.4g}" for name, value in numbers.items()]
        note = "  ".join(notes)
        if self._bar is not None:
            while notes and len("  ".join(notes)) > self._room:
                notes.pop()
            self._bar.update(self._task, completed=round, rate=rate, note="  ".join(notes))
        elif self._enabled and (
            round == self._rounds or now - self._last_line >= 10 or self._last_line == self._began
        ):
            self._last_line = now
            left = (self._rounds - round) / max(rate, 1e-9)
            print(
                f"{self._name}: round {round}/{self._rounds}  {rate:.1f} rounds/s  "
                f"{left:.0f} s left  {note}",
                file=sys.stderr,
                flush=True,
            )

    def start_clock(self) -> None:
        """Leave the time so far (compilation) out of the rate."""
        self._began = self._last_line = time.monotonic()

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.stop()
