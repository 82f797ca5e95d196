"""One sample in a process of its own: a job as JSON in, one line of JSON out.

    python -m experiments.benchmarks.child SYSTEM JOB

The job names the ``workload``, the file of its ``data``, ``rounds`` (of a sample), ``samples``,
``max_seconds``, after which an opponent stops early, and where they are not the default the
``precision`` of products, PyTorch's ``threads`` and our ``method``. The answer has
``milliseconds`` a round, a list over the samples without the first call, ``first_row_seconds``
from the start of the process to the end of the first call, ``compile_seconds`` or None,
``test_loss`` of the last model on the first ``CHECKED`` test examples, ``peak_bytes``,
``device``, ``threads`` (None on an accelerator) and ``versions``; or only a ``status``: why there
is no measurement.

Imports neither jax nor torch itself, so that each may be missing.
"""

import importlib
import json
import resource
import sys
import time

STARTED = time.perf_counter()
MODULES = {
    "fedjax_lab": "ours",
    "fedjax_lab_own_cnn": "ours",
    "fedjax": "opponents.fedjax",
    "flower": "opponents.flower",
    "fedlab": "opponents.fedlab",
    "pfl": "opponents.pfl",
    "pfl_processes": "opponents.pfl",
    "torch": "opponents.torch_loop",
    "torch_compiled": "opponents.torch_loop",
    "torch_processes": "opponents.torch_processes",
    "torch_vmap": "opponents.torch_vmap",
    "torch_vmap_compiled": "opponents.torch_vmap",
    "pfl_benchmark": "pfl_benchmark",
    "pfl_benchmark_of_pfl": "pfl_benchmark",
    "peak_jax": "ours",
    "peak_torch": "torch_models",
    "zoo": "zoo",
    "zoo_lax": "zoo",
    "zoo_torch": "torch_zoo",
}
CHECKED = 500
PEAK_SIZE, PEAK_REPEATS = 2048, 20


class Unsupported(Exception):
    """The system cannot run the workload; the message says why."""


def timed(run_rounds, job):
    """``milliseconds`` and ``first_row_seconds`` of the answer.

    Args:
      run_rounds: ``run_rounds()`` runs the rounds of one sample and waits for their end.
      job: see above.
    """
    run_rounds()  # what happens once: allocation, compilation, the choice of algorithms
    times, began = [], time.perf_counter()
    first = began - STARTED
    for _ in range(job["samples"]):
        before = time.perf_counter()
        run_rounds()
        now = time.perf_counter()
        times.append(1e3 * (now - before) / job["rounds"])
        if now - began > job["max_seconds"]:
            break
    return {"milliseconds": times, "first_row_seconds": first}


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
