"""Accuracy against epsilon on Fashion-MNIST: FedAvg, FedAdam, CFedAvg and DP-FTRL.

What is finished is kept in ``experiments/privacy/results/privacy.json`` and not run again;
RESULTS.md and its figure are of all that it holds.

    python -m experiments.privacy [--methods M ...] [--seeds 0 1 2 3 4]
    python -m experiments.privacy --smoke    # the smallest one, which keeps nothing
    python -m experiments.privacy --report
"""

import argparse
import json
from pathlib import Path

from experiments.privacy.report import table, write
from experiments.privacy.study import MACHINE, METHODS, SMOKE, run
from fedjax_lab.machine.atomic_files import write_text

KEPT = Path(__file__).parent / "results" / "privacy.json"


def main(arguments=None):
    """Run what is not there yet, and report what is."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.privacy", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    scale = SMOKE if given.smoke else MACHINE
    kept = {}
    if KEPT.exists() and not given.smoke:
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
    missing = [] if given.report else [name for name in given.methods if name not in kept]
    for name in missing:
        kept[name] = run(METHODS[name], scale, given.seeds)
        if not given.smoke:
            KEPT.parent.mkdir(exist_ok=True)
            write_text(KEPT, json.dumps(kept, indent=1) + "\n")
    if not given.smoke:
        write(kept)
    print(table(kept))


if __name__ == "__main__":
    main()
