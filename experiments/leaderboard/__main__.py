"""Run the cells of the leaderboard that are missing, and write docs/leaderboard.md.

    python -m experiments.leaderboard [--tasks T ...] [--methods M ...]
    python -m experiments.leaderboard --method mine=package.module:factory [--space mine.x=0.5,0.9]
    python -m experiments.leaderboard --keep-tuning     # final runs anew where only they changed
    python -m experiments.leaderboard --report          # writes the page; runs nothing
    python -m experiments.leaderboard --scale points    # as many points for all methods
    python -m experiments.leaderboard --scale smoke     # the smallest one, in runs/leaderboard

A cell is a method on a task. A finished cell is a file and is not run again.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from experiments.leaderboard import page
from experiments.leaderboard.cells import (
    AS_MANY_POINTS,
    POINTS,
    RESULTS,
    SMOKE,
    Scale,
    complete,
    declared,
    gradients_per_step,
    has_tuning,
    load,
    path_of,
    run_again,
    run_cell,
    start_of,
    store,
)
from experiments.leaderboard.methods import METHODS, Method
from experiments.leaderboard.tasks import TASKS, Task, problem, smoke
from fedjax_lab.command.tuning import space_of


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the page.

    Args:
      arguments: the command line; None: the process's.
    """
    parser = argparse.ArgumentParser(
        prog="python -m experiments.leaderboard", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", metavar="M", help="rows; all by default")
    parser.add_argument(
        "--method", action="append", default=[], metavar="NAME=MODULE:FACTORY", help="your own row"
    )
    parser.add_argument("--space", nargs="+", default=[], metavar="NAME.H=VALUES", help="of yours")
    parser.add_argument(
        "--keep-tuning", action="store_true", help="where a cell's tuning is as declared, keep it"
    )
    parser.add_argument("--scale", choices=("machine", "points", "smoke"), default="machine")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--page", type=Path, help="the page")
    parser.add_argument("--report", action="store_true", help="write the page; run nothing")
    given = parser.parse_args(arguments)
    try:
        own = {name: _own(name, path, given) for name, path in map(_named, given.method)}
    except ValueError as error:
        parser.error(str(error))
    methods = {**METHODS, **own}
    for name in given.methods or ():
        if name not in methods:
            parser.error(f"--methods has {name!r}; there are: {', '.join(methods)}")
    is_smoke = given.scale == "smoke"
    scale, usual = {
        "machine": (Scale(), RESULTS),
        "points": (POINTS, AS_MANY_POINTS),
        "smoke": (SMOKE, Path("runs/leaderboard")),
    }[given.scale]
    folder = given.out or usual
    if not given.report:
        chosen = given.methods or list(own or METHODS)
        for name in given.tasks:
            task = smoke(TASKS[name]) if is_smoke else TASKS[name]
            rows = {each: methods[each] for each in chosen}
            run_task(name, task, rows, scale, folder, given.keep_tuning)
    if scale == POINTS:
        folder = RESULTS  # the page has both
    page.write(folder, given.page or (folder / "leaderboard.md" if is_smoke else page.PAGE))


def run_task(
    name: str,
    task: Task,
    methods: dict[str, Method],
    scale: Scale,
    folder: Path,
    keep_tuning: bool = False,
) -> None:
    """Run the cells of a task that are not there yet.

    Args:
      name, task: the task.
      methods: the rows.
      scale: how much is run; with ``POINTS``, rows with several gradients in a local step alone.
      folder: folder of all results.
      keep_tuning: run a cell's final runs anew where its tuning is as declared.

    Raises:
      SystemExit: a stored cell was made under other conditions.
    """
    cells, data = load(folder, name), None
    before = load(RESULTS, name) if scale == POINTS else {}  # rows with one gradient in a step
    for method_name, method in methods.items():
        if method.refused(task) is not None:
            continue
        stored = cells.get(method_name)
        tuned = stored is not None and stored["declared"] == declared(task, method, scale)
        if tuned and start_of(stored, method, {**before, **cells}) is None:
            continue
        keeps = keep_tuning and stored is not None and has_tuning(stored, task, method, scale)
        if stored is not None and not tuned and not keeps:
            place = path_of(folder, name, method_name)
            raise SystemExit(f"{place} was made under other conditions; move it away first.")
        data = data or problem(task)
        if scale == POINTS and gradients_per_step(task, data, method) == 1:
            continue
        if stored is None:
            cell = run_cell(task, data, method_name, method, scale, {**before, **cells})
        elif tuned:
            cell = complete(stored, task, data, method, scale, {**before, **cells})
        else:
            cell = run_again(stored, task, data, method, scale)
        cells[method_name] = cell
        store(folder, name, cell)
        spent = f"{cell['processor_seconds']} processor seconds"
        print(f"{name} {method_name}: {cell['chosen']}, {spent}", flush=True)


def _named(given: str) -> tuple[str, str]:
    name, equals, path = given.partition("=")
    if not (name and equals and ":" in path):
        raise ValueError(f"--method is {given!r}; it must be NAME=package.module:factory.")
    return name, path


def _own(name: str, path: str, given: argparse.Namespace) -> Method:
    """Build the row of one's own method."""
    method = Method(path)
    texts = [text.removeprefix(f"{name}.") for text in given.space if text.startswith(f"{name}.")]
    if not texts:
        return method
    return dataclasses.replace(method, space=space_of(texts, path, [path]))


if __name__ == "__main__":
    main()
