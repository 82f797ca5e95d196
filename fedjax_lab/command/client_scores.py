"""Scores of the clients, each with the model that it uses."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab import data
from fedjax_lab.checks import warn
from fedjax_lab.clients.host_table import HostTable
from fedjax_lab.command.config import RunConfig
from fedjax_lab.data.heterogeneity import labels_of
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.evaluate import CountFn, build_client_evaluation
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)
from fedjax_lab.simulation.history import SimulationResult
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.storage.rows import plain_row
from fedjax_lab.types import FedState, Params

ACCURACY = "accuracy"


class ClientTests(NamedTuple):
    """Functions that score the model of each client on the client's own test examples.

    The test set is divided among the clients by their label distributions (``data.divide_like``),
    if they have no test examples of their own.

    Attributes:
      diagnose: state -> ``personal_scores`` for rows, such as ``personal_accuracy``; None for
        methods with one global model, and if the clients have no test examples.
      score_clients: global model -> the same scores of it, such as ``client_test_accuracy``, which
        compare methods with one global model to personal ones; None for personal methods, and if
        the clients have no test examples.
      score_each: result -> for summary.json, score and number of test examples of each client, such
        as ``client_test_accuracy`` and ``client_test_examples``, lists [N]; None if both are.
    """

    diagnose: Callable[[FedState], Mapping[str, Any]] | None = None
    score_clients: Callable[[Params], Mapping[str, Any]] | None = None
    score_each: Callable[[SimulationResult], dict[str, Any]] | None = None


def build_client_tests(
    config: RunConfig,
    algorithm: Algorithm,
    count_fn: CountFn,
    clients: data.FederatedArrays,
    test: data.Examples,
    own: data.FederatedArrays | None = None,
) -> ClientTests:
    """Build the functions that score the clients' models: their own, or the global one."""
    parts, why = _test_parts(config, clients, test, own)
    score = getattr(count_fn, "score", ACCURACY)
    if algorithm.personal is None:
        return ClientTests() if parts is None else _of_global_model(config, count_fn, parts, score)
    if parts is not None and config.machine.client_store == "host":
        why = "client_store is 'host', where no device holds all clients' models"
    if parts is None or why:
        warn(f"rows have no personal_accuracy of {algorithm.name}: {why}.")
        return ClientTests()
    tests = parts()
    models = client_models(algorithm, clients, config.rounds.batch_size, config.rounds.seed)
    score_clients = build_personal_evaluation(
        count_fn, models, tests, lowering=config.machine.lowering
    )

    def diagnose(state: FedState) -> Mapping[str, Any]:
        return personal_scores(score_clients(state), tests.sizes, score)

    def score_each(result: SimulationResult) -> dict[str, Any]:
        return _each(score_clients(Processes.here().collected(result.state)), tests.sizes, score)

    return ClientTests(diagnose, None, score_each)


def _of_global_model(
    config: RunConfig, count_fn: CountFn, parts: Callable[[], data.FederatedArrays], score: str
) -> ClientTests:
    @functools.cache  # after the first row, which does not wait for it
    def built():
        tests = parts()
        summarise = jax.jit(functools.partial(personal_scores, name=score))
        evaluate = build_client_evaluation(count_fn, tests, lowering=config.machine.lowering)
        return evaluate, summarise, tests.sizes

    def score_clients(params: Params) -> Mapping[str, Any]:
        score_client, summarise, sizes = built()
        found = summarise(score_client(params), sizes)
        return {f"client_test_{name.removeprefix('personal_')}": v for name, v in found.items()}

    def score_each(result: SimulationResult) -> dict[str, Any]:
        score_client, _, sizes = built()
        return _each(score_client(result.params), sizes, score)

    return ClientTests(None, score_clients, score_each)


def _each(scores: jax.Array, sizes: jax.Array, score: str) -> dict[str, Any]:
    found = {
        f"client_test_{score}": np.asarray(scores).tolist(),
        "client_test_examples": np.asarray(sizes).tolist(),
    }
    return plain_row(found)


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


def score_result(config: RunConfig, setup: Any, result: SimulationResult) -> dict[str, Any]:
    """Score the model of each client on its training data and tests, for summary.json.

    Args:
      setup: of ``setup.build``.
      result: of its run.
    """
    scores = _on_training_data(config, setup, result)
    found = summarise_clients(scores, getattr(setup.count_fn, "score", ACCURACY))
    score_each = setup.client_tests.score_each
    if score_each is not None and result.stopped != "diverged":
        found |= score_each(result)
    return found


def _on_training_data(config: RunConfig, setup: Any, result: SimulationResult) -> np.ndarray:
    """Score each client's model, float [N]; NaN of a diverged run, and of models on the host."""
    algorithm, clients = setup.algorithm, setup.clients
    is_on_host = algorithm.personal is not None and isinstance(result.state.clients, HostTable)
    if result.stopped == "diverged" or is_on_host:
        return np.full(clients.num_clients, np.nan)
    if algorithm.personal is None:
        return np.asarray(setup.evaluate_clients(result.params), np.float64)
    models = client_models(algorithm, clients, config.rounds.batch_size, config.rounds.seed)
    score_clients = build_personal_evaluation(
        setup.count_fn, models, clients, lowering=config.machine.lowering
    )
    return np.asarray(score_clients(Processes.here().collected(result.state)), np.float64)


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
    found = {
        f"client_{score}": scores.tolist(),
        f"client_{score}_mean": float(held.mean()) if len(held) else None,
        f"worst_10_percent_{score}": float(worst.mean()) if len(held) else None,
    }
    return plain_row(found)
