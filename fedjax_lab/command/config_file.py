"""Settings files in YAML or JSON, distinguished by their names."""

import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_lab.command.options import as_float, fits, format_options, in_words
from fedjax_lab.machine.json_file import read_json

_YAML_SUFFIXES = (".yaml", ".yml")
_DEPTH = 5  # a run's config.json has settings in settings in settings
# PyYAML follows YAML 1.1, where 1e-3 is text, and 017, 1:30 and 0x10 are integers; here numbers are
# those of JSON, and all other words text.
_TAG, _STARTS = "tag:yaml.org,2002:", list("-+.0123456789")
_NUMBERS = {
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z"),
    "float": re.compile(
        r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)\Z"
    ),
}


def is_yaml(path: str | Path) -> bool:
    """Return True if a file's name is that of a YAML file.

    Args:
      path: the file; only its name counts.
    """
    return Path(path).suffix.lower() in _YAML_SUFFIXES


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read {setting: value} from YAML (.yaml, .yml) or else JSON.

    From a run directory's config.json it reads the settings of the run, ``run_config``.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it cannot be read, or has other contents.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config: there is no file {path}.")
    if is_yaml(path):
        try:
            values = _parse_yaml(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as YAML ({error}).") from error
    else:
        values = read_json(path)
    settings = values.get("run_config", values) if isinstance(values, dict) else None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"{path} holds no object {{setting: value}}.")
    return settings


def format_settings(values: Mapping[str, Any], form: str) -> str:
    """Format settings as the text of a file for ``read_settings``.

    Args:
      form: "yaml" or "json".
    """
    if form == "json":
        return json.dumps(values, indent=2, allow_nan=False) + "\n"
    import yaml

    class Dumper(yaml.SafeDumper):  # puts text that looks like a number into quotes
        pass

    Dumper.add_implicit_resolver(f"{_TAG}float", _NUMBERS["float"], _STARTS)
    return yaml.dump(dict(values), Dumper=Dumper, sort_keys=False, default_flow_style=False)


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a hint: those of a union, or the one that it is."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def convert(name: str, value: Any, hint: Any) -> Any:
    """Convert a value of a file to the type of its setting, if it can be one.

    Args:
      hint: type of the setting: str, int, float, bool, tuple[str, ...], or one of these or None.

    Raises:
      TypeError: it has another type.
    """
    kinds = kinds_of(hint)
    if value is None and types.NoneType in kinds:
        return None
    if typing.get_origin(hint) is tuple:
        options = name.endswith("option")
        if isinstance(value, Mapping) and options:
            return format_options(value)
        if isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value):
            return tuple(value)
        if isinstance(value, str):  # as on the command line
            return (value,)
        forms = '{name: value} or ["name=value", ...]' if options else '["name", ...]'
        raise TypeError(f"{name} is {value!r}; it must be {forms}.")
    if not fits(value, kinds):
        raise TypeError(f"{name} is {value!r}; it must be {in_words(kinds)}.")
    return as_float(name, value) if float in kinds else value


def _parse_yaml(text: str) -> Any:
    """Parse YAML like ``yaml.safe_load``; an empty file has no settings.

    Raises:
      ValueError: it is not YAML, or has other than plain values.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012
            start: [one for one in some if one[0] in (f"{_TAG}bool", f"{_TAG}null")]
            for start, some in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for i, key in enumerate(keys):  # keys of YAML may have no hash
                if key in keys[:i]:
                    raise ValueError(f"{key!r} is given twice")
            return super().construct_mapping(node, deep)

    for name, pattern in _NUMBERS.items():
        Loader.add_implicit_resolver(f"{_TAG}{name}", pattern, _STARTS)
    try:
        depth = 0
        for event in yaml.parse(text, Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEPTH:
                raise ValueError("it is nested too deeply")
        values = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return {} if values is None else values
