"""Systems taking turns: child processes, the ratios of each turn, and the table."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from experiments.benchmarks.workloads import SEED, WORKLOADS

OURS = ("fedjax_lab", "fedjax_lab_own_cnn")
OPPONENTS = ("torch", "torch_vmap", "pfl")
SYSTEMS = (*OURS, *OPPONENTS)
ROOT = Path(__file__).parents[2]
# Compilation is measured, so nothing compiled before may be read.
CACHES = ("JAX_COMPILATION_CACHE_DIR",)


def write_data(name, folder):
    """Write a workload's examples and partition for all children; returns (path, whose they are).

    The file has ``x``, ``y``, ``x_test``, ``y_test``, ``indices`` and ``sizes``, NumPy's format.
    """
    from fedjax_lab import data
    from fedjax_lab.data.partition import split_indices

    workload, source = WORKLOADS[name], "noise"
    train, test = _noise(workload)
    if workload.dataset != "noise":
        try:
            train, test = data.load(workload.dataset)
            source = workload.dataset
        except (FileNotFoundError, ImportError):
            pass
    parts = split_indices(train.y, workload.partition, workload.num_clients, SEED)
    path = Path(folder) / f"{name}.npz"
    arrays = {"x": train.x, "y": train.y, "x_test": test.x, "y_test": test.y}
    np.savez(path, **arrays, indices=parts.indices, sizes=parts.sizes)
    return str(path), source


def _noise(workload):
    from fedjax_lab import data

    sizes = workload.num_examples, 10_000
    if not workload.is_text:
        shape, classes = workload.input_shape, workload.num_classes
        return [data.synthetic.noise_images(n, shape, classes, SEED) for n in sizes]
    rng = np.random.default_rng(SEED)
    words = [
        rng.integers(0, workload.num_classes, (n, workload.input_shape[0] + 1), dtype=np.int32)
        for n in sizes
    ]
    return [data.Examples(rows[:, :-1], rows[:, 1:]) for rows in words]


def run_child(system, job, torch_python=sys.executable, timeout=None):
    """The child's answer; if it has none, its last words as the ``status``."""
    python = torch_python if system in (*OPPONENTS, "peak_torch") else sys.executable
    command = [python, "-m", "experiments.benchmarks.child", system, json.dumps(job)]
    environment = {key: value for key, value in os.environ.items() if key not in CACHES}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"status": f"no answer in {timeout:.0f} s"}
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if ": " in line and line[0] > " "]
        told = next((line for line in reversed(errors) if "Error" in line), "")
        return {"status": f"failed: {told[:200] or f'exit status {done.returncode}'}"}
    return json.loads(done.stdout.splitlines()[-1])


def take_turns(plan, systems, repeats, child, seconds=None, say=print):
    """Answers of all children: repeat after repeat, all workloads, all systems in turn.

    Args:
      plan: {workload: job}.
      systems: {workload: names}, in the order of their turns.
      repeats: how many sweeps.
      child: ``(system, job, timeout) -> answer``.
      seconds: no process is started after so many; None: no limit.
      say: gets one line for each answer.

    Returns:
      {workload: {system: [answer]}}; a system that has given a status for a workload is not asked
      again, and one that is not installed for none.
    """
    answers = {name: {system: [] for system in systems[name]} for name in plan}
    missing = {}
    began = time.perf_counter()
    for repeat in range(repeats):
        for name, job in plan.items():
            for system, given in answers[name].items():
                if any("status" in answer for answer in given):
                    continue
                if system in missing:
                    given.append(missing[system])
                    continue
                left = None if seconds is None else seconds - (time.perf_counter() - began)
                if left is not None and left < 5:
                    given.append({"status": "no time was left"})
                    continue
                given.append(child(system, job, left))
                told = given[-1].get("status")
                if told and told.startswith("not installed"):
                    missing[system] = given[-1]
                told = told or f"{1e3 * sample_of(given[-1]):.1f} ms a round"
                say(f"{name} {system} {repeat + 1}/{repeats}: {told}")
    return answers


