"""FedAvg and FedAdam at the size that is published for this task: one run of each."""

from pathlib import Path

from experiments.natural.methods import at
from experiments.natural.runs import SEEDS, Scale, best_of, pooled, scorer, train
from fedjax_lab import data

PUBLISHED = Scale(hidden=256, layers=2, batch_size=4, rounds=1200, tuning_rounds=100, eval_every=20)
SEED = SEEDS[0]
# (client_lr, server_lr) that are tried.
POINTS = {
    "fedavg": ((10**-0.5, None), (1.0, None), (10**0.5, None)),
    "fedadam": ((1.0, 0.01), (10**0.5, 0.01), (10**0.5, 10**-1.5)),
}
EXPECTED = (54.0, 60.0)  # percent: the published 56 to 58, and two points on both sides


def cells(folder, scale, kept, runs, names=tuple(POINTS)):
    """Run the methods that ``kept`` has not; yields (name, measurement).

    Args:
      folder: with the texts.
      scale: a ``Scale``.
      kept: {name: measurement} of methods that are finished.
      runs: folder for the runs, which continue where they were interrupted; None: none.
      names: the methods.
    """
    clients, test = data.load_federated("shakespeare", folder)
    scored = pooled(test, scale.num_scored)
    for name in names:
        if name in kept:
            continue
        score = scorer(clients, scale, method=name, local_epochs=1)
        tried = {point: score(**at(point, {})) for point in POINTS[name]}
        options = at(best_of(tried), {})
        how = {"local_epochs": 1, "seed": SEED, "rounds": scale.rounds}
        run_dir = None if runs is None else Path(runs) / name
        rounds, accuracies, seconds = train(
            clients, scored, scale, method=name, run_dir=run_dir, **how, **options
        )
        yield (
            name,
            {
                **options,
                "tried": [[*point, value] for point, value in tried.items()],
                "rounds": rounds,
                "accuracy": {str(SEED): accuracies},
                "seconds": seconds,
            },
        )
