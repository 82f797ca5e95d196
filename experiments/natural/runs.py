"""The runs: FedAvg on the roles, and on random divisions of the same sequences."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab import data, models, simulate
from fedjax_lab.command.factories import find
from fedjax_lab.data import shakespeare
from fedjax_lab.estimates import estimate
from fedjax_lab.report.statistics import is_reached
from fedjax_lab.simulation.evaluate import build_evaluation

SEEDS = (11, 12, 13)
TUNING_SEED = 0
CONTROL = "random, sizes of the roles"
DIVISIONS = ("roles", "random", CONTROL)
TARGETS = (30, 35, 40, 45, 50)  # percent


class Scale(NamedTuple):
    """How large the study is.

    Attributes:
      hidden: units of an LSTM layer.
      rounds, tuning_rounds: of a final run, and of each rate's.
      eval_every: rounds between evaluations.
      cohort_size: roles in a round.
      local_epochs: the numbers of passes E.
      rates: client learning rates that are tried.
      num_scored: test sequences.
      layers: LSTM layers.
      batch_size: sequences of a mini-batch.
    """

    hidden: int = 128
    rounds: int = 200
    tuning_rounds: int = 60
    eval_every: int = 5
    cohort_size: int = 10
    local_epochs: tuple[int, ...] = (1, 5)
    rates: tuple[float, ...] = (10**-0.5, 1.0, 10**0.5, 10.0, 10**1.5)
    num_scored: int = 1000
    layers: int = 1
    batch_size: int = 10

    @property
    def mini_batches(self):
        """Arguments of a run about mini-batches and weights."""
        return {"batch_size": self.batch_size, "weights": "examples"}

    def network(self):
        """Return the model."""
        sizes = {"embedding": 8, "hidden": self.hidden, "layers": self.layers}
        return models.lstm(shakespeare.NUM_TOKENS, **sizes, dropout=0.0)


SMOKE = Scale(8, 2, 1, 1, 1, (1,), (0.1, 1.0), 8)


def pooled(clients, count=None):
    """Return all clients' examples, or ``count`` of them drawn at random."""
    held = np.asarray(clients.indices)
    if count is not None and count < len(held):
        held = np.random.default_rng(TUNING_SEED).choice(held, count, replace=False)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[np.sort(held)], clients.examples)


def divided(clients, division, seed):
    """Return the roles themselves, or as many clients with the same sequences, divided at random.

    Args:
      clients: the roles.
      division: of ``DIVISIONS``; "random" has clients of one size.
      seed: of the random divisions.
    """
    if division == "roles":
        return clients
    sequences, count = pooled(clients), clients.num_available
    if division == "random":
        return data.partition(sequences, "iid", count, seed=seed, min_size=1)
    owners = np.repeat(np.arange(count), np.asarray(clients.sizes))
    owners = np.random.default_rng(seed).permutation(owners)
    return data.partition(sequences, owners, count, min_size=1)


def train(
    clients, scored, scale, *, local_epochs, seed, rounds, method="fedavg", run_dir=None, **options
):
    """Run a method; returns (rounds of the evaluations, accuracies in percent, seconds).

    Args:
      clients: the federation.
      scored: sequences on which the model is scored.
      scale: a ``Scale``.
      local_epochs, seed, rounds: of the run.
      method: name of the method.
      run_dir: where the run is written, and continues if it was interrupted; None: nowhere.
      **options: of its factory.
    """
    model = scale.network()
    if "memory_size" in options:  # of a small federation
        options["memory_size"] = min(options["memory_size"], clients.num_clients)
    counts = models.answer_counts(model.apply, data.scored_per_row(scored))
    result = simulate(
        find("algorithm", method)(models.answer_loss(model.apply), **options),
        model.init(jax.random.key(seed), scored.x[:1]),
        clients,
        rounds=rounds,
        cohort_size=scale.cohort_size,
        local_epochs=local_epochs,
        **scale.mini_batches,
        seed=seed,
        evaluate=build_evaluation(counts, scored),
        eval_every=scale.eval_every,
        run_dir=run_dir,
    )
    rows = result.history
    accuracies = [100 * float(row["accuracy"]) for row in rows]
    return [row["round"] for row in rows], accuracies, result.seconds


def best_of(scores):
    """Return the point with the largest finite score."""
    return max(scores, key=lambda point: (np.isfinite(scores[point]), scores[point]))