def sample_of(answer):
    """Seconds per round of one process: the median of its samples."""
    return float(np.median(answer["seconds_per_round"]))


def ratios(times):
    """(median, lowest, highest) ratio of each system to the best opponent.

    ``times`` is {system: seconds [repeats]}. The best opponent is the one with the smallest
    median; a ratio is its time divided by that of the system in the same repeat, so that more is
    faster. Repeats that not both have finished do not count. Without opponents: {system: None}.
    """
    medians = {name: np.median(found) for name, found in times.items() if name in OPPONENTS}
    if not medians:
        return dict.fromkeys(times)
    best = times[min(medians, key=medians.__getitem__)]
    found = {}
    for name, own in times.items():
        each = [theirs / mine for theirs, mine in zip(best, own, strict=False)]
        found[name] = float(np.median(each)), min(each), max(each)
    return found


def rows_of(name, source, answers, peak):
    """One dict per system of a workload; what was not measured is None and has its status."""
    workload = WORKLOADS[name]
    good = {
        system: [answer for answer in given if "status" not in answer]
        for system, given in answers.items()
    }
    times = {system: [sample_of(a) for a in given] for system, given in good.items() if given}
    compared = ratios(times)
    rows = []
    for system, given in answers.items():
        status = "measured" if good[system] else given[-1]["status"]
        row = {"workload": name, "system": system, "title": workload.title, "data": source}
        row |= dict.fromkeys(MEASURED) | {"status": status, "repeats": len(good[system])}
        if system in times:
            seconds = float(np.median(times[system]))
            compile_seconds = [answer["compile_seconds"] for answer in good[system]]
            ratio, low, high = compared[system] or (None, None, None)
            row |= {
                "samples_per_second": workload.samples_per_round / seconds,
                "ratio_to_best_opponent": ratio,
                "ratio_low": low,
                "ratio_high": high,
                "seconds_per_round": seconds,
                "compile_seconds": None
                if None in compile_seconds
                else float(np.median(compile_seconds)),
                "peak_bytes": max(a["peak_bytes"] or 0 for a in good[system]) or None,
                "share_of_peak": workload.flop_per_round / seconds / peak if peak else None,
                "device": good[system][0]["device"],
                "versions": good[system][0]["versions"],
                "seconds_per_round_of_repeats": times[system],
            }
        rows.append(row)
    return rows


MEASURED = (
    "samples_per_second",
    "ratio_to_best_opponent",
    "ratio_low",
    "ratio_high",
    "seconds_per_round",
    "compile_seconds",
    "peak_bytes",
    "share_of_peak",
    "device",
    "versions",
    "seconds_per_round_of_repeats",
)
COLUMNS = (
    "workload",
    "system",
    "samples/s",
    "times the best opponent",
    "ms a round",
    "compile s",
    "GEMM peak",
    "peak MB",
)


def table(rows):
    """The rows as Markdown; a system without a measurement in a line of its own."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    for row in rows:
        cells = [row["workload"], row["system"]]
        if row["status"] != "measured":
            cells += [row["status"].replace("|", "/"), *[""] * (len(COLUMNS) - 3)]
        else:
            ratio = "-"
            if row["ratio_to_best_opponent"] is not None:
                ratio = f"{row['ratio_to_best_opponent']:.2f}"
                ratio += f" ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
            cells += [
                f"{row['samples_per_second']:,.0f}",
                ratio,
                f"{1e3 * row['seconds_per_round']:.1f}",
                _cell(row["compile_seconds"], "{:.1f}"),
                _cell(row["share_of_peak"], "{:.1%}"),
                _cell(row["peak_bytes"] and row["peak_bytes"] / 1e6, "{:,.0f}"),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value, form):
    return "-" if value is None else form.format(value)
