"""Checks of combinations of settings, before anything is loaded or built."""

from pathlib import Path
from typing import Any

from fedjax_lab.checks import check_choice, check_int
from fedjax_lab.command.factories import check_known, is_own
from fedjax_lab.command.schedules import client_schedule
from fedjax_lab.command.settings import (
    NATURAL,
    NATURAL_SCHEME,
    ClockSettings,
    DataSettings,
    MethodSettings,
    PrivacySettings,
    RoundsSettings,
    check_ranges,
    said_of,
)
from fedjax_lab.command.table_data import check_table
from fedjax_lab.data import PARTITIONS, ClientTimes
from fedjax_lab.data.clock import check_devices
from fedjax_lab.data.partition import parse_spec
from fedjax_lab.data.sources import SCHEMES, TABLES, check_load_options
from fedjax_lab.wrappers.accountants import check_bands
from fedjax_lab.wrappers.attacks import ATTACKS
from fedjax_lab.wrappers.rules import check_cohort, parse_rule
from fedjax_lab.wrappers.secure import check_bits, check_neighbours

_FORM = "NAME:SHARE or NAME:SHARE:STRENGTH (label_flip:SHARE:CLASSES)"


def check_config(config: Any) -> None:
    """Check all settings except the options of the method and of the model.

    Raises:
      ValueError, TypeError: a setting is unknown, out of range, or incompatible with another.
      FileNotFoundError: ``data_dir`` is not a directory.
    """
    check_known("algorithm", config.method.algorithm)
    check_known("model", config.model.model)
    check_table(config.data)
    if config.data.scheme not in (*SCHEMES, *TABLES):
        check_known("dataset", config.data.dataset)
    for group in vars(config).values():
        check_ranges(group)
    _check_data(config.data)
    _check_clients(config.data)
    _check_method(config.method, config.rounds.rounds)
    _check_privacy(config.privacy, config.rounds)
    _check_rounds(config.rounds, config.clock, config.data.num_clients)


def _check_method(method: MethodSettings, rounds: int) -> None:
    client_schedule(method.client_lr_schedule, method.client_lr, rounds)
    if not (method.error_feedback or method.compressor or method.downlink_compressor):
        raise ValueError(
            "error_feedback is False and compressor None; it belongs to a compressor: omit it, or "
            "give one. For cfedavg, it is --option error_feedback=false."
        )
    if method.clip is not None and method.as_published:
        raise ValueError(
            f"clip is {method.clip!r}; with as_published, the published code decides that."
        )
    if method.clip is not None and not (method.clip_norm or method.weight_decay):
        raise ValueError(
            f"clip is {method.clip!r} without clip_norm or weight_decay; give one of them, which "
            "clip applies to."
        )


def _check_rounds(rounds: RoundsSettings, clock: ClockSettings, num_clients: int | None) -> None:
    """Check the local work and its simulated time, without reading the file of times."""
    check_int("cohort_size", rounds.cohort_size, minimum=1, maximum=num_clients)
    if clock.concurrency is not None:
        check_int("concurrency", clock.concurrency, minimum=rounds.cohort_size)
    if rounds.local_steps is not None and rounds.local_epochs is not None:
        raise ValueError(
            f"local_steps is {rounds.local_steps} and local_epochs {rounds.local_epochs}; set one."
        )
    if clock.min_local_steps is not None and rounds.local_epochs is None:
        steps = 5 if rounds.local_steps is None else rounds.local_steps
        check_int("min_local_steps", clock.min_local_steps, minimum=1, maximum=steps)
    devices = clock.devices()
    if clock.times is not None:
        policy = ClientTimes(over_selection=clock.over_selection, deadline=clock.deadline)
        check_devices(policy, devices)


