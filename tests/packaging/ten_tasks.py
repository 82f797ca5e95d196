"""Ten tasks of a new user, with the installed package alone, each in an empty folder.

    python tests/packaging/ten_tasks.py            all, with the Python that runs this
    python tests/packaging/ten_tasks.py figures    some of them

Prints how many lines a user writes for each (a command is a line), and the seconds and processor
seconds that they take.
A task ends with an error if a command fails, or if what it should show is missing. `make
wheel-check` runs them on the wheel, which needs the extras `report` and `tables`.
"""

import os
import random
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

REGRESSION = """
import jax
from fedjax_lab import algorithms, build_evaluation, data, models, simulate

users = data.from_table("users.csv", client="user", x=["age", "dose", "sex"], y="response")
train, unseen = data.split_clients(users, 0.2, seed=0)
model, prepare = models.linear(1), data.preprocess(*data.normalization(train.examples))
params = model.init(jax.random.key(0), users.examples.x[:1])
method = algorithms.fedavg(models.regression_loss(model.apply, prepare), client_lr=0.05)
evaluate = build_evaluation(models.squared_error_counts(model.apply, prepare), unseen)
run = simulate(method, params, train, rounds=60, cohort_size=8, local_steps=5, batch_size=8,
               evaluate=evaluate)
print("mean squared error of unseen users:", run.history[-1]["mean_squared_error"])
"""

NET = """
import flax.linen as nn


class Net(nn.Module):
    classes: int
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
        return nn.Dense(self.classes)(x)


def net(num_classes, width: int = 32):
    return Net(num_classes, width)
"""


class Task(NamedTuple):
    """What is to be done, and how.

    Attributes:
      wanted: what the user wants.
      commands: lines for a shell.
      shows: what the last command prints, or leaves: "FILE: text" is in a file, whose name may have
        wildcards, and a text alone is on stdout.
      files: name -> what the user writes.
      given: names of files that the user has.
      at_most: lines that the task may take.
    """

    wanted: str
    commands: tuple[str, ...]
    shows: str
    files: dict[str, str] = {}  # noqa: RUF012
    given: tuple[str, ...] = ()
    at_most: int = 4


LAB = "fedjax-lab"
SHORT = "--rounds 10 --eval-every 5"
TASKS = {
    "first": Task(
        "a first run, and its report",
        (f"{LAB} run {SHORT}", f"{LAB} report runs"),
        "runs/*/report.md: accuracy",
    ),
    "regression": Task(
        "a regression on a CSV file of one's own, scored on users that training never saw",
        ("python regression.py",),
        "mean squared error of unseen users: 0.",
        {"regression.py": REGRESSION},
        given=("users.csv",),
        at_most=12,
    ),
    "table": Task(
        "the same without Python",
        (f"{LAB} run --dataset csv:users.csv --client user --target response --model linear",),
        "last mean squared error",
        given=("users.csv",),
    ),
    "method": Task(
        "a method of one's own, over seeds, in a table for a paper",
        (
            f"{LAB} recipe own_method > mine.py",
            f"{LAB} run --algorithm mine:limited --option limit=0.5 --seeds 0 1 {SHORT}",
            f"{LAB} report runs --format latex",
        ),
        "limited",
    ),
    "fedexp": Task(
        "FedExP with compression, and its report",
        (
            f"{LAB} run --algorithm fedexp --compressor top_k:0.9 {SHORT}",
            f"{LAB} report runs",
        ),
        "runs/*/report.md: fedexp",
    ),
    "personal": Task(
        "a model for each client",
        (f"{LAB} run --algorithm ditto --partition classes_per_client:2 {SHORT}",),
        "own models (%)",
    ),
    "model": Task(
        "a flax model of one's own",
        (f"{LAB} run --model net:net --model-option width=16 {SHORT}",),
        "accuracy",
        {"net.py": NET},
        at_most=12,
    ),
    "figures": Task(
        "two learning rates and two seeds in one program, and a PDF figure",
        (
            f"{LAB} sweep --point client_lr=0.1,0.01 --seeds 0 1 {SHORT}",
            f"{LAB} run --seeds 0 1 --run-dir runs/fedavg {SHORT}",
            f"{LAB} report runs --figures pdf",
        ),
        "runs/**/*.pdf: ",
    ),
    "text": Task(
        "a language model on a text of one's own",
        (
            f"{LAB} run --dataset text:book.txt --tokens bytes --model transformer "
            f"--model-option width=32 --partition contiguous --num-clients 8 {SHORT}",
        ),
        "perplexity",
        given=("book.txt",),
    ),
    "processes": Task(
        "one run in two processes",
        tuple(
            f"{LAB} run --distributed --coordinator 127.0.0.1:PORT --num-processes 2 "
            f"--process-id {place} --run-dir together {SHORT}{end}"
            for place, end in ((1, " &"), (0, ""))
        ),
        "together/summary.json: accuracy",
    ),
}


