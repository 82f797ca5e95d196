"""Measurements on one GPU, the most useful first; each is written as soon as it is there.

    python -m experiments.benchmarks.gpu [--minutes 9] [--rows FILE] [--before FOLDER] [--parts P]
    python -m experiments.benchmarks.gpu --table [--rows FILE]
    python -m experiments.benchmarks.gpu --platform cpu

A row that is in the file for this card is not measured again, so that the command goes on where
the time ended; one of a system that was not installed is. ``--before`` is a checkout of an earlier
version (``git worktree add FOLDER COMMIT``): both versions take turns in part "before".
``--platform cpu`` runs every part once on the smallest workload, to see that it works.

Parts: "rounds" (all systems, first repeats first), "gradma" (its round as a multiple of FedAvg's),
"before", "command buffers" (XLA's CUDA graphs: none, and as much as possible, loops included),
"autotuning" (XLA's search for the best kernels: off, and its level 1), "precision", and "whole"
(pfl-research's benchmark of 1,500 rounds). Every row is a process of its own.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from experiments.benchmarks import pfl_benchmark
from experiments.benchmarks.compare import (
    FRESH,
    OPPONENTS,
    ROOT,
    commit,
    ratios,
    run_child,
    run_module,
    sample_of,
    spread,
    write_data,
)
from experiments.benchmarks.workloads import WORKLOADS, layers

ROWS = Path("build/gpu.jsonl")
MAX_SECONDS = 4.0  # after which an opponent's process takes no more samples
LIMIT = 150.0  # seconds of a process, but of a whole run
FIRST, LATER = ("W3", "W1s", "W1", "W5"), ("W2", "W6s", "W4")
BUFFERS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "on": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
    "WHILE --xla_gpu_graph_min_graph_size=1",
}
AUTOTUNING = {"off": "--xla_gpu_autotune_level=0", "level 1": "--xla_gpu_autotune_level=1"}


@dataclasses.dataclass(frozen=True)
class Task:
    """A row to be.

    Attributes:
      part: of the table.
      workload, system, repeat: as in ``compare``; the system is a command's name in part "gradma".
      option: what differs from the default, as it is shown.
      changes: of the job.
      flags: of XLA.
      is_before: whether the earlier version runs.
    """

    part: str
    workload: str
    system: str = "fedjax_lab"
    repeat: int = 0
    option: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    flags: str = ""
    is_before: bool = False

    @property
    def key(self):
        """What names its row."""
        parts = self.part, self.workload, self.system, str(self.repeat), self.option
        return " | ".join((*parts, "before") if self.is_before else parts)


def tasks(has_before):
    """All rows, the most useful first."""
    vmap, compiled, loop = "torch_vmap", "torch_vmap_compiled", "torch"
    found = [Task("rounds", name, system) for name in FIRST for system in ("fedjax_lab", vmap)]
    found += [Task("gradma", "W3")]
    found += [Task("rounds", name) for name in LATER]
    if has_before:
        both = (True, False)
        found += [
            Task("before", name, is_before=is_before)
            for name in (*FIRST, "W6s", "W2")
            for is_before in both
        ]
        found += [Task("gradma", "W3", repeat=1, is_before=is_before) for is_before in both]
    found += [
        Task("command buffers", name, option=option, flags=flags)
        for name in ("W1s", "W3", "W6s")
        for option, flags in BUFFERS.items()
    ]
    found += [
        Task("autotuning", "W3", option=f"{method}, {option}", changes=changes, flags=flags)
        for method in ("fedavg", "gradma")
        for option, flags in {"default": "", **AUTOTUNING}.items()
        for changes in [(("method", method),)]
    ]
    found += [Task("rounds", name, compiled) for name in FIRST]
    found += [
        Task("rounds", name, system, repeat)
        for repeat in (1, 2)
        for name in FIRST
        for system in ("fedjax_lab", vmap, compiled)
    ]
    found += [
        Task("precision", name, system, option=precision, changes=(("precision", precision),))
        for name in FIRST
        for precision in ("float32", "bfloat16")
        for system in ("fedjax_lab", vmap)
    ]
    found += [Task("whole", "W5", system) for system in pfl_benchmark.SYSTEMS]
    found += [Task("rounds", name, system) for name in FIRST for system in (loop, "pfl")]
    found += [Task("rounds", name, system) for name in LATER for system in (vmap, loop)]
    found += [Task("rounds", name, vmap, 1) for name in LATER]
    return found


# --- The card's least time


@dataclasses.dataclass(frozen=True)
class Card:
    """Peaks of a card: bytes and operations (dense products) a second."""

    bandwidth: float
    float32: float
    tf32: float
    bfloat16: float


CARDS = {
    "H200": Card(4.8e12, 67e12, 494e12, 989e12),
    "H100": Card(3.35e12, 67e12, 494e12, 989e12),
    "A100": Card(2.04e12, 19.5e12, 156e12, 312e12),
}


def least_seconds(name, device, precision="tf32"):
    """The least time of a round of FedAvg on a card; None for a card that is not in the table.

    The larger of operations / peak and bytes / bandwidth. Operations are those of the products.
    Bytes, in each local step: the float32 weights of every client of the cohort are read twice
    (forward, backward) and written once; every example and every layer's result is moved once, in
    bfloat16 with half the bytes. Elementwise work is fused and costs nothing; gradients, sums over
    clients and the server cost nothing either.
    """
    card = next((card for known, card in CARDS.items() if known in device), None)
    if card is None:
        return None
    workload = WORKLOADS[name]
    costs = [*layers(workload)]
    weights = sum(layer.weights for layer in costs) * workload.cohort_size * workload.local_steps
    numbers = sum(layer.outputs for layer in costs) + int(np.prod(workload.input_shape))
    width = 2 if precision == "bfloat16" else 4
    moved = 3 * 4 * weights + width * numbers * workload.samples_per_round
    return max(workload.flop_per_round / getattr(card, precision), moved / card.bandwidth)


# --- Rows


def card_name(platform):
    """What ``nvidia-smi`` calls the first card; "cpu" without one."""
    if platform == "cpu":
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def measure(task, data, timeout, variables, before):
    """The answer of a task's process."""
    root = before if task.is_before else ROOT
    variables = {**variables, "XLA_FLAGS": task.flags or None}
    if task.part == "autotuning":
        variables |= FRESH
    if task.part == "gradma":
        return run_methods(task.workload, timeout, variables, root)
    path = data(task.workload if task.part != "whole" else "whole")
    if task.part == "whole":
        rounds = 10 if task.workload == "W0" else 1500
        job = {"data": path, "rounds": rounds, "seed": 0}
    else:
        rounds, samples = WORKLOADS[task.workload].gpu
        job = {"workload": task.workload, "data": path, "rounds": rounds, "samples": samples}
        # "evaluate" is for earlier versions.
        job |= {"max_seconds": MAX_SECONDS, "evaluate": False, **dict(task.changes)}
    return run_child(task.system, job, timeout, variables=variables, root=root)


