"""Run directories written by hand."""

import json

from fedjax_lab.report import group_runs, load_runs

# 12 evaluations, every 5 rounds.
CURVE = [0.10, 0.50, 0.60, 0.70, 0.80, 0.90, 0.85, 0.80, 0.95, 0.90, 0.92, 0.94]


def write_run(
    path,
    accuracies=CURVE,
    *,
    seed=0,
    algorithm="fedavg",
    lr=0.1,
    worst=0.4,
    up=1_000_000,
    every=5,
    more=None,
    **config,
):
    """A run directory: ``up`` bytes sent and 100 gradients a round, an evaluation ``every`` few."""
    path.mkdir(parents=True)
    settings = {
        "algorithm": algorithm,
        "seed": seed,
        "rounds": every * len(accuracies),
        "num_clients": 2,
        "hyperparameters": {"client_lr": lr, "gradient_transform": None},
        "partition": {"spec": "iid", "seed": seed, "hash": f"hash{seed}"},
        "run_config": {"dataset": "digits", "seed": seed, "client_lr": lr, "option": {}},
        "versions": {"jax": "1.2.3"},
        **config,
    }
    (path / "config.json").write_text(json.dumps(settings))
    rounds = range(every, every * len(accuracies) + 1, every)
    metrics = [
        {
            "round": r,
            "loss": None if a is None else 1 - a,
            "bytes_up": up * r,
            "bytes_down": 0,
            "gradients": 100 * r,
            "accuracy": a,
            **{name: value / r for name, value in (more or {}).items()},
        }
        for r, a in zip(rounds, accuracies, strict=True)
    ]
    times = [{"round": r, "seconds": r / 10, "compile_seconds": 3.0} for r in rounds]
    for name, rows in (("metrics.jsonl", metrics), ("times.jsonl", times)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "summary.json").write_text(json.dumps({"worst_10_percent_accuracy": worst}))
    partition = {"spec": "iid", "seed": seed, "hash": "h", "label_histogram": [[3, 1], [0, 4]]}
    (path / "partition.json").write_text(json.dumps(partition))
    return path


def groups_of(*paths):
    return group_runs(load_runs(paths))
