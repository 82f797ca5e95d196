"""One sample in a process of its own: a job as JSON in, one line of JSON out.

    python -m experiments.benchmarks.child SYSTEM JOB

The job names the ``workload``, the file of its ``data``, ``rounds`` (of a sample), ``samples``,
whether to ``evaluate`` at the end of each, and ``max_seconds``, after which an opponent stops
early. The answer has ``milliseconds`` a round, a list over the samples without the first call,
``compile_seconds`` or None, ``peak_bytes``, ``device``, ``threads`` (None on an accelerator) and
``versions``; or only a ``status``: why there is no measurement.

Imports neither jax nor torch itself, so that each may be missing.
"""

import importlib
import json
import resource
import sys
import time

MODULES = {
    "fedjax_lab": "ours",
    "fedjax_lab_own_cnn": "ours",
    "torch": "torch_loop",
    "torch_vmap": "torch_vmap",
    "pfl": "pfl_loop",
    "peak_jax": "ours",
    "peak_torch": "torch_models",
    "zoo": "zoo",
    "zoo_lax": "zoo",
    "zoo_torch": "torch_zoo",
}
PEAK_SIZE, PEAK_REPEATS = 2048, 20


class Unsupported(Exception):
    """The system cannot run the workload; the message says why."""


def samples(run_rounds, job):
    """Milliseconds a round of each sample; ``run_rounds()`` runs one and waits for its end."""
    run_rounds()  # what happens once: allocation, the choice of algorithms
    times, began = [], time.perf_counter()
    for _ in range(job["samples"]):
        before = time.perf_counter()
        run_rounds()
        now = time.perf_counter()
        times.append(1e3 * (now - before) / job["rounds"])
        if now - began > job["max_seconds"]:
            break
    return times


def peak_flops(multiply):
    """Operations per second of the fastest of a few square products; ``multiply()`` waits."""
    multiply()
    best = float("inf")
    for _ in range(PEAK_REPEATS):
        before = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - before)
    return 2 * PEAK_SIZE**3 / best


def max_resident_bytes():
    """The largest resident set of this process."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def main():
    """Answer one job."""
    system, job = sys.argv[1], json.loads(sys.argv[2])
    try:
        module = importlib.import_module(f"experiments.benchmarks.{MODULES[system]}")
        answer = module.peak() if system.startswith("peak") else module.run(system, job)
    except ModuleNotFoundError as error:
        answer = {"status": f"not installed: {error.name}"}
    except Unsupported as error:
        answer = {"status": f"not possible: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    # ``python -m`` runs this file as __main__; the systems raise the Unsupported of its module.
    from experiments.benchmarks import child

    child.main()
