"""Settings that a command does not use: to give one is an error.

A file of ``--config`` describes a run, and every command takes what it uses. What a command does
not use is refused in a file, too, unless the results do not depend on it, as on the rounds between
evaluations in a run's config.json.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from fedjax_lab.command.config import DEFAULTS, RunConfig
from fedjax_lab.command.options import parse_options

_NO_RUN = "it keeps no run directory; omit it, or use run"
_OF_A_RUN = dict.fromkeys(("run_dir", "checkpoint_every", "log", "profile_dir"), _NO_RUN)
_OF_ONE_RUN = dict.fromkeys(("checkpoint_every", "log", "profile_dir"), "omit it, or use run")
# command -> setting -> why, and what to do instead.
NOT_USED: dict[str, dict[str, str]] = {
    "run": {},
    "plan": {
        **_OF_A_RUN,
        "dp_delta": "it reports no epsilon; omit it",
        "eval_every": "it plans one round; omit it",
    },
    "sweep": {
        **_OF_ONE_RUN,
        "on_nonfinite": "it has its own policy for values that are not finite, exclude; omit it, "
        "or use run",
        "client_store": "it keeps client state on the devices; omit it, or use run",
        "lowering": "it takes the forms that are fast on this machine; omit it, or use run",
    },
    "tune": {
        **_OF_A_RUN,
        "run_dir": "it has no run directory; --keep-in names the folder of the search",
        "on_nonfinite": "it has its own policy for values that are not finite, exclude; omit it",
        "client_store": "it keeps client state on the devices; omit it",
        "client_map": "it maps the runs of the search; omit it",
        "lowering": "it takes the forms that are fast on this machine; omit it",
        "dp_delta": "it reports no epsilon; omit it",
        "eval_every": "it evaluates after each ninth of the rounds; omit it, or see --average",
    },
}
# What a file may say of a run although a command does not use it: the results do not depend on it.
_NO_MATTER = ("client_map", "client_store", "lowering", "dp_delta", "eval_every")
# Flags of run that mean nothing with --print-config.
_NOT_PRINTED = (
    *("seeds", "cpu_devices", "distributed", "quiet"),
    *("coordinator", "num_processes", "process_id"),
)


def check_settings(name: str, settings: RunConfig, file: RunConfig) -> None:
    """Check that a command uses all settings that differ from their defaults.

    Args:
      name: the command.
      settings: the settings, of flags and file.
      file: the settings of the file alone, or the defaults.

    Raises:
      ValueError: a setting is not used.
    """
    values, of_file = settings.settings(), file.settings()
    for setting, instead in NOT_USED[name].items():
        value = values[setting]
        no_matter = setting in _NO_MATTER and value == of_file[setting]
        if value != DEFAULTS[setting] and not no_matter:
            raise _unused(name, setting, value, instead)


def check_command(name: str, command: Any, file: RunConfig) -> None:
    """Check that a command uses all its flags.

    Args:
      name: the command, a key of ``NOT_USED``.
      command: as parsed.
      file: the settings of the file of --config, or the defaults.

    Raises:
      ValueError: a flag is not used, or has no effect beside another one.
    """
    settings = command.settings
    check_settings(name, settings, file)
    if name == "run":
        _check_run(command, file)
    if name in ("sweep", "tune"):
        flag, names = _varied(name, command)
        of_file = file.settings()
        given = {
            setting: value
            for setting, value in settings.settings().items()
            if setting in names and value != of_file[setting]
        }
        before = parse_options(file.method.option)
        for option, value in parse_options(settings.method.option).items():
            if option in names and before.get(option) != value:
                given[f"option {option}"] = value
        for setting, value in given.items():
            raise ValueError(
                f"{setting} is {value!r}, and {flag} varies it: `fedjax-lab {name}` uses the "
                f"values of {flag} alone; omit one of them."
            )


def _check_run(command: Any, file: RunConfig) -> None:
    """Check the flags of ``run`` that have no effect beside --seeds or --print-config."""
    if command.seeds and command.settings.rounds.seed != file.rounds.seed:
        raise ValueError(
            f"seed is {command.settings.rounds.seed} and seeds {list(command.seeds)}; "
            "`fedjax-lab run` uses --seeds alone: omit --seed."
        )
    if command.print_config is None:
        return
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if field.name in _NOT_PRINTED and value != field.default:
            raise _unused("run --print-config", field.name, value, "it runs nothing; omit it")


def _varied(name: str, command: Any) -> tuple[str, set[str]]:
    """Return (flag, hyperparameters of which it gives all values)."""
    if name == "sweep":
        return "--point", _names(command.point)
    methods = command.methods or (command.settings.method.algorithm,)
    of_methods = [
        _names(text.removeprefix(f"{method}.") for text in command.space) for method in methods
    ]
    return "--space", set.intersection(*of_methods)


def _names(texts: Iterable[str]) -> set[str]:
    return {text.partition("=")[0].strip() for text in texts}


def _unused(command: str, name: str, value: Any, instead: str) -> ValueError:
    flag = name.replace("_", "-")
    return ValueError(
        f"{name} is {value!r}; `fedjax-lab {command}` does not use --{flag}: {instead}."
    )
