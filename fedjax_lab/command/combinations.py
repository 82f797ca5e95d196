"""Several runs by one command: all combinations of the settings with several values, and seeds."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_lab.checks import repeated
from fedjax_lab.command.build import check_methods
from fedjax_lab.command.config import FACTS, HINTS, RunConfig
from fedjax_lab.command.config_file import convert, kinds_of, read_settings
from fedjax_lab.command.options import algorithm_options, parse_options
from fedjax_lab.descriptions import format_value
from fedjax_lab.simulation.sweep_points import check_seeds
from fedjax_lab.storage.run_dir import CONFIG, renamed_settings

Lists = Mapping[str, tuple[Any, ...]]  # setting -> its values
_PLAIN = {str, int, float, type(None)}

# Settings of which `run` takes several values.
LISTED = tuple(
    name
    for name, facts in FACTS.items()
    if facts.in_grid and facts.is_recorded and _PLAIN.issuperset(kinds_of(HINTS[name]))
)


def read_runs(path: str | Path) -> tuple[RunConfig, dict[str, tuple[Any, ...]], tuple[int, ...]]:
    """Read a file whose settings may have several values: (the first ones, all lists, seeds).

    Args:
      path: YAML (.yaml, .yml) or JSON, as of ``RunConfig.from_file``. It may have ``seeds``, too.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError, TypeError: as ``RunConfig.from_file``; or a list is empty or has a value twice.
    """
    values = renamed_settings(read_settings(path))
    seeds = values.pop("seeds", [])
    try:
        if not isinstance(seeds, list):
            raise TypeError(f"seeds is {seeds!r}; it must be a list of integers.")
        lists = {
            name: tuple(convert(name, value, HINTS[name]) for value in given)
            for name, given in values.items()
            if name in LISTED and isinstance(given, list)
        }
        check_lists(lists)
        first = {name: given[0] for name, given in lists.items()}
        return RunConfig.from_dict({**values, **first}), lists, tuple(seeds)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from error


def list_runs(settings: RunConfig, lists: Lists, seeds: Sequence[int] = ()) -> list[RunConfig]:
    """Resolve the config of each run, in the order of the runs; all and their methods are checked.

    Each run has a directory in ``run_dir`` (None: in runs): seedN if only the seeds differ, else
    the name of the run with the settings that have several values.

    Args:
      seeds: each combination is run once with each of them. (): with ``seed``.

    Raises:
      ValueError, TypeError: as ``RunConfig.resolve``; an option is not one of all methods; a method
        refuses a wrapper; two runs would have the same directory; or ``run_dir`` is a run itself.
    """
    methods = lists.get("algorithm", (settings.method.algorithm,))
    check_shared_options(settings.method.option, methods)
    # Runs that differ in the last names only share a traced method.
    names = sorted(lists, key=lambda name: name == "partition")
    parent, configs = settings.output.run_dir, []
    if (names or seeds) and parent is not None and (Path(parent) / CONFIG).exists():
        raise ValueError(
            f"run_dir is {parent!r}, the directory of one run, inside of which reports read no "
            "others; several runs need a folder of their own. Choose another."
        )
    for values in itertools.product(*(lists[name] for name in names)):
        one = settings.replace(**dict(zip(names, values, strict=True)))
        one = one.replace(option=options_of(one.method.option, one.method.algorithm, methods))
        for seed in check_seeds(seeds) if seeds else (settings.rounds.seed,):
            config = one.replace(seed=seed)
            if names:
                name = config.with_clients().run_name(names)
                config = config.replace(run_dir=str(Path(parent or "runs") / name))
            elif seeds and parent is not None:
                config = config.replace(run_dir=str(Path(parent) / f"seed{seed}"))
            configs.append(config.resolve())
    if twice := repeated(config.output.run_dir for config in configs):
        raise ValueError(
            f"two runs would have the directory {twice}: the values of a setting differ only in "
            "what a name leaves out; run them one by one, each with its own --run-dir."
        )
    if len(configs) > 1:
        check_methods(configs)
    return configs


def check_lists(lists: Lists) -> None:
    """Check that each setting has at least one value, and none twice.

    Raises:
      ValueError: one has none, or one twice.
    """
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{name} has no value; give one or several.")
        if len(set(values)) < len(values):
            raise ValueError(f"{name} is {list(values)}; it has a value twice.")


class Assignment(NamedTuple):
    """A text NAME=VALUE of all methods, or METHOD.NAME=VALUE of one.

    Attributes:
      method: name of the method; "" for all.
      name: NAME.
      value: VALUE.
      text: NAME=VALUE, as it was given.
    """

    method: str
    name: str
    value: str
    text: str

    def is_of(self, method: str) -> bool:
        """Return True if it says something of a method."""
        return self.method in ("", method)


def read_assignments(
    argument: str, texts: Iterable[str], methods: Sequence[str]
) -> list[Assignment]:
    """Read texts NAME=VALUE and METHOD.NAME=VALUE.

    Args:
      texts: such as "momentum=0.5" or "scaffold.server_lr=1".

    Raises:
      ValueError: a method is none of these.
    """
    found = []
    for text in texts:
        left, equals, value = text.strip().partition("=")
        method, dot, name = left.rpartition(".")
        if dot and method not in methods:
            raise ValueError(f"{argument} is {text!r}; {method!r} is none of {', '.join(methods)}.")
        found.append(Assignment(method, name.strip(), value, f"{name}{equals}{value}"))
    return found


def check_shared_options(texts: Sequence[str], methods: Sequence[str]) -> None:
    """Check that all methods have the options that are given to all of them.

    Raises:
      ValueError: a method lacks an option, or is none of these.
    """
    of_all = (one.text for one in read_assignments("option", texts, methods) if not one.method)
    given = parse_options(of_all)
    takes = {method: algorithm_options(method, given.get("server_optimizer")) for method in methods}
    for name, value in given.items():
        lacking = [method for method in methods if name not in takes[method]]
        if lacking and len(lacking) < len(methods):
            has = next(method for method in methods if name in takes[method])
            raise ValueError(
                f"{name} is not an option of {', '.join(lacking)}; give it to one method alone, "
                f"such as --option {has}.{name}={format_value(value)}."
            )


def options_of(texts: Sequence[str], method: str, methods: Sequence[str]) -> tuple[str, ...]:
    """Return the options of one method.

    Raises:
      ValueError: a text is of another method than these.
    """
    said = read_assignments("option", texts, methods)
    return tuple(one.text for one in said if one.is_of(method))
