"""Scores of the clients, each with the model that it uses."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_lab import data
from fedjax_lab.clients.host_table import HostTable
from fedjax_lab.command.config import RunConfig
from fedjax_lab.data.heterogeneity import labels_of
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.book import SimulationResult
from fedjax_lab.simulation.evaluate import CountFn
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)
from fedjax_lab.simulation.team import Team
from fedjax_lab.types import FedState

ACCURACY = "accuracy"


def build_own_tests(
    config: RunConfig,
    algorithm: Algorithm,
    count_fn: CountFn,
    clients: data.FederatedArrays,
    test: data.Examples,
    own: data.FederatedArrays | None = None,
) -> Callable[[FedState], Mapping[str, Any]] | None:
    """Build state -> personal scores for rows; None for methods with one global model.

    The test set is divided among the clients by their label distributions (``data.divide_like``),
    if they have no test examples of their own, and each client's model is scored on its own part.
    ``personal_scores`` describes the results, such as ``personal_accuracy``.

    Args:
      config: the settings, resolved.
      algorithm: the method.
      count_fn: what is counted of each example.
      clients: the clients' training data.
      test: the test set.
      own: the clients with test examples of their own, where there are such.
    """
    if algorithm.personal is None:
        return None
    labels, why = labels_of(test), None
    if config.client is not None and own is None:
        why = f"test_split is {config.test_split!r}, of other clients; examples:0.2 is of these"
    elif own is not None:
        labels = None
    elif labels is None or labels.ndim > 1:
        why = f"{config.dataset} has no class labels by which to divide the test set"
    if why is None and config.client_store == "host":
        why = "client_store is 'host', where no device holds all clients' models"
    if why is not None:
        warnings.warn(
            f"rows have no personal_accuracy of {algorithm.name}: {why}.", UserWarning, stacklevel=2
        )
        return None
    seed = config.seed if config.partition_seed is None else config.partition_seed
    tests = own or data.divide_like(clients, test, seed=seed)
    score = getattr(count_fn, "score", ACCURACY)
    models = client_models(algorithm, clients, config.batch_size, config.seed)
    score_clients = build_personal_evaluation(count_fn, models, tests)

    def diagnose(state: FedState) -> Mapping[str, Any]:
        return personal_scores(score_clients(state), tests.sizes, score)

    return diagnose


def score_on_training_data(
    config: RunConfig,
    algorithm: Algorithm,
    count_fn: CountFn,
    clients: data.FederatedArrays,
    evaluate_clients: Callable[[Any], jax.Array],
    result: SimulationResult,
) -> np.ndarray:
    """Score each client's model on its own training data, float [N].

    NaN for a diverged run, and if the models are on the host.

    Args:
      config: the settings, resolved.
      algorithm: the method.
      count_fn: what is counted of each example.
      clients: the clients' training data.
      evaluate_clients: params -> scores [N], for methods with one global model.
      result: result of the run.
    """
    if result.stopped == "diverged":
        return np.full(clients.num_clients, np.nan)
    if algorithm.personal is None:
        return np.asarray(evaluate_clients(result.params), np.float64)
    if isinstance(result.state.clients, HostTable):
        return np.full(clients.num_clients, np.nan)
    models = client_models(algorithm, clients, config.batch_size, config.seed)
    score_clients = build_personal_evaluation(count_fn, models, clients)
    return np.asarray(score_clients(Team.here().own(result.state)), np.float64)


def summarise_clients(scores: np.ndarray, score: str = ACCURACY) -> dict[str, Any]:
    """Summarize scores [N]: the scores, their mean, and the mean of the worst tenth, as JSON.

    The worst tenth is ceil(n / 10) of the n clients with data. Clients without data (NaN) are
    excluded from both means. A number that is not finite becomes null: an infinite error is one of
    the worst, and makes both means null.

    Args:
      scores: float [N]; NaN for a client without data.
      score: name of the score: "accuracy" (larger is better), or an error.
    """
    held = np.sort(scores[~np.isnan(scores)])
    held = held if score == ACCURACY else held[::-1]
    worst = held[: math.ceil(len(held) / 10)]

    def plain(number: float) -> float | None:
        return float(number) if np.isfinite(number) else None

    return {
        f"client_{score}": [plain(number) for number in scores],
        f"client_{score}_mean": plain(held.mean()) if len(held) else None,
        f"worst_10_percent_{score}": plain(worst.mean()) if len(held) else None,
    }
