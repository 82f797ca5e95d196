"""Six rules and the mean under five attacks, with none to 30 % of attackers, on Fashion-MNIST.

What is finished is kept in ``experiments/robustness/results/robustness.json`` and not run again;
RESULTS.md and its figure are of all that it holds.

    python -m experiments.robustness [--rules R ...] [--attacks A ...] [--seeds 0 1 2 3 4]
    python -m experiments.robustness --smoke    # the smallest one, which keeps nothing
    python -m experiments.robustness --report
"""

import argparse
import json
from pathlib import Path

from experiments.robustness.report import attacks_of, table, write
from experiments.robustness.study import ATTACKS, MACHINE, NONE, RULES, SMOKE, place, problem, run
from fedjax_lab.machine.atomic_files import write_text

KEPT = Path(__file__).parent / "results" / "robustness.json"


def main(arguments=None):
    """Run what is not there yet, and report what is."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.robustness", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    scale = SMOKE if given.smoke else MACHINE
    kept = {}
    if KEPT.exists() and not given.smoke:
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
    asked = [(rule, attack) for attack in (NONE, *given.attacks) for rule in given.rules]
    missing = [] if given.report else [pair for pair in asked if place(*pair) not in kept]
    setting = problem(scale) if missing else ()
    for pair in missing:
        kept[place(*pair)] = run(*pair, scale, given.seeds, *setting)
        print(f"{place(*pair)}: {kept[place(*pair)]}", flush=True)
        if not given.smoke:
            KEPT.parent.mkdir(exist_ok=True)
            write_text(KEPT, json.dumps(kept, indent=1, sort_keys=True) + "\n")
    for attack in attacks_of(kept):
        print(f"{attack}\n{table(kept, attack)}")
    if not given.smoke:
        write(kept)


if __name__ == "__main__":
    main()
