"""Identity of a run, by name and by content, for its directory and its processes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.round import Algorithm
from fedjax_lab.storage.fingerprint import hash_arrays, hash_function
from fedjax_lab.storage.run_dir import versions
from fedjax_lab.types import FedState, Params, PyTree


def run_record(
    algorithm: Algorithm,
    params: Params,
    clients: FederatedArrays,
    schedule: Schedule,
    **settings: Any,
) -> dict[str, Any]:
    """Collect the entries of config.json except hashes; a JSON object.

    Args:
      algorithm: the method.
      params: the initial global model, pytree of arrays or shapes.
      clients: the clients' data.
      schedule: client sampling and mini-batches.
      **settings: settings of ``simulate`` that are written unchanged.
    """
    return {
        "algorithm": algorithm.name,
        "hyperparameters": dict(algorithm.hyperparameters),
        "partition": dataclasses.asdict(clients.partition),
        "num_clients": clients.num_clients,
        **schedule.record(),
        **settings,
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "versions": versions(),
    }


def run_contents(
    params: Params,
    state: FedState | None,
    examples: str,
    frozen: PyTree,
    **functions: Callable[..., Any] | None,
) -> dict[str, str | None]:
    """Hash a run's inputs; its program is hashed when it is lowered.

    Args:
      params: the initial global model.
      state: what it starts from; None: from ``params``.
      examples: of the clients' data.
      frozen: the frozen weights.
      **functions: by the names of ``simulate``'s arguments.
    """
    found = {
        "params": hash_arrays(params),
        "state": None if state is None else hash_arrays(state),
        "examples": examples,
        **{name: hash_function(function) for name, function in functions.items()},
    }
    if jax.tree.leaves(frozen):
        found["frozen"] = hash_arrays(frozen)
    return found
