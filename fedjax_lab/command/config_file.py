"""Settings files in YAML or JSON, distinguished by their names."""

import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_lab.command.options import OPTIONS, as_float, fits, format_options, in_words
from fedjax_lab.machine.json_file import read_json

_YAML_SUFFIXES = (".yaml", ".yml")
# PyYAML follows YAML 1.1, where 1e-3 is text; here it is a number, as in YAML 1.2 and in JSON.
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)\Z")
_DEPTH = 5  # a run's config.json has settings in settings in settings
_FLOAT_TAG, _FLOAT_STARTS = "tag:yaml.org,2002:float", list("-+.0123456789")
_MERGE = "tag:yaml.org,2002:merge"
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")


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

    Dumper.add_implicit_resolver(_FLOAT_TAG, _FLOAT, _FLOAT_STARTS)
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
        options = name in OPTIONS.values()
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
        def construct_mapping(self, node, deep=False):
            if any(key.tag == _MERGE for key, _ in node.value):
                raise ValueError("<< merges settings of another place; write them out")
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for i, key in enumerate(keys):  # keys of YAML may have no hash
                if key in keys[:i]:
                    raise ValueError(f"{key!r} is given twice")
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node):
            if not _DECIMAL.match(node.value):  # 017 and 1:30 mean 15 and 90 in YAML 1.1
                raise ValueError(f"{node.value} is no decimal number; put text into quotes")
            return super().construct_yaml_int(node)

        def construct_yaml_float(self, node):
            if ":" in node.value:  # 1:30.5 means 90.5
                raise ValueError(f"{node.value} is no decimal number; put text into quotes")
            return super().construct_yaml_float(node)

    Loader.add_constructor(_FLOAT_TAG, Loader.construct_yaml_float)
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_implicit_resolver(_FLOAT_TAG, _FLOAT, _FLOAT_STARTS)
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
