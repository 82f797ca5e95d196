"""Reads the model of one client from a run directory of the command line."""

import shutil
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

from fedjax_lab.command.rerun import finished_config
from fedjax_lab.command.runner import simulate_setup
from fedjax_lab.command.setup import build
from fedjax_lab.data import FederatedArrays
from fedjax_lab.report.reading import read_summary
from fedjax_lab.report.runs import DIVERGED
from fedjax_lab.simulation.arguments import some_of
from fedjax_lab.simulation.evaluate_personal import client_models
from fedjax_lab.simulation.host_store import with_all_rows
from fedjax_lab.storage.run_dir import SUMMARY
from fedjax_lab.types import Params


def read_client_model(
    run_dir: str | Path, client: str | int, *, data_dir: str | None = None
) -> Params:
    """Read the model of one client of a finished run whose method has one for each client.

    Data and method are built again from the settings; no round is run. If the method fine-tunes,
    the model is the one that the run scored: after its steps on the client's training data. No file
    of the run is changed.

    Args:
      client: id in [0, N), or the client's name where clients have names; a name counts first.
      data_dir: folder with the files of the data set. None: the usual places.

    Raises:
      FileNotFoundError: there is no run, or the data set is not there.
      ValueError: the run has not ended or diverged, the command line did not make it, its method
        has one global model, or there is no such client.
      TypeError, ImportError: as ``runner.run``.
    """
    config = finished_config(run_dir).replace(data_dir=data_dir)
    if read_summary(Path(run_dir) / SUMMARY).get("stopped") == DIVERGED:
        raise ValueError(f"run_dir is {str(run_dir)!r}, a run that diverged.")
    with tempfile.TemporaryDirectory() as folder:  # reading changes no file of the run
        copy = shutil.copytree(run_dir, Path(folder) / "run")
        config = config.replace(run_dir=str(copy)).resolve()
        with warnings.catch_warnings():  # of rows, which this does not write
            warnings.filterwarnings("ignore", "rows have no personal_")
            setup = build(config)
        if setup.algorithm.personal is None:
            raise ValueError(
                f"client is {client}; {config.method.algorithm} has one global model: leave the "
                "client out."
            )
        client_id = _id_of(client, setup.clients)
        result = simulate_setup(config, setup, progress=False)
        models = client_models(
            setup.algorithm, setup.clients, config.rounds.batch_size, config.rounds.seed
        )
        found = models(with_all_rows(result.state), jnp.int32(client_id))
        return jax.device_get(found)


def _id_of(client: str | int, clients: FederatedArrays) -> int:
    names = clients.names or ()
    if str(client) in names:
        return names.index(str(client))
    last = clients.num_clients - 1
    if not str(client).isdecimal() or int(client) > last:
        named = f", or one of the names {some_of(names)}" if names else ""
        raise ValueError(f"client is {client!r}; it must be 0 to {last}{named}.")
    return int(client)
