"""Checks of a run's settings and of their combinations."""

from pathlib import Path
from typing import Any

from fedjax_lab.checks import LAST_SEED, MOST_ROUNDS, check_choice, check_int, check_number
from fedjax_lab.clients.mapping import check_client_map
from fedjax_lab.command.guards import check_guards
from fedjax_lab.command.options import check_clip, client_schedule
from fedjax_lab.command.own_code import check_known, is_own
from fedjax_lab.command.table_data import check_table, is_table
from fedjax_lab.compressors import as_compressor
from fedjax_lab.data import PARTITIONS, ClientTimes
from fedjax_lab.data.sources import SCHEMES, TABLES, check_load_options
from fedjax_lab.data.text import TOKENS
from fedjax_lab.data.times import check_devices
from fedjax_lab.machine.target import LOWERINGS
from fedjax_lab.models import COMPUTE_DTYPES
from fedjax_lab.round import ON_NONFINITE
from fedjax_lab.simulation.loggers import LOGGERS
from fedjax_lab.simulation.placement import CLIENT_STORES
from fedjax_lab.storage.run_path import check_run_dir

# A partition of the command line alone: in Python, ids are an array.
NATURAL = "natural:ARRAY"
NATURAL_SCHEME = "natural"


def is_natural(partition: str) -> bool:
    """Return True if a partition uses the clients' own ids.

    Args:
      partition: as in ``RunConfig``.
    """
    return partition.partition(":")[0] == NATURAL_SCHEME


def check_config(config: Any) -> None:
    """Check all settings except the options of the method and of the model.

    Args:
      config: a ``RunConfig``, not yet resolved.

    Raises:
      ValueError, TypeError: a setting is unknown, out of range, or incompatible with another.
      FileNotFoundError: ``data_dir`` is not a directory.
    """
    check_run_dir(config.run_dir)
    check_known("algorithm", config.algorithm)
    check_known("model", config.model)
    check_table(config)
    if config.dataset.partition(":")[0] not in (*SCHEMES, *TABLES):
        check_known("dataset", config.dataset)
    _check_data(config)
    _check_clients(config)
    check_choice("compute_dtype", config.compute_dtype, COMPUTE_DTYPES)
    check_choice("lowering", config.lowering, LOWERINGS)
    check_choice("weights", config.weights, ("uniform", "examples"))
    check_client_map(config.client_map)
    check_choice("client_store", config.client_store, CLIENT_STORES)
    check_choice("on_nonfinite", config.on_nonfinite, (*ON_NONFINITE, "stop"))
    check_number("client_lr", config.client_lr, minimum=0.0)
    client_schedule(config.client_lr_schedule, config.client_lr, config.rounds)
    for name in config.log:
        check_choice("log", name, LOGGERS)
    for name in ("compressor", "downlink_compressor"):
        if getattr(config, name) is not None:
            as_compressor(name, getattr(config, name))
    if not config.error_feedback and config.compressor is None:
        raise ValueError(
            "error_feedback is False and compressor None; it belongs to a compressor: omit it, or "
            "give one. For cfedavg, it is --option error_feedback=false."
        )
    check_guards(config)
    _check_times(config)
    if config.server_lr is not None:
        check_number("server_lr", config.server_lr, minimum=0.0)
    if config.clip_norm is not None:
        check_number("clip_norm", config.clip_norm, minimum=0.0, exclusive_minimum=True)
    if config.weight_decay is not None:
        check_number("weight_decay", config.weight_decay, minimum=0.0)
    if config.clip is not None:
        check_clip(config.clip, config.as_published, bool(config.clip_norm or config.weight_decay))
    for name in ("rounds", "batch_size", "eval_every", "sequence_length"):
        check_int(name, getattr(config, name), minimum=1, maximum=MOST_ROUNDS)
    check_choice("tokens", config.tokens, TOKENS)
    if config.vocabulary_size is not None:
        check_int("vocabulary_size", config.vocabulary_size, minimum=2)
    for name in ("local_steps", "local_epochs", "checkpoint_every"):
        if getattr(config, name) is not None:
            check_int(name, getattr(config, name), minimum=1, maximum=MOST_ROUNDS)
    for name in ("seed", "partition_seed", "init_seed"):
        if getattr(config, name) is not None:
            check_int(name, getattr(config, name), minimum=0, maximum=LAST_SEED)
    check_int("crop", config.crop, minimum=0)
    if config.min_local_steps is not None and config.local_epochs is None:
        steps = 5 if config.local_steps is None else config.local_steps
        check_int("min_local_steps", config.min_local_steps, minimum=1, maximum=steps)
    if config.data_dir is not None and not Path(config.data_dir).is_dir():
        raise FileNotFoundError(f"data_dir is {config.data_dir!r}; there is no such directory.")
    if config.local_steps is not None and config.local_epochs is not None:
        raise ValueError(
            f"local_steps is {config.local_steps} and local_epochs {config.local_epochs}; set one."
        )


