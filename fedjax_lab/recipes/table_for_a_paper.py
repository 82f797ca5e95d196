"""Two methods, two seeds each, and the table as a paper prints it: LaTeX with intervals.

    python -m fedjax_lab.recipes.table_for_a_paper

The same on the command line, first for each method and then for all:
``run --algorithm NAME --seeds 0 1`` and ``report runs --format latex --out table.tex``.
"""

import tempfile
from pathlib import Path

from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.runner import run
from fedjax_lab.report.formats import format_report


def main() -> None:
    """Run all four runs and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        for algorithm in ("fedavg", "scaffold"):
            for seed in (0, 1):
                config = RunConfig.of(
                    algorithm=algorithm,
                    seed=seed,
                    partition_seed=0,  # seeds differ in cohorts, mini-batches and initial models
                    model="linear",
                    rounds=20,
                    replace=True,
                    client_map="scan",  # compiles fastest
                    run_dir=str(Path(folder) / f"{algorithm}-{seed}"),
                )
                run(config, progress=False)
        print(format_report([folder], "latex"), end="")


if __name__ == "__main__":
    main()
