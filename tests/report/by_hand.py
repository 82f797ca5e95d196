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
    own=None,
    clients=None,
    each=None,
    stopped=None,
    **config,
):
    """A run directory: ``up`` bytes sent and 100 gradients a round, an evaluation ``every`` few.

    Args:
      own: the clients' models' accuracies, in the rows. clients: the global model's on the clients'
        test examples, in a file of their own. each: of summary.json, the last accuracy of each
        client on its test examples; None for a client that has none.
    """
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
    for row, value in zip(metrics, own or (), strict=False):
        row |= {"personal_accuracy": value, "personal_accuracy_worst": value and value / 2}
    scored = [
        {"round": r, "client_test_accuracy": value, "client_test_accuracy_worst": value / 2}
        for r, value in zip(rounds, clients or (), strict=False)
    ]
    times = [{"round": r, "seconds": r / 10, "compile_seconds": 3.0} for r in rounds]
    files = {"metrics.jsonl": metrics, "times.jsonl": times}
    for name, rows in {**files, **({"clients.jsonl": scored} if clients else {})}.items():
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"worst_10_percent_accuracy": worst, "stopped": stopped}
    if each is not None:
        sizes = [0 if value is None else 5 for value in each]
        summary |= {"client_test_accuracy": each, "client_test_examples": sizes}
    (path / "summary.json").write_text(json.dumps(summary))
    partition = {"spec": "iid", "seed": seed, "hash": "h", "label_histogram": [[3, 1], [0, 4]]}
    (path / "partition.json").write_text(json.dumps(partition))
    return path


def groups_of(*paths):
    return group_runs(load_runs(paths))