def main(
    names: list[str],
    python: Path = Path(sys.executable),
    scripts: Path | None = None,
    tasks: Mapping[str, Task] = TASKS,
) -> None:
    """Do the tasks; ends with an error at the first that does not show what it should.

    Args:
      names: of tasks; none: all.
      python: of the environment in which the package is installed.
      scripts: its folder of commands. None: that of this Python.
      tasks: the tasks by name.
    """
    scripts = scripts or Path(sysconfig.get_path("scripts"))
    with tempfile.TemporaryDirectory(prefix="fedjax-lab-tasks-") as name:
        home = Path(name)
        path = os.pathsep.join([str(python.parent), str(scripts), os.defpath])
        clean = {"HOME": str(home), "PATH": path, "MPLBACKEND": "agg"}
        print(f"{'task':12} lines  seconds  processor seconds", flush=True)
        for name in names or tasks:
            seconds, processor = perform(tasks[name], home / f"task-{name}", clean)
            print(
                f"{name:12} {lines(tasks[name]):5}  {seconds:7.0f}  {processor:17.0f}", flush=True
            )


def lines(task: Task) -> int:
    """Lines that a user writes: commands, and lines of code that are not blank."""
    written = "\n".join(task.files.values()).splitlines()
    return len(task.commands) + sum(bool(line.strip()) for line in written)


def perform(task: Task, folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Do one task in a new folder; returns its seconds, and those of the processor."""
    folder.mkdir()
    for name in task.given:
        (folder / name).write_text(GIVEN[name](), encoding="utf-8")
    for name, text in task.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if (count := lines(task)) > task.at_most:
        sys.exit(f"{task.wanted}: {count} lines; at most {task.at_most} are meant")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    began, used = time.monotonic(), processor_seconds()
    script = "\n".join(["set -e", *task.commands, "wait"]).replace("PORT", port)
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True
    )
    seconds, used = time.monotonic() - began, processor_seconds() - used
    pattern, colon, text = task.shows.partition(": ")
    if "." in pattern and colon and "/" in pattern:
        found = list(folder.glob(pattern))
        right = bool(found) and (not text or text in found[0].read_text(encoding="utf-8"))
    else:
        right = task.shows in done.stdout
    if done.returncode or not right:
        sys.exit(
            f"{task.wanted}: status {done.returncode}; {task.shows!r} was to be seen after\n"
            f"{script}\n{done.stdout}{done.stderr}"
        )
    return seconds, used


def processor_seconds() -> float:
    """What all finished child processes have taken."""
    used = os.times()
    return used.children_user + used.children_system


def users() -> str:
    """A table of 25 users, whose response depends on three columns."""
    draw = random.Random(0)
    rows = ["user,age,dose,sex,response"]
    for _ in range(500):
        age, dose, sex = draw.gauss(50, 10), draw.random(), draw.choice("fm")
        response = 0.05 * age - 2 * dose + (sex == "m") + 0.1 * draw.gauss(0, 1)
        rows.append(f"u{draw.randrange(25)},{age:.1f},{dose:.3f},{sex},{response:.3f}")
    return "\n".join(rows) + "\n"


def book() -> str:
    """Some lines of text."""
    return "the cat sat on the mat\na dog ran to the red barn\nwe all saw her\n" * 100


GIVEN = {"users.csv": users, "book.txt": book}

if __name__ == "__main__":
    main(sys.argv[1:])
