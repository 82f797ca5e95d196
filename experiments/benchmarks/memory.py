"""Peak memory of FedAvg on W3 (MLP, 1,000 clients) as the cohort grows, each in its own process.

"Process" is the largest resident set (on a GPU the most that was allocated there), "above the
start" leaves out what was there before the first round: the interpreter, the data, the model.
"Temporary" and "arguments" are what XLA says of the compiled rounds.

    python -m experiments.benchmarks.memory [--cohorts 10 100 1000] [--rounds 5]
"""

import argparse
import dataclasses
import json
import subprocess
import sys

from experiments.benchmarks.compare import ROOT
from experiments.benchmarks.workloads import WORKLOADS


def measure(cohort_size, rounds):
    """Bytes of one run in this process, by the names of the table's columns."""
    import jax

    from experiments.benchmarks import ours
    from experiments.benchmarks.rounds import Rounds
    from fedjax_lab import simulate
    from fedjax_lab.data.cohort import Schedule

    workload = dataclasses.replace(WORKLOADS["W3"], cohort_size=cohort_size)
    clients, model, params = ours.on_noise("W3")
    algorithm = ours.build_algorithm(workload, model)
    jax.block_until_ready(params)
    before = ours.about_device()["peak_bytes"]
    schedule = ours.schedule_of(workload)
    simulate(algorithm, params, clients, rounds=rounds, eval_every=rounds, **schedule)
    after = ours.about_device()["peak_bytes"]

    compiled = Rounds(algorithm, params, clients, Schedule(**schedule), rounds).memory
    return {
        "process": after,
        "above the start": after - before,
        "temporary": compiled.temp_size_in_bytes,
        "arguments": compiled.argument_size_in_bytes,
    }


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--here", action="store_true", help="measure one cohort in this process")
    given = parser.parse_args(arguments)
    if given.here:
        print(json.dumps(measure(given.cohorts[0], given.rounds)))
        return
    columns = ("process", "above the start", "temporary", "arguments")
    print(f"| cohort | {' | '.join(f'{name}, MB' for name in columns)} |")
    print("|---:|" + "---:|" * len(columns))
    for cohort in given.cohorts:
        command = [sys.executable, "-m", "experiments.benchmarks.memory", "--here"]
        command += ["--rounds", str(given.rounds), "--cohorts", str(cohort)]
        out = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(out.stdout.splitlines()[-1])
        cells = [f"{found[name] / 1e6:,.1f}" for name in columns]
        print(f"| {cohort} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
