"""From a ``RunConfig`` to a finished run: build, simulate, score."""

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from fedjax_lab import data, models
from fedjax_lab.command.client_scores import score_result
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.own_code import own_sources
from fedjax_lab.command.schedules import depends_on_rounds
from fedjax_lab.command.setup import Setup, build
from fedjax_lab.data.heterogeneity import labels_of
from fedjax_lab.machine.json_file import read_json
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.history import SimulationResult
from fedjax_lab.simulation.loggers import Hook, build_loggers
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.simulate import simulate
from fedjax_lab.storage.run_dir import CONFIG, PARTITION, SUMMARY, write_json


def run(
    config: RunConfig,
    *,
    examples: tuple[data.Examples, data.Examples] | None = None,
    wrap: Callable[[Algorithm], Algorithm] | None = None,
    progress: bool = True,
    on_row: Hook | Iterable[Hook] = (),
) -> SimulationResult:
    """Run a config, or resume it from its run directory.

    The run directory has the files of ``simulate``, with two additions.
    summary.json has ``client_accuracy`` [N] of the final global model (or of personal models) on
    each client's training data, its mean and ``worst_10_percent_accuracy`` (for a regression, the
    same of "mean_squared_error"). If the clients have test examples, ``client_test_accuracy`` [N]
    is the final score on these, and ``client_test_examples`` [N] their number; for methods with
    personal models, rows have ``personal_accuracy`` and other scores of them, and for others
    clients.jsonl has ``client_test_accuracy`` and so on: see ``client_scores.ClientTests``.
    partition.json has the label histogram (null for text).

    Args:
      config: the settings; they are resolved here.
      examples, wrap: as in ``build``.
      progress: show the run and its progress on stderr.
      on_row: as in ``simulate``, besides the loggers of ``config.output.log``.

    Raises:
      ValueError, TypeError: a setting is unknown, out of range, or missing.
      FileNotFoundError, ImportError: the data set, or what reads it, is not there.
      FileExistsError: the directory has another run.
    """
    config = config.resolve()
    setup = build(config, examples, wrap)
    result = simulate_setup(config, setup, progress=progress, on_row=on_row)
    if result.interrupted and not result.history:
        return result  # nothing has been computed that could be scored
    scores = score_result(config, setup, result)
    if not Processes.here().is_first:
        return result
    path = _run_dir(config)
    summary = read_json(path / SUMMARY)
    write_json(path / SUMMARY, {**summary, **scores})
    write_json(path / PARTITION, describe_partition(setup.clients))
    return result


def simulate_setup(
    config: RunConfig, setup: Setup, *, progress: bool = True, on_row: Hook | Iterable[Hook] = ()
) -> SimulationResult:
    """Run what ``build`` built, or resume it; a finished run is only read.

    Raises:
      ValueError, TypeError, FileExistsError: as ``simulate``.
    """
    path = _run_dir(config)
    processes = Processes.here()
    hooks = [on_row] if callable(on_row) else list(on_row)
    loggers = build_loggers(config.output.log if processes.is_first else (), path, config.record())
    schedule = config.schedule()
    bound = own_sources(config, path)
    if depends_on_rounds(config.method.client_lr_schedule):
        bound["client_lr_ends"] = config.rounds.rounds
    if progress and processes.is_first:
        print(_describe(config, setup, path), file=sys.stderr, flush=True)
    # Compiled here, so that the time of the rounds does not include it.
    jax.block_until_ready(setup.evaluate(setup.params))
    with ExitStack() as stack:
        for logger in loggers:
            stack.callback(logger.close)
        return simulate(
            setup.algorithm,
            setup.params,
            setup.clients,
            **schedule,
            seed=config.rounds.seed,
            evaluate=setup.evaluate,
            diagnose=setup.client_tests.diagnose,
            score_clients=setup.client_tests.score_clients,
            **config.machine.arguments(),
            on_nonfinite=config.rounds.on_nonfinite,
            run_dir=path,
            checkpoint_every=config.output.checkpoint_every,
            config={"run_config": config.record(), "data": setup.data, **bound},
            on_row=[*hooks, *loggers],
            profile_dir=config.output.profile_dir,
            progress=progress,
        )


def _run_dir(config: RunConfig) -> Path:
    assert config.output.run_dir is not None  # resolved
    return Path(config.output.run_dir)


def describe_partition(clients: data.FederatedArrays) -> dict[str, Any]:
    """Return the contents of partition.json: scheme, seed, hash, names, label histogram."""
    labels, names = labels_of(clients.examples), clients.names
    distance = histogram = None
    if labels is not None:
        measured = clients.heterogeneity()
        distance = measured.mean_tv_distance
        if labels.ndim == 1:  # a word's count in every client is much, and nothing to look at
            histogram = measured.label_histogram.tolist()
    return {
        "spec": clients.partition.spec,
        "seed": clients.partition.seed,
        "hash": clients.partition.hash,
        "names": None if names is None else list(names),
        "mean_tv_distance": distance,
        "label_histogram": histogram,
    }


def _describe(config: RunConfig, setup: Setup, path: Path) -> str:
    verb = "going on with" if (path / CONFIG).exists() else "new run in"
    size = models.count_params(setup.params)
    shape = "x".join(map(str, setup.data["shape"]))
    kind = config.data.tokens if config.model.model in models.LANGUAGE_MODELS else "classes"
    kind = "characters" if config.data.is_federated else kind
    kind = "outputs" if "outputs" in setup.data else kind
    return "\n".join(
        [
            f"{config.data.dataset}: {setup.data['train']:,} + {setup.data['test']:,} examples "
            f"{shape}, {setup.data.get('classes', setup.data.get('outputs')):,} {kind}",
            setup.clients.summary(),
            f"{config.model.model}: {size:,} parameters",
            f"{setup.algorithm.name}, {verb} {path}",
        ]
    )