def scorer(clients, scale, division="roles", **how):
    """Return a function of options -> mean of the last three accuracies on held-out roles.

    Args:
      clients: all roles.
      scale: a ``Scale``.
      division: of ``DIVISIONS``.
      **how: arguments of ``train`` that all runs share, ``local_epochs`` among them.
    """
    fit, held_out = data.split_clients(clients, 0.1, seed=TUNING_SEED)
    scored, fit = pooled(held_out, scale.num_scored), divided(fit, division, TUNING_SEED)
    how = {**how, "seed": TUNING_SEED, "rounds": scale.tuning_rounds}

    def score(**options):
        _, accuracies, _ = train(fit, scored, scale, **how, **options)
        return float(np.mean(accuracies[-3:]))

    return score


def with_runs(cell, seeds, run):
    """Yield a cell anew after each final run that it lacks.

    Args:
      cell: what tuning chose, or a stored measurement.
      seeds: of the final runs.
      run: seed -> (rounds of the evaluations, accuracies, seconds).
    """
    for seed in seeds:
        done = cell.get("accuracy", {})
        if str(seed) in done:
            continue
        rounds, accuracies, seconds = run(seed)
        mean = (cell.get("seconds", 0.0) * len(done) + seconds) / (len(done) + 1)
        done = {**done, str(seed): accuracies}
        cell = {**cell, "rounds": rounds, "accuracy": done, "seconds": mean}
        yield cell


def cells(folder, scale, kept, seeds=SEEDS, names=None):
    """Run what ``kept`` has not; yields (name of a cell, its measurement) after each run.

    Args:
      folder: with the texts.
      scale: a ``Scale``.
      kept: {name: measurement} of cells, which may lack runs.
      seeds: of the final runs.
      names: the cells; None: all.
    """
    clients, test = data.load_federated("shakespeare", folder)
    scored = pooled(test, scale.num_scored)
    for local_epochs in scale.local_epochs:
        for division in DIVISIONS:
            name = f"{division}, E = {local_epochs}"
            if names is not None and name not in names:
                continue
            if name in kept:
                cell = kept[name]
            elif division == CONTROL:  # only the texts differ
                cell = {"client_lr": kept[f"roles, E = {local_epochs}"]["client_lr"], "tried": {}}
            else:
                score = scorer(clients, scale, division, local_epochs=local_epochs)
                tried = {rate: score(client_lr=rate) for rate in scale.rates}
                shown = {f"{rate:.3g}": value for rate, value in tried.items()}
                cell = {"client_lr": best_of(tried), "tried": shown}
            how = {"client_lr": cell["client_lr"], "local_epochs": local_epochs}

            def run(seed, division=division, how=how):
                federation = divided(clients, division, seed)
                return train(federation, scored, scale, **how, seed=seed, rounds=scale.rounds)

            for finished in with_runs(cell, seeds, run):
                yield name, finished


def rounds_to(cell: Mapping[str, Any], target: float) -> dict[str, float]:
    """Return for each seed the round of the first evaluation that reaches a target; inf: none."""
    return {
        seed: next(
            (
                float(r)
                for r, value in zip(cell["rounds"], values, strict=True)
                if is_reached(target, value)
            ),
            np.inf,
        )
        for seed, values in cell["accuracy"].items()
    }


def verdict(
    kept: Mapping[str, Any], local_epochs: int, other: str = "random"
) -> tuple[str, int | None, Any]:
    """Decide the claim for one E: (verdict, target, estimate of the difference in rounds).

    Args:
      kept: {name of a cell: its measurement}.
      local_epochs: E.
      other: the division that the roles are compared with.
    """
    roles, random = (kept[f"{division}, E = {local_epochs}"] for division in ("roles", other))
    for target in reversed(TARGETS):
        few, many = rounds_to(roles, target), rounds_to(random, target)
        seeds = [seed for seed in few if seed in many]
        if not np.isfinite([(few[seed], many[seed]) for seed in seeds]).all():
            continue
        difference = estimate([many[seed] - few[seed] for seed in seeds])
        width = np.inf if difference.half_width is None else difference.half_width
        if abs(difference.mean) <= width:
            return "undecided", target, difference
        return ("shows" if difference.mean > 0 else "contradicted"), target, difference
    return "undecided", None, None
