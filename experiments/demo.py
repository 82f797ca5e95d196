"""The demo: FedAvg, SCAFFOLD and GradMA on digits that are divided very unevenly.

    python experiments/demo.py [FOLDER]

20 clients hold labels in shares of Dirichlet(0.1); 5 of them take part in a round, with 5
local steps each. All methods see the same partition, first model, cohorts and mini-batches for
a seed, and share model and learning rates. Three seeds; about a minute on two CPU cores, most of
it compilation. Started again, it finds its runs finished and writes the report anew.
"""

import sys
from pathlib import Path

from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.runner import run
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.report import group_runs, load_runs, write_report
from fedjax_lab.report.sections import best_first
from fedjax_lab.report.tables import accuracy_table, default_target, markdown_table, target_table

ALGORITHMS = ("fedavg", "scaffold", "gradma")
SEEDS = (0, 1, 2)


def main(folder: Path, rounds: int = 100) -> Path:
    """Run all methods with all seeds and write the report; returns the path of report.md."""
    # The seeds of a method are the same program: it is compiled once and kept on the disk.
    keep_by_default()
    directories = []
    for algorithm in ALGORITHMS:
        for seed in SEEDS:
            directory = folder / f"{algorithm}-seed{seed}"
            print(f"{algorithm}, seed {seed}", flush=True)
            config = RunConfig(
                algorithm=algorithm,
                dataset="digits",
                partition="dirichlet:0.1",
                num_clients=20,
                model="mlp",
                rounds=rounds,
                cohort_size=5,
                local_steps=5,
                batch_size=16,
                client_lr=0.1,
                seed=seed,
                eval_every=min(5, rounds),
                checkpoint_every=rounds,
                run_dir=str(directory),
            )
            if run(config, progress=False).interrupted:
                sys.exit("Stopped early; the same command goes on from there.")
            directories.append(directory)
    report = write_report(
        directories, folder / "report", title="FedAvg, SCAFFOLD and GradMA on non-iid digits"
    )
    groups = best_first(group_runs(load_runs(directories)))
    target = default_target(groups)
    print(f"\nTest accuracy (%):\n\n{markdown_table(accuracy_table(groups))}")
    print(f"\nUp to {100 * target:.10g} %:\n\n{markdown_table(target_table(groups, target))}")
    print(f"\nReport with figures: {report}")
    return report


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/demo"))
