"""Run the study of Shakespeare's roles, and write RESULTS.md.

Finished cells are stored in ``experiments/natural/results.json`` and not run again. The texts are
downloaded to ``runs/shakespeare``, once.

    python -m experiments.natural [--folder FOLDER]
    python -m experiments.natural --smoke --folder FOLDER    # a few rounds, which stores nothing
    python -m experiments.natural --report                   # write the page from what is stored
"""

import argparse
import json
from pathlib import Path

from experiments.natural.report import write
from experiments.natural.runs import SEEDS, SMOKE, Scale, cells
from fedjax_lab.data import shakespeare
from fedjax_lab.machine.atomic_files import write_text

STORED = Path(__file__).parent / "results.json"


def main(arguments=None):
    """Run what is not stored yet, and report what is."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.natural", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/shakespeare"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    kept = {}
    if STORED.exists() and not given.smoke:
        kept = json.loads(STORED.read_text(encoding="utf-8"))
    if not given.report:
        if not given.smoke:
            shakespeare.fetch(given.folder)
        scale, seeds = (SMOKE, SEEDS[:1]) if given.smoke else (Scale(), SEEDS)
        for name, cell in cells(given.folder, scale, kept, seeds):
            ends = [values[-1] for values in cell["accuracy"].values()]
            shown = ", ".join(f"{value:.1f} %" for value in ends)
            print(f"{name}: client_lr {cell['client_lr']:.3g}, {shown}", flush=True)
            kept[name] = cell
            if not given.smoke:
                write_text(STORED, json.dumps(kept, indent=1) + "\n")
    if not given.smoke:
        write(kept)


if __name__ == "__main__":
    main()
