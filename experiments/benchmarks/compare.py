"""Systems taking turns: child processes, what they measured, the ratios of each turn.

What was measured is one value of JSON, from which all tables, figures and sentences are made:
``workloads`` is workload -> ``data``, ``samples_per_round``, ``flop_per_round`` and ``systems``:
system -> the answers of its processes, one for each repeat. ``machine``, ``commit``, ``command``,
``load`` and ``gemm_gflops`` say where, of what and how.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from experiments.benchmarks.workloads import SEED, WORKLOADS

OURS = ("fedjax_lab", "fedjax_lab_own_cnn")
# System -> (its name in tables, the environment of ``make bench-opponents`` that it runs in).
OPPONENTS = {
    "fedjax": ("FedJAX", "fedjax"),
    "flower": ("Flower", "flower"),
    "fedlab": ("FedLab", "fedlab"),
    "pfl": ("pfl", "pfl"),
    "pfl_processes": ("pfl, processes", "pfl"),
    "torch": ("PyTorch loop", "torch"),
    "torch_processes": ("loop, processes", "torch"),
    "torch_compiled": ("loop, `torch.compile`", "torch"),
    "torch_vmap": ("`torch.func.vmap`", "torch"),
    "torch_vmap_compiled": ("`vmap`, `torch.compile`", "torch"),
}
SYSTEMS = (*OURS, *OPPONENTS)
ENVIRONMENTS = {system: name for system, (_, name) in OPPONENTS.items()}
ENVIRONMENTS |= {"peak_torch": "torch", "zoo_torch": "torch", "pfl_benchmark_of_pfl": "pfl"}
ROOT = Path(__file__).parents[2]
SLOW = 1.25
# Compilation is measured, so nothing compiled before may be read.
FRESH = {"JAX_COMPILATION_CACHE_DIR": None, "FEDJAX_LAB_PROGRAMS": "off"}


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


def interpreter(environment):
    """The Python of one of the environments, this one where that has not been installed."""
    python = ROOT / ".venv" / f"opponents-{environment}" / "bin" / "python"
    return str(python) if environment and python.exists() else sys.executable


def run_child(system, job, timeout=None, *, variables=FRESH, root=ROOT):
    """The child's answer; if it has none, its last words as the ``status``.

    Args:
      system, job: see ``child``.
      timeout, variables, root: see ``run_module``.
    """
    python = interpreter(ENVIRONMENTS.get(system))
    arguments = ["experiments.benchmarks.child", system, json.dumps(job)]
    status, lines = run_module(python, arguments, timeout, variables, root)
    return {"status": status} if status else json.loads(lines[-1])


def run_module(python, arguments, timeout, variables, root):
    """(why it failed, or None; the lines that it printed) of ``python -m`` with arguments.

    Args:
      python: an interpreter.
      arguments: name of the module, and what it is told.
      timeout: seconds; None: no limit.
      variables: of the environment; None removes one.
      root: the checkout whose code runs.
    """
    environment = {**os.environ, **variables, "PYTHONPATH": str(root)}
    environment = {key: value for key, value in environment.items() if value is not None}
    about = {"cwd": root, "env": environment, "timeout": timeout}
    try:
        done = subprocess.run([python, "-m", *arguments], capture_output=True, text=True, **about)
    except subprocess.TimeoutExpired:
        return f"no answer in {timeout:.0f} s", []
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if ": " in line and line[0] > " "]
        told = next((line for line in reversed(errors) if "Error" in line), "")
        return f"failed: {told[:200] or f'exit status {done.returncode}'}", []
    return None, done.stdout.splitlines()


def take_turns(plan, systems, repeats, child, seconds=None, say=print, before=None):
    """Answers of all children: repeat after repeat, all workloads, all systems in turn.

    An opponent that took more than ``SLOW`` times as long as the best one in the first repeat has
    no further turn, because no ratio to the best opponent depends on it.

    Args:
      plan: {workload: job}.
      systems: {workload: names}, in the order of their turns.
      repeats: how many sweeps.
      child: ``(system, job, timeout) -> answer``.
      seconds: no process is started after so many; None: no limit.
      say: ``(line, answers)``, called after each answer with those until then.
      before: answers of an earlier call, which count as its first repeats; None: there are none.

    Returns:
      {workload: {system: [answer]}}; a system that has given a status for a workload is not asked
      again, and one that is not installed for none.
    """
    answers = {}
    for name in plan:
        earlier = (before or {}).get(name, {})
        answers[name] = {
            system: [*earlier.get(system, ())] for system in (*systems[name], *earlier)
        }
    missing = {}
    began = time.perf_counter()
    for repeat in range(repeats):
        for name, job in plan.items():
            first = {system: times[0] for system, times in times_of(answers[name]).items()}
            best = min((first[system] for system in OPPONENTS if system in first), default=0)
            for system in systems[name]:
                given = answers[name][system]
                if len(given) > repeat or any("status" in answer for answer in given):
                    continue
                if repeat and system in OPPONENTS and first[system] > SLOW * best:
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
                say(f"{name} {system} {repeat + 1}/{repeats}: {told}", answers)
    return answers


def sample_of(answer):
    """Seconds per round of one process: the median of its samples."""
    return float(np.median(answer["milliseconds"])) / 1e3


def times_of(answers):
    """{system: {repeat: seconds per round}} of those that measured something."""
    found = {
        system: {i: sample_of(a) for i, a in enumerate(given) if "status" not in a}
        for system, given in answers.items()
    }
    return {system: times for system, times in found.items() if times}


def ratios(times, opponents=OPPONENTS):
    """{system: (median, lowest, highest) ratio to the best opponent of each repeat}.

    ``times`` is {system: {repeat: seconds}}. In each repeat the best opponent is the one with the
    smallest time; a ratio is its time over that of the system in the same repeat, so that more is
    faster. Repeats in which no opponent has finished do not count; without any: {system: None}.
    """
    each = [times[name] for name in opponents if name in times]
    found = {}
    for name, own in times.items():
        values = [
            min(other[i] for other in each if i in other) / mine
            for i, mine in own.items()
            if any(i in other for other in each)
        ]
        found[name] = (float(np.median(values)), min(values), max(values)) if values else None
    return found


def measured(names, sources, answers, **about):
    """The value that is stored; ``about`` adds to it, or replaces what it says of the machine."""
    workloads = {}
    for name in names:
        workload = WORKLOADS[name]
        workloads[name] = {
            "data": sources[name],
            "samples_per_round": workload.samples_per_round,
            "flop_per_round": workload.flop_per_round,
            "systems": answers[name],
        }
    return {"machine": machine(), "commit": commit(), **about, "workloads": workloads}


def machine():
    """{"processor", "cores", "memory_gib"} of this one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": named[0] if named else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
    }


def commit():
    """Git's name of the measured code, "+" if it was changed since; None outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def peak_of(found):
    """The fastest product's operations per second; None if none was measured."""
    rates = [rate for each in found["gemm_gflops"] for rate in each.values()]
    return 1e9 * max(rates) if rates else None


def spread(ratio):
    """Such as "1.29 (1.24 to 1.32)"; a ratio without a range, as of one repeat, alone."""
    if ratio is None:
        return "-"
    middle, lowest, highest = ratio
    shown = f"{middle:.2f}"
    return shown if lowest == highest else f"{shown} ({lowest:.2f} to {highest:.2f})"
