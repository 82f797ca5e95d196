"""Scores of the clients, each with the model that it uses."""

import functools
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
from fedjax_lab.simulation.evaluate import CountFn, build_client_evaluation
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)
from fedjax_lab.simulation.team import Team
from fedjax_lab.types import FedState, Params

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
    parts, why = _test_parts(config, clients, test, own)
    if parts is not None and config.machine.client_store == "host":
        why = "client_store is 'host', where no device holds all clients' models"
    if parts is None or why:
        warnings.warn(
            f"rows have no personal_accuracy of {algorithm.name}: {why}.", UserWarning, stacklevel=2
        )
        return None
    tests = parts()
    score = getattr(count_fn, "score", ACCURACY)
    models = client_models(algorithm, clients, config.rounds.batch_size, config.rounds.seed)
    score_clients = build_personal_evaluation(count_fn, models, tests)

    def diagnose(state: FedState) -> Mapping[str, Any]:
        return personal_scores(score_clients(state), tests.sizes, score)

    return diagnose


def build_client_tests(
    config: RunConfig,
    algorithm: Algorithm,
    count_fn: CountFn,
    clients: data.FederatedArrays,
    test: data.Examples,
    own: data.FederatedArrays | None = None,
) -> Callable[[Params], Mapping[str, Any]] | None:
    """Build global model -> its scores on the clients' test examples, such as client_test_accuracy.

    They compare methods with one global model to personal ones, of which each client's model is
    scored on the same examples. None for methods with personal models, and if the clients have no
    test examples.

    Args:
      config, algorithm, count_fn, clients, test, own: as of ``build_own_tests``.
    """
    parts, _ = _test_parts(config, clients, test, own)
    if parts is None or algorithm.personal is not None:
        return None
    score = getattr(count_fn, "score", ACCURACY)

    @functools.cache  # after the first row, which does not wait for it
    def built():
        tests = parts()
        summarise = jax.jit(functools.partial(personal_scores, name=score))
        return build_client_evaluation(count_fn, tests), summarise, tests.sizes

    def score_clients(params: Params) -> Mapping[str, Any]:
        score_each, summarise, sizes = built()
        found = summarise(score_each(params), sizes)
        return {f"client_test_{name.removeprefix('personal_')}": v for name, v in found.items()}

    return score_clients


def _test_parts(
    config: RunConfig,
    clients: data.FederatedArrays,
    test: data.Examples,
    own: data.FederatedArrays | None,
) -> tuple[Callable[[], data.FederatedArrays] | None, str | None]:
    """Return a function that gives each client its test examples; or None and the reason."""
    if own is not None:
        return lambda: own, None
    if config.data.client is not None:
        why = (
            f"test_split is {config.data.test_split!r}, of other clients; examples:0.2 is of these"
        )
        return None, why
    labels = labels_of(test)
    if labels is None or labels.ndim > 1:
        return None, f"{config.data.dataset} has no class labels by which to divide the test set"
    return lambda: data.divide_like(clients, test, seed=config.partition_seed), None


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
    models = client_models(algorithm, clients, config.rounds.batch_size, config.rounds.seed)
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
