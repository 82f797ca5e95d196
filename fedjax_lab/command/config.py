"""Settings of one run as a value, for the command line, files and ``runner.run``.

Algorithms, data and models never see a ``RunConfig``: ``setup`` and ``runner`` turn it into keyword
arguments.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from fedjax_lab.checks import did_you_mean
from fedjax_lab.command.config_checks import check_config
from fedjax_lab.command.config_file import convert, read_settings
from fedjax_lab.command.options import (
    OPTIONS,
    check_options,
    check_server_lr,
    derived_options,
    format_options,
    parse_options_of,
    published_settings,
)
from fedjax_lab.command.settings import (
    NATURAL_SCHEME,
    ClockSettings,
    DataSettings,
    MachineSettings,
    MethodSettings,
    ModelSettings,
    OutputSettings,
    PrivacySettings,
    RoundsSettings,
    facts_of,
)
from fedjax_lab.signatures import SYNONYMS
from fedjax_lab.storage.run_dir import renamed_settings

_NUM_CLIENTS = 20


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings of one run, in groups. A file of settings and ``of`` have them side by side."""

    method: MethodSettings = dataclasses.field(default_factory=MethodSettings)
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    rounds: RoundsSettings = dataclasses.field(default_factory=RoundsSettings)
    clock: ClockSettings = dataclasses.field(default_factory=ClockSettings)
    privacy: PrivacySettings = dataclasses.field(default_factory=PrivacySettings)
    machine: MachineSettings = dataclasses.field(default_factory=MachineSettings)
    output: OutputSettings = dataclasses.field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        """Check that each group is one.

        Raises:
          TypeError: it is another value, such as a setting of the same name.
        """
        for group in dataclasses.fields(self):
            value, kind = getattr(self, group.name), group.default_factory
            if not isinstance(value, kind):  # type: ignore[arg-type]
                raise TypeError(
                    f"{group.name} is {value!r}; it must be {kind.__name__}(...). "  # type: ignore[union-attr]
                    f"RunConfig.of({group.name}={value!r}) takes settings by name."
                )

    @classmethod
    def of(cls, **settings: Any) -> "RunConfig":
        """Create a config from settings by name, such as ``of(algorithm="scaffold", rounds=3)``.

        Args:
          **settings: settings; the others have their defaults.

        Raises:
          ValueError: a name is unknown.
        """
        return cls().replace(**settings)

    def replace(self, **settings: Any) -> "RunConfig":
        """Return the config with other values of some settings.

        Args:
          **settings: settings by name.

        Raises:
          ValueError: a name is unknown.
        """
        for name in settings:
            if name not in DEFAULTS:
                hint = did_you_mean(name, DEFAULTS, SYNONYMS.get(name, ()))
                raise ValueError(
                    f"{name} is not a setting of a run.{hint} Settings: {', '.join(DEFAULTS)}."
                )
        changed = {
            group: dataclasses.replace(
                values, **{n: settings[n] for n in settings if n in vars(values)}
            )
            for group, values in vars(self).items()
        }
        return dataclasses.replace(self, **changed)

    def settings(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {name: value for group in vars(self).values() for name, value in vars(group).items()}

    def options(self) -> dict[str, dict[str, Any]]:
        """Return the options of the method, the model and the data set: setting -> {name: value}.

        Raises:
          ValueError: an option does not have the form name=value.
        """
        values = self.settings()
        return {
            setting: parse_options_of(setting, values[setting], values[options])
            for setting, options in OPTIONS.items()
        }

    @property
    def partition_seed(self) -> int:
        """Seed of the partition."""
        seed = self.data.partition_seed
        return self.rounds.seed if seed is None else seed

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Create a config from plain values; missing settings have their defaults.

        ``option`` and ``model_option`` may be {name: value} or a list of "name=value".

        Args:
          values: {setting: value}.

        Raises:
          ValueError: a key is unknown.
          TypeError: a value has the wrong type.
        """
        values = renamed_settings(values)
        known = {n: convert(n, value, HINTS[n]) for n, value in values.items() if n in HINTS}
        return cls.of(**{**values, **known})

    @classmethod
    def from_file(cls, path: str | Path) -> "RunConfig":
        """Read settings from YAML (.yaml, .yml) or JSON, such as a run directory's config.json.

        Args:
          path: the file.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError, TypeError: it has no settings, or as in ``from_dict``.
        """
        values = read_settings(path)
        try:
            return cls.from_dict(values)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Convert all settings to plain values of JSON and YAML, the inverse of ``from_dict``."""
        values = {name: _plain(value) for name, value in self.settings().items()}
        for setting, given in self.options().items():
            values[OPTIONS[setting]] = {name: _plain(value) for name, value in given.items()}
        return values

    def record(self) -> dict[str, Any]:
        """Return the settings for config.json: ``to_dict`` without paths.

        Settings that version 0.3 lacked are omitted if they have their defaults. Seeds that follow
        ``seed`` stay None, so that the record can be run with another seed.
        """
        values = self.settings()
        return {
            name: value
            for name, value in self.to_dict().items()
            if FACTS[name].is_recorded and (name in _OF_0_3 or values[name] != DEFAULTS[name])
        }

    def resolve(self) -> "RunConfig":
        """Check all settings, and fill in settings that depend on others.

        These are settings of the clients, ``local_steps``, required options of a method that have a
        default here, options of its published code if requested, and ``run_dir``.

        Raises:
          ValueError, TypeError: a setting is unknown, out of range, or missing.
        """
        config = self.with_clients()
        check_config(config)
        method, name = config.method, config.method.algorithm
        defaults, published = published_settings(name) if method.as_published else ({}, {})
        defaults = {"weight_decay": 0.0, **defaults}
        config = config.replace(**{n: v for n, v in defaults.items() if getattr(method, n) is None})
        values, options = config.settings(), config.options()
        derived = derived_options(name, config.data.num_clients)
        options["algorithm"] = {**derived, **published, **options["algorithm"]}
        checked = {
            OPTIONS[setting]: format_options(check_options(setting, values[setting], given))
            for setting, given in options.items()
        }
        check_server_lr(name, config.method.server_lr)
        steps, epochs = config.rounds.local_steps, config.rounds.local_epochs
        return config.replace(
            **checked,
            local_steps=5 if steps is None and epochs is None else steps,
            run_dir=config.output.run_dir or str(Path("runs") / config.run_name()),
        )

    def with_clients(self) -> "RunConfig":
        """Fill in the partition of data with clients, and the number and size of the clients.

        Raises:
          ValueError: a table's clients are given twice.
        """
        data, config = self.data, self
        by_column = f"{NATURAL_SCHEME}:{data.client}"
        if data.client is not None and data.partition != by_column:
            if data.partition != DEFAULTS["partition"]:
                raise ValueError(
                    f"partition is {data.partition!r} and client {data.client!r}; the column "
                    "determines the clients of the rows: omit partition."
                )
            config = config.replace(partition=by_column)
        elif data.is_federated and data.partition == DEFAULTS["partition"]:
            config = config.replace(partition=NATURAL_SCHEME)
        natural = config.data.is_natural
        if data.num_clients is None and not natural:
            config = config.replace(num_clients=_NUM_CLIENTS)
        if data.min_client_size is None:
            config = config.replace(min_client_size=1 if natural else 2)
        return config

    def schedule(self) -> dict[str, Any]:
        """Collect the keyword arguments about rounds and batches for ``simulate`` and ``sweep``.

        Raises:
          FileNotFoundError: there is no file of that name as ``times``.
          TypeError, ValueError: it is damaged, or a value is out of range.
        """
        rounds = self.rounds
        names = [name for name in vars(rounds) if name not in ("seed", "on_nonfinite")]
        given = {name: getattr(rounds, name) for name in names}
        return {**given, "devices": self.clock.devices(), "times": self.clock.client_times()}

    def run_name(self, varied: Collection[str] = ()) -> str:
        """Make a readable name from the settings, such as gradma-digits-dirichlet0.1-seed0.

        The name includes learning rates and options if they were given.

        Args:
          varied: settings to include although they have their defaults.
        """
        values, method = self.settings(), self.method
        given = [
            f"{name}{_short(name, values[name])}"
            for name in dict.fromkeys((*_IN_NAME, *varied))
            if name not in _FIRST and (name in varied or values[name] not in (None, DEFAULTS[name]))
        ]
        scheme, _, rest = self.data.dataset.partition(":")
        parts = [
            method.algorithm.rpartition(":")[2],
            scheme + (f"-{Path(rest).stem}" if rest else ""),
            self.data.partition,
            *([self.model.model.rpartition(":")[2]] if "model" in varied else []),
            *given,
            *method.option,
            *self.model.model_option,
        ]
        name = "-".join([*(part.rstrip(",") for part in parts), f"seed{self.rounds.seed}"])
        return re.sub(r"[^\w.,-]", "", name)


GROUPS = {name: type(group) for name, group in vars(RunConfig()).items()}
# Setting -> its default, its type, its facts.
DEFAULTS = RunConfig().settings()
HINTS = {name: hint for kind in GROUPS.values() for name, hint in get_type_hints(kind).items()}
FACTS = {f.name: facts_of(f) for kind in GROUPS.values() for f in dataclasses.fields(kind)}
# Settings that a sweep may vary, in addition to the method's own hyperparameters.
VARIED = tuple(name for name, facts in FACTS.items() if facts.is_varied)


def _short(name: str, value: Any) -> str:
    """Format a value for the name of a run; no colons are left, which separate numbers."""
    if name in ("client_lr", "server_lr") and value is not None:
        return f"{value:g}"
    if name == "client_lr_schedule":  # step:5:0.1 is step5,0.1
        return value.replace(":", "", 1).replace(":", ",")
    return str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# Recorded also if they have their defaults, as version 0.3 did; later settings are not, so that
# older runs, which lack them, have equal records.
_OF_0_3 = {
    *("algorithm", "option", "client_lr", "client_lr_schedule", "server_lr", "as_published"),
    *("clip_norm", "weight_decay", "clip", "compressor", "error_feedback", "downlink_compressor"),
    *("model", "model_option", "compute_dtype", "init_seed", "dataset", "sequence_length"),
    *("vocabulary_size", "partition", "num_clients", "min_client_size", "partition_seed", "flip"),
    *("crop", "rounds", "cohort_size", "local_steps", "local_epochs", "batch_size", "replace"),
    *("full_examples", "weights", "eval_every", "on_nonfinite", "seed", "min_local_steps"),
    *("time_budget", "step_time", "step_time_spread", "dropout", "times", "over_selection"),
    *("deadline", "concurrency", "client_map", "client_store"),
}
# At the beginning of a name.
_FIRST = ("algorithm", "dataset", "partition", "model")
# In the name of a run with another value than the default, in this order; others are there if a
# grid varies them.
_IN_NAME = (
    *("client_lr", "server_lr", "as_published", "clip", "client_lr_schedule", "compressor"),
    *("error_feedback", "downlink_compressor", "compute_dtype", *vars(PrivacySettings())),
    *("sampling", *(name for name in vars(ClockSettings()) if name != "times")),
)
