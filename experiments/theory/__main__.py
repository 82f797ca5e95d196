"""Measure what the papers' convergence theorems predict, and write RESULTS.md.

Finished measurements are stored in ``experiments/theory/results.json`` and not run again.

    python -m experiments.theory [--only NAME ...] [--seeds 1 2 ...]
    python -m experiments.theory --smoke    # two points and two seeds, which stores nothing
    python -m experiments.theory --report   # write the page from what is stored
"""

import argparse
import json
import time
from pathlib import Path

from experiments.theory.measure import SEEDS
from experiments.theory.report import rows, write
from experiments.theory.theorems import MEASUREMENTS, measure
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import markdown_table

STORED = Path(__file__).parent / "results.json"


def main(arguments=None):
    """Run what is not stored yet, and report what is."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.theory", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", choices=list(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    kept = {}
    if STORED.exists() and not given.smoke:
        kept = json.loads(STORED.read_text(encoding="utf-8"))
    for name in [] if given.report else given.only:
        if name in kept:
            continue
        values, seeds = MEASUREMENTS[name].values, given.seeds
        if given.smoke:
            values, seeds = values[:2], seeds[:2]
        began = time.perf_counter()
        found = measure(name, values, seeds)
        found["seconds"] = round(time.perf_counter() - began, 1)
        print(f"{name}, {found['seconds']} s\n{markdown_table(rows(found, name))}\n", flush=True)
        if not given.smoke:
            kept[name] = found
            write_text(STORED, json.dumps(kept, indent=1) + "\n")
    if not given.smoke:
        write(kept)


if __name__ == "__main__":
    main()
