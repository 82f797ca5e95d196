"""Run the study of Shakespeare's roles, and write RESULTS.md.

Finished cells are stored in ``experiments/natural/results.json``, ``methods.json`` and
``published.json``, and not run again. The texts are downloaded to ``runs/shakespeare``, once.

    python -m experiments.natural [--folder FOLDER] [--part divisions | methods | published]
    python -m experiments.natural --part methods --cells gradma fedswa --seeds 11 ... 20
    python -m experiments.natural --smoke --folder FOLDER    # a few rounds, which stores nothing
    python -m experiments.natural --report                   # write the page from what is stored
"""

import argparse
import json
from pathlib import Path

from experiments.natural.methods import METHODS
from experiments.natural.methods import cells as method_cells
from experiments.natural.published import PUBLISHED
from experiments.natural.published import cells as published_cells
from experiments.natural.report import FILES, ROLES, stored, write
from experiments.natural.runs import SEEDS, SMOKE, Scale, cells
from fedjax_lab.data import shakespeare
from fedjax_lab.machine.atomic_files import write_text

RUNS = Path("runs/natural")


def main(arguments=None):
    """Run what is not stored yet, and report what is."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.natural", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/shakespeare"))
    parser.add_argument("--part", choices=tuple(FILES), help="run this part alone")
    parser.add_argument("--cells", nargs="+", metavar="C", help="of a part; all by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="of the final runs")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    kept = {part: {} for part in FILES} if given.smoke else stored()
    if not given.report:
        if not given.smoke:
            shakespeare.fetch(given.folder)
        for part in FILES if given.part is None else (given.part,):
            run(part, kept, given)
    if not given.smoke:
        write(**kept)


def run(part, kept, given):
    """Run what is missing of a part, and store each cell when it is done.

    Args:
      part: of ``FILES``.
      kept: {part: {name: cell}}, which is filled.
      given: the command's arguments.
    """
    scale, seeds = (SMOKE, SEEDS[:1]) if given.smoke else (Scale(), given.seeds)
    if part == "divisions":
        finished = cells(given.folder, scale, kept[part], seeds, given.cells)
    elif part == "published" and given.smoke:
        finished = published_cells(given.folder, SMOKE, {}, None, names=("fedavg",))
    elif part == "published":
        finished = published_cells(given.folder, PUBLISHED, kept[part], RUNS)
    else:
        rate = kept["divisions"][ROLES]["client_lr"]
        names = ("fedadam", "gradma") if given.smoke else given.cells or tuple(METHODS)
        finished = method_cells(given.folder, scale, kept[part], rate, names=names, seeds=seeds)
    for name, cell in finished:
        last = [values[-1] for values in cell["accuracy"].values()]
        shown = ", ".join(f"{value:.1f} %" for value in last)
        print(f"{name}: client_lr {cell['client_lr']:.3g}, {shown}", flush=True)
        kept[part][name] = cell
        if not given.smoke:
            write_text(FILES[part], json.dumps(kept[part], indent=1) + "\n")


if __name__ == "__main__":
    main()
