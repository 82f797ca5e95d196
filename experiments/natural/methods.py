"""Many methods on the roles: the adaptive servers, and the five systems beside their rivals."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.natural.runs import SEEDS, best_of, pooled, scorer, train, with_runs
from experiments.studies.verdicts import CONTRADICTED, SHOWS, UNDECIDED, ahead
from fedjax_lab import data
from fedjax_lab.estimates import estimate

RATES = (10**-0.5, 1.0, 10**0.5, 10.0, 10**1.5)
ADAPTIVE_SERVERS = ("fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "scaffold")
MARGIN = 1.0  # points of accuracy within which tuned methods count as equal


class Method(NamedTuple):
    """A row: a method, and the five points at which it is tried.

    Attributes:
      rates: client learning rates that are tried where ``server_rates`` is None.
      server_rates: three server learning rates, which are tried at FedAvg's best client rate; the
        best of them is tried with the client rates next to that one.
      fixed: the other arguments.
    """

    rates: Sequence[float] = RATES
    server_rates: Sequence[float] | None = None
    fixed: Mapping[str, Any] = {}


# FedAvg's row is its cell of the first part. The order is that of the runs.
METHODS: Mapping[str, Method] = {
    "fedavgm": Method(server_rates=(0.1, 10**-0.5, 1.0)),
    "fedadam": Method(server_rates=(10**-2.5, 0.01, 10**-1.5)),
    "scaffold": Method(),
    "gradma": Method(fixed={"memory_size": 100}),
    "fedmoswa": Method(),
    "cfedavg": Method(fixed={"compressor": "top_k:0.9"}),
    "fedspeed": Method(),
    "fafed": Method(
        rates=(0.01, 10**-1.5, 0.1, 10**-0.5, 1.0),
        fixed={"momentum": 0.1, "second_moment_decay": 0.9},
    ),
    "fedadagrad": Method(server_rates=(10**-1.5, 0.1, 10**-0.5)),
    "fedyogi": Method(server_rates=(10**-2.5, 0.01, 10**-1.5)),
    "gradma_w": Method(),
    "gradma_s": Method(fixed={"memory_size": 100}),
    "fedswa": Method(),
    "fedspeed_ing": Method(fixed={"inertia": 0.3}),
}
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "GradMA": ("gradma", "gradma_w", "gradma_s"),
    "FedSWA and FedMoSWA": ("fedswa", "fedmoswa"),
    "CFedAvg": ("cfedavg",),
    "FAFED": ("fafed",),
    "FedSpeed": ("fedspeed", "fedspeed_ing"),
}


def at(point, fixed):
    """Return the arguments of a factory at a point (client_lr, server_lr or None)."""
    client_lr, server_lr = point
    server = {} if server_lr is None else {"server_lr": server_lr}
    return {**fixed, "client_lr": client_lr, **server}


def tune(clients, method, name, scale, base_rate):
    """Return {(client_lr, server_lr or None): accuracy on held-out roles}, of five points.

    Args:
      clients: all roles.
      method, name: a row.
      scale: a ``Scale``.
      base_rate: FedAvg's best client learning rate.
    """
    score_at = scorer(clients, scale, method=name, local_epochs=1)

    def score(*point):
        return score_at(**at(point, method.fixed))

    if method.server_rates is None:
        return {(rate, None): score(rate, None) for rate in method.rates}
    scores = {(base_rate, server): score(base_rate, server) for server in method.server_rates}
    _, server = best_of(scores)
    for factor in (10**-0.5, 10**0.5):
        scores[base_rate * factor, server] = score(base_rate * factor, server)
    return scores


def cells(folder, scale, kept, base_rate, *, names=tuple(METHODS), seeds=SEEDS):
    """Run what ``kept`` has not; yields (name, measurement) after each run.

    Args:
      folder: with the texts.
      scale: a ``Scale``.
      kept: {name: measurement} of methods, which may lack runs.
      base_rate: FedAvg's best client learning rate.
      names: the methods.
      seeds: of the final runs.
    """
    clients, test = data.load_federated("shakespeare", folder)
    scored = pooled(test, scale.num_scored)
    for name in names:
        method = METHODS[name]
        if name in kept:
            cell = kept[name]
            options = at((cell["client_lr"], cell.get("server_lr")), method.fixed)
        else:
            tried = tune(clients, method, name, scale, base_rate)
            options = at(best_of(tried), method.fixed)
            cell = {**options, "tried": [[*point, value] for point, value in tried.items()]}

        def run(seed, name=name, options=options):
            how = {"local_epochs": 1, "seed": seed, "rounds": scale.rounds}
            return train(clients, scored, scale, method=name, **how, **options)

        for finished in with_runs(cell, seeds, run):
            yield name, finished


def ends(cell: Mapping[str, Any]) -> dict[str, float]:
    """Return {seed: mean accuracy of the last five evaluations}.

    Args:
      cell: a method's measurement.
    """
    return {seed: float(np.mean(values[-5:])) for seed, values in cell["accuracy"].items()}


def against(cell: Mapping[str, Any], other: Mapping[str, Any]) -> Any:
    """Return the estimate of the paired difference of the ends of two methods, in points.

    Args:
      cell, other: measurements, of which the seeds that both have count.
    """
    first, second = ends(cell), ends(other)
    return estimate([first[seed] - second[seed] for seed in second if seed in first])


def decide(difference: Any) -> str:
    """Return "better", "worse" or "undecided", from an estimate of a difference.

    Args:
      difference: of two methods, the first minus the second.
    """
    return {SHOWS: "better", CONTRADICTED: "worse"}.get(ahead(difference).verdict, UNDECIDED)


def spread(kept: Mapping[str, Any]) -> tuple[str, str, Any, str]:
    """Decide whether the tuned methods of Reddi et al. end within ``MARGIN`` points.

    Args:
      kept: {name: measurement}, of all of them.

    Returns:
      (name of the best, name of the worst, estimate of their difference, verdict).
    """
    means = {name: float(np.mean(list(ends(kept[name]).values()))) for name in ADAPTIVE_SERVERS}
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    difference = against(kept[best], kept[worst])
    reversed_of = {SHOWS: CONTRADICTED, CONTRADICTED: SHOWS}
    verdict = reversed_of.get(ahead(difference, by=MARGIN).verdict, UNDECIDED)
    return best, worst, difference, verdict