def _check_data(data: DataSettings) -> None:
    """Check that the data set and its partition use the settings that are given for them."""
    if data.data_dir is not None and not Path(data.data_dir).is_dir():
        raise FileNotFoundError(f"data_dir is {data.data_dir!r}; there is no such directory.")
    check_load_options(data.dataset, **data.load_options())
    if data.is_natural and not data.is_table and data.partition_seed is not None:
        raise ValueError(
            f"partition_seed is {data.partition_seed} and partition {data.partition!r}; the "
            "clients' ids determine the partition: omit it."
        )


def _check_clients(data: DataSettings) -> None:
    """Check the partition, and where the clients' own ids come from."""
    scheme, _, column = data.partition.partition(":")
    schemes = (form.partition(":")[0] for form in PARTITIONS)
    check_choice("partition", scheme, (*schemes, NATURAL_SCHEME))
    if not data.is_natural:
        with said_of("partition", data.partition):
            parse_spec(data.partition)
        return
    own = is_own("dataset", data.dataset) or data.is_federated
    where = f"partition is {data.partition!r} and dataset {data.dataset!r}"
    if own and column:
        raise ValueError(
            f"{where}; a data set that comes with its clients takes --partition natural."
        )
    if not (column or own):
        raise ValueError(
            f"partition is {data.partition!r}; it must be {NATURAL}, with the name of an "
            "array of ids in the data's .npz file."
        )
    if data.is_table and data.client is None:
        raise ValueError(f"{where}; say with --client {column} which column has the clients' ids.")
    if not own and data.scheme not in ("npz", *TABLES):
        raise ValueError(
            f"{where}; clients' ids are read from npz:FILE, csv:FILE and parquet:FILE. Of other "
            "data, give them in Python: data.partition(train, ids), data.from_table, "
            "data.from_tfds."
        )
    if data.num_clients is not None:
        raise ValueError(
            f"num_clients is {data.num_clients}; with {data.partition} the ids determine "
            "the number of clients: omit num_clients."
        )


def _check_privacy(privacy: PrivacySettings, rounds: RoundsSettings) -> None:
    """Check the settings of the wrappers, whose single ranges are checked."""
    if rounds.sampling == "without_replacement":  # else slots are another number
        size, bits = rounds.cohort_size, privacy.secure_bits
        if privacy.robust_rule is not None:
            with said_of("robust_rule", privacy.robust_rule):
                check_cohort("this run", parse_rule(privacy.robust_rule), size)
        if bits is not None:
            with said_of("secure_bits", bits):
                check_bits("a cohort", bits, size)
    if privacy.dp_noise_multiplier is not None and rounds.weights != "uniform":
        raise ValueError(
            f"weights is {rounds.weights!r} and dp_clip_norm {privacy.dp_clip_norm}; with "
            "privacy every client counts once: weights must be 'uniform'."
        )
    if privacy.dp_noise_bands is not None:
        with said_of("dp_noise_bands", privacy.dp_noise_bands):
            check_bands(privacy.dp_noise_bands, rounds.sampling)
    if privacy.secure_neighbours is not None:
        check_neighbours(privacy.secure_neighbours, "secure_neighbours")
    if privacy.attack is not None:
        parse_attack(privacy.attack)


def parse_attack(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a text such as "sign_flip:0.2:5" into (attack, arguments of ``with_attack``).

    Args:
      text: name of the attack, share of attacking clients, and strength (for label_flip, the number
        of classes).

    Raises:
      ValueError: it has another form, or the attack is unknown.
    """
    name, *given = text.split(":")
    check_choice("attack", name, ATTACKS)
    try:
        share, *rest = map(float, given)
        if len(rest) > 1:
            raise ValueError
        strength = rest[0] if rest else None
        if name == "label_flip":
            if strength is None or strength != int(strength):
                raise ValueError
            return name, {"share": share, "num_classes": int(strength)}
    except (OverflowError, ValueError):  # the former of an infinite number of classes
        raise ValueError(f"attack is {text!r}; it must be of the form {_FORM}.") from None
    return name, {"share": share, "strength": strength}
