"""Methods of which every client has a model of its own: how a study runs and scores them.

The test images (in tuning, those held out) are divided among the clients so that each gets its
own mix of labels, and a client's own model is scored on its own ones. A run's accuracy is the mean
over the clients, each counting once; its worst tenth is that of the last models.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import data, simulate
from fedjax_lab.command.client_scores import summarise_clients
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.runner import describe_partition
from fedjax_lab.command.setup import Setup, build
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.evaluate_personal import build_personal_evaluation
from fedjax_lab.simulation.history import SimulationResult
from fedjax_lab.storage.run_dir import PARTITION, SUMMARY, write_json
from fedjax_lab.types import FedState, Params

ModelOf = Callable[[FedState, jax.Array], Params]


@dataclasses.dataclass(frozen=True)
class Personal:
    """A method of which every client has a model of its own.

    Attributes:
      name: by which a cell's tuning.json knows it.
      build: (loss_fn, the point's values by name) -> the method.
      model_of: (method, setup, point) -> ((state, client id) -> that client's params).
    """

    name: str
    build: Callable[..., Algorithm]
    model_of: Callable[[Algorithm, Setup, Mapping[str, float]], ModelOf]


def run_personal(
    config: RunConfig,
    personal: Personal,
    point: Mapping[str, float],
    examples: tuple[data.Examples, data.Examples],
    run_dir: Path | None = None,
) -> SimulationResult:
    """Run a personal method; its rows have the clients' mean ``accuracy``.

    Args:
      config: all settings but the method's.
      personal: the method.
      point: its hyper-parameters, by name.
      examples: (train, test), of which the second are divided like the first.
      run_dir: where to keep the run as ``runner.run`` does; None keeps nothing.
    """
    config = config.resolve()
    setup = build(config, examples)
    algorithm = personal.build(setup.loss_fn, **point)
    own_tests = data.divide_like(setup.clients, examples[1], seed=config.rounds.seed)
    model_of = personal.model_of(algorithm, setup, point)
    accuracy_of = build_personal_evaluation(setup.count_fn, model_of, own_tests)

    def diagnose(state: FedState) -> dict[str, Any]:
        return {"accuracy": jnp.nanmean(accuracy_of(state))}

    result = simulate(
        algorithm,
        setup.params,
        setup.clients,
        **config.schedule(),
        seed=config.rounds.seed,
        diagnose=diagnose,
        client_map=config.machine.client_map,
        on_nonfinite=config.rounds.on_nonfinite,
        run_dir=run_dir,
        checkpoint_every=config.output.checkpoint_every,
        config={"run_config": config.record(), "data": setup.data},
    )
    if run_dir is not None and not result.interrupted:
        accuracy = np.asarray(accuracy_of(result.state), np.float64)
        if result.stopped == "diverged":
            accuracy = np.full_like(accuracy, np.nan)
        summary = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
        write_json(run_dir / SUMMARY, {**summary, **summarise_clients(accuracy)})
        write_json(run_dir / PARTITION, describe_partition(setup.clients))
    return result