def _check_data(config: Any) -> None:
    """Check that the data set and its partition use the settings that are given for them."""
    check_load_options(
        config.dataset,
        data_dir=config.data_dir,
        sequence_length=config.sequence_length,
        vocabulary_size=config.vocabulary_size,
        tokens=config.tokens,
    )
    if is_table(config.dataset):
        return
    if config.test_split != type(config).test_split:
        raise ValueError(
            f"test_split is {config.test_split!r} and dataset {config.dataset!r}; only a table, "
            "csv:FILE or parquet:FILE, is split: omit it."
        )
    if is_natural(config.partition) and config.partition_seed is not None:
        raise ValueError(
            f"partition_seed is {config.partition_seed} and partition {config.partition!r}; the "
            "clients' ids determine the partition: omit it."
        )


def _check_times(config: Any) -> None:
    """Check the settings of time without reading the file of times."""
    policy = ClientTimes(over_selection=config.over_selection, deadline=config.deadline)
    if config.times is not None:
        check_devices(policy, config.devices())
        return
    config.devices()
    for name in ("over_selection", "deadline"):
        if getattr(policy, name) != getattr(ClientTimes, name):
            raise ValueError(
                f"{name} is {getattr(policy, name)} and times None; it needs a file of times."
            )


def _check_clients(config: Any) -> None:
    """Check the clients, their number, and the cohort size."""
    scheme, _, column = config.partition.partition(":")
    schemes = (form.partition(":")[0] for form in PARTITIONS)
    check_choice("partition", scheme, (*schemes, NATURAL_SCHEME))
    if scheme == NATURAL_SCHEME:
        own = is_own("dataset", config.dataset)
        if own and column:
            raise ValueError(
                f"partition is {config.partition!r} and dataset {config.dataset!r}; a data set of "
                "your own that comes with its clients takes --partition natural."
            )
        if not (column or own):
            raise ValueError(
                f"partition is {config.partition!r}; it must be {NATURAL}, with the name of an "
                "array of ids in the data's .npz file."
            )
        if is_table(config.dataset) and config.client is None:
            raise ValueError(
                f"partition is {config.partition!r} and dataset {config.dataset!r}; say with "
                f"--client {column} which column has the clients' ids."
            )
        if not own and config.dataset.partition(":")[0] not in ("npz", *TABLES):
            raise ValueError(
                f"partition is {config.partition!r} and dataset {config.dataset!r}; clients' ids "
                "are read from npz:FILE, csv:FILE and parquet:FILE. Of other data, give them in "
                "Python: data.partition(train, ids), data.from_table, data.from_tfds."
            )
        if config.num_clients is not None:
            raise ValueError(
                f"num_clients is {config.num_clients}; with {config.partition} the ids determine "
                "the number of clients: omit num_clients."
            )
    if config.num_clients is not None:
        check_int("num_clients", config.num_clients, minimum=1)
    check_int("cohort_size", config.cohort_size, minimum=1, maximum=config.num_clients)
    if config.concurrency is not None:
        check_int("concurrency", config.concurrency, minimum=config.cohort_size)
    if config.min_client_size is not None:
        check_int("min_client_size", config.min_client_size, minimum=0)