def run_methods(workload, timeout, variables, root):
    """``ratio`` of GradMA's round to FedAvg's, (median and range), as ``methods`` shows it."""
    arguments = ["experiments.benchmarks.methods", "--workload", workload]
    arguments += ["--methods", "gradma", "--repeats", "3"]
    status, lines = run_module(sys.executable, arguments, timeout, variables, root)
    rows = [line for line in lines if line.startswith("| gradma")]
    return {"ratio": rows[0].split("|")[3].strip()} if rows else {"status": status}


def read(path):
    """The rows of a file, the last one of each key; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [*{(row["card"], row["key"]): row for row in rows}.values()]


def table(rows):
    """All rows of one card as Markdown."""
    device = rows[0]["card"]
    times, shown = {}, []
    for row in rows:
        if row["task"]["part"] == "rounds" and "milliseconds" in row:
            of = times.setdefault(row["task"]["workload"], {})
            of.setdefault(row["task"]["system"], {})[row["task"]["repeat"]] = sample_of(row)
    lines = [
        "| part | workload | system | option | ms a round | times the best opponent | least ms "
        "| our share | first row s | peak MB |",
        "|---|---|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        task = row["task"]
        name, system, option = task["workload"], task["system"], task["option"]
        kind = task["part"], name, system, option, task["is_before"]
        if kind in shown and task["part"] == "rounds":
            continue
        shown.append(kind)
        label = OPPONENTS[system][0] if system in OPPONENTS else system
        label += ", before" if task["is_before"] else ""
        cells = [task["part"], name, label, option]
        if "milliseconds" not in row:
            told = row.get("status") or row.get("ratio") or f"{row['seconds']:.1f} s in all"
            lines.append(f"| {' | '.join([*cells, told, '', '', '', '', ''])} |")
            continue
        seconds, ratio = sample_of(row), "-"
        if task["part"] == "rounds":
            seconds = float(np.median([*times[name][system].values()]))
            ratio = spread(ratios(times[name])[system])
        changes = dict(map(tuple, task["changes"]))
        least = None
        if changes.get("method", "fedavg") == "fedavg":
            least = least_seconds(name, device, changes.get("precision", "tf32"))
        cells += [
            f"{1e3 * seconds:.2f}",
            ratio,
            f"{1e3 * least:.2f}" if least else "-",
            f"{least / seconds:.0%}" if least else "-",
            f"{row['first_row_seconds']:.1f}" if "first_row_seconds" in row else "-",
            f"{row['peak_bytes'] / 1e6:,.0f}" if row["peak_bytes"] else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments=None):
    """Measure what is missing; print each row, and the table in the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="in all")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--parts", nargs="+", help="only these, such as whole")
    parser.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--table", action="store_true", help="only print it")
    given = parser.parse_args(arguments)
    end = time.perf_counter() + 60 * given.minutes
    card = card_name(given.platform) if not given.table else None
    there = {
        (row["card"], row["key"])
        for row in read(given.rows)
        if not row.get("status", "").startswith("not installed")
    }
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    variables = {"JAX_COMPILATION_CACHE_DIR": None}
    todo = [] if given.table else tasks(given.before)
    if given.platform == "cpu":
        variables |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        todo = [*dict.fromkeys(dataclasses.replace(task, workload="W0") for task in todo)]
    with tempfile.TemporaryDirectory() as folder, open(given.rows, "a", encoding="utf-8") as file:
        paths = {}
        variables["FEDJAX_LAB_PROGRAMS"] = str(Path(folder) / "programs")

        def data(name):
            if name not in paths:
                written = pfl_benchmark.write_data(folder) if name == "whole" else None
                paths[name], _ = written or write_data(name, folder)
            return paths[name]

        for task in todo:
            left = end - time.perf_counter()
            if left < 10:
                print("the time is over; call again to go on", flush=True)
                break
            if (card, task.key) in there or (given.parts and task.part not in given.parts):
                continue
            limit = left if task.part == "whole" else min(left, LIMIT)
            answer = measure(task, data, limit, variables, given.before)
            if time.perf_counter() > end:
                break  # cut off by the end, not by itself
            about = {"card": card, "key": task.key, "commit": commit()}
            file.write(json.dumps({**about, "task": dataclasses.asdict(task), **answer}) + "\n")
            file.flush()
            told = answer.get("status") or answer.get("ratio") or answer.get("seconds")
            print(f"{task.key}: {told or answer['milliseconds']}", flush=True)
    rows = read(given.rows)
    for device in dict.fromkeys(row["card"] for row in rows):
        print(f"\n{device}\n\n{table([row for row in rows if row['card'] == device])}")


if __name__ == "__main__":
    main()
