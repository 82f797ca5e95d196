"""The settings of runs: what they are, how those of several runs differ, how they are shown."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_lab.descriptions import ARRAY, flat, format_value, text_of
from fedjax_lab.markdown import printable

_OBJECTS = ("gradient_transform", "step_transform", "server_optimizer")
# Not a setting: who runs it, on what, or a count that follows from the rest.
_NO_SETTING = {
    *("algorithm", "hyperparameters", "partition", "run_config", "data", "versions", "content"),
    *("seed", "partition_seed", "init_seed", "option", "model_option", "num_params"),
    *("asked", "functions", "devices", "num_devices", "personal_models"),
    "client_metrics",
}
_OF_ATTACK = ("attack", "attack_share", "attack_strength", "attack_seed")
# Settings that runs must have in common to be compared, besides data set and rounds.
SETTINGS = (
    *("target", "x", "task", "categories", "missing", "labels", "image_size"),
    *("partition", "num_clients", "min_client_size", "test_split"),
    *("cohort_size", "sampling", "local_steps", "local_epochs", "batch_size"),
    *("model", "compute_dtype", "sequence_length", "vocabulary_size", "tokens", "flip", "crop"),
    *("min_local_steps", "time_budget", "step_time", "step_time_spread", "dropout"),
    *("times", "over_selection", "deadline", "attack", "attack_share", "attack_strength"),
)
MODEL_OPTION = "model."  # before the name of one
_MANY = 8  # more values than fit into a cell, such as local steps of each client


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> value of what may change a run's numbers, except seeds, from config.json."""
    asked, given = config.get("run_config", {}), config.get("hyperparameters", {})
    partition, data = config.get("partition", {}), config.get("data", {})
    settings = {"partition": partition.get("spec")} if partition else {}
    for source in (asked, config, config.get("asked", {})):
        settings.update({k: v for k, v in source.items() if k not in _NO_SETTING})
    if "hash" in data:  # of a table that a seed divides, its own
        settings["data_hash"] = data.get("table", data["hash"])
    if asked:  # the settings of which the objects among the hyperparameters are made
        of_text = _OF_ATTACK if asked.get("attack") else ()  # run_config has its text
        given = {
            name: value
            for name, value in given.items()
            if name not in of_text and not _is_object(name, value)
        }
    else:
        settings |= {**(config.get("devices") or {}), **config.get("functions", {})}
        if "num_params" in config:
            named = f"{config['model']}, " if "model" in config else ""
            settings["model"] = f"{named}{config['num_params']:,} parameters"
    settings |= {**given, **asked.get("option", {})}
    if settings.get("attack_seed") == config["seed"]:  # the attackers that the run's seed draws
        del settings["attack_seed"]
    if arrays := config.get("arrays", {}):  # in place of what follows from them
        for name in ("local_steps", "local_epochs", "client_local_steps", "client_weights"):
            settings.pop(name, None)
        settings |= arrays
    model_options = asked.get("model_option", {})
    settings.update({f"model.{name}": value for name, value in model_options.items()})
    return {name: _without_hashes(value) for name, value in settings.items() if value is not None}


def _is_object(name: str, value: Any) -> bool:
    """Return True for a function or a transform, also as versions before 0.5 described them."""
    text = isinstance(value, str) and (name in _OBJECTS or value.startswith("function "))
    return text or isinstance(value, Mapping)


def _without_hashes(value: Any) -> Any:
    """Return a description without the hashes of its arrays, which may be those of a seed."""
    if isinstance(value, Mapping):
        hashed = ("hash",) if ARRAY in value else ()
        return {name: _without_hashes(v) for name, v in value.items() if name not in hashed}
    return [_without_hashes(part) for part in value] if isinstance(value, list) else value


def parts_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the parts of objects beside them, such as client_lr.decay_rate."""
    return {path: part for name, value in settings.items() for path, part in flat(value, name)}


def parts_that_differ(several: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of which values differ; where a name is missing, it counts as null.

    A part that is missing in another object follows from that object's name.
    """
    shared = names_that_differ(several, with_missing=False)
    names = names_that_differ(several)
    return [name for name in names if name in shared or name.rpartition(".")[0] not in names]


def names_that_differ(
    several: Sequence[Mapping[str, Any]], *, with_missing: bool = True
) -> list[str]:
    """Return the names of which values differ.

    Args:
      with_missing: whether a name counts as null where it is missing, or not at all.
    """

    def values(name: str) -> set[str]:
        return {json.dumps(one.get(name)) for one in several if with_missing or name in one}

    names = dict.fromkeys(name for one in several for name in one)
    return [name for name in names if len(values(name)) > 1]


def names_in_labels(methods: Sequence[str], parts: Sequence[Mapping[str, Any]]) -> dict[str, None]:
    """Return the names of which values differ between groups.

    A missing one counts only between groups of one method: others lack its own arguments.
    """
    names = dict.fromkeys(names_that_differ(parts, with_missing=False))
    for method in dict.fromkeys(methods):
        own = [one for of, one in zip(methods, parts, strict=True) if of == method]
        names |= dict.fromkeys(parts_that_differ(own))
    return names


def shown_parts(parts: Mapping[str, Any], names: Iterable[str]) -> str:
    """Format some parts of settings, such as "client_lr=0.1"; missing ones are left out."""
    return ", ".join(f"{printable(name)}={_short(parts[name])}" for name in names if name in parts)


def label_of(method: str, differs: str) -> str:
    """Return a label such as "fedavg (client_lr=0.1)"."""
    return f"{method} ({differs})" if differs else method


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else show(value)


def show(value: Any) -> str:
    """Format a setting's value as text."""
    is_described = isinstance(value, Mapping) or (
        isinstance(value, list) and any(isinstance(part, (Mapping, list)) for part in value)
    )
    if isinstance(value, list) and len(value) > _MANY and not is_described:
        return f"{format_value(value[:_MANY])},... ({len(value)} values)"
    if isinstance(value, list) and len(value) == 1:  # format_value marks it as a list
        (value,) = value
    return printable(text_of(value) if is_described else format_value(value))
