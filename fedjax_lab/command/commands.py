"""The commands of the command line: a dataclass for each, and the parser."""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import operator
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import tyro

from fedjax_lab.command import listings
from fedjax_lab.command.combinations import (
    LISTED,
    Lists,
    check_lists,
    check_shared_options,
    options_of,
    read_assignments,
    read_runs,
)
from fedjax_lab.command.config import DEFAULTS, FACTS, GROUPS, HINTS, RunConfig
from fedjax_lab.command.config_file import kinds_of
from fedjax_lab.command.options import parse_options

PROG = "fedjax-lab"
_NO_FLAG = (tyro.conf.Fixed, tyro.conf.Suppress)
_WORDS = {str: "STR", int: "INT", float: "FLOAT"}
# Flags about the processes of a run -> the environment variables that can stand for them.
OF_PROCESSES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
_InGroups = Annotated[RunConfig, tyro.conf.arg(name="")]  # flags are called as settings are


def flag_of(name: str) -> str:
    """Return the flag of an argument."""
    return f"--{name.replace('_', '-')}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Debug:
    debug: bool = False
    """Show the traceback of an error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Quiet(_Debug):
    quiet: bool = False
    """Print errors only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Configured(_Debug):
    config: str | None = None
    """YAML or JSON file with settings, or the config.json of a run; flags override it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Computing(_Configured, _Quiet):
    cpu_devices: int | None = None
    """Number of CPU devices; clients, or the runs of a sweep, are spread over them. None: one per
    core."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Searching(_Computing):
    quiet: bool = False
    """Print the table and errors only."""


@dataclasses.dataclass(frozen=True)
class RunCommand(_Computing):
    """Run a simulation, or resume it with the same command.

    For example:

      fedjax-lab run --algorithm scaffold --partition dirichlet:0.3 --rounds 200

      fedjax-lab run --dataset csv:users.csv --client user_id --target response --model linear

    Several values of settings are a grid: all combinations run one after the other, and the methods
    are compared at its end.

      fedjax-lab run --algorithm fedavg scaffold --partition iid dirichlet:0.1 --seeds 0 1 2
    """

    settings: _InGroups

    lists: Annotated[tuple[tuple[str, tuple[Any, ...]], ...], *_NO_FLAG] = ()

    seeds: tuple[int, ...] = ()
    """Run once for each of these seeds, one after the other. With run_dir: in RUN_DIR/seedN; if
    other settings have several values, too, in RUN_DIR/NAME-seedN."""

    print_config: Literal["yaml", "json"] | None = None
    """Print all settings as such a file, without running."""

    distributed: bool = False
    """Join a run of several processes; start the same command in each. On a TPU pod, and under
    SLURM, Open MPI or Kubernetes, the other flags are detected."""

    coordinator: str | None = None
    """HOST:PORT of process 0. None: JAX_COORDINATOR_ADDRESS."""

    num_processes: int | None = None
    """Number of processes. None: JAX_NUM_PROCESSES."""

    process_id: int | None = None
    """Index of this process; process 0 writes the files. None: JAX_PROCESS_ID."""


@dataclasses.dataclass(frozen=True)
class PlanCommand(_Configured):
    """Plan a round on this machine or another one, without running it.

    If the machine's compiler is installed, it gives the figures; this needs no accelerator.
    """

    settings: _InGroups

    target: str = "here"
    """here, a chip (v4, v5e, v5p, v6e, a100, h100, h200), several of them (v5e:2x2, v4:2x2x1,
    h200:8), or cpu."""


@dataclasses.dataclass(frozen=True)
class SweepCommand(_Searching):
    """Run all combinations of hyperparameters with all seeds, as one compiled program.

    All runs share one partition, that of partition_seed (or seed), and the attackers of seed. With
    run_dir, the same command resumes.
    """

    settings: _InGroups

    point: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Values of a hyperparameter as name=value,value: client_lr, server_lr, clip_norm,
    weight_decay, dp_clip_norm, dp_noise_multiplier, or a float option of the method. Several flags
    give all combinations."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; each point is run once with each seed."""

    out: str | None = None
    """CSV file for the table: a line for each point and metric."""


@dataclasses.dataclass(frozen=True)
class TuneCommand(_Searching):
    """Tune one or several methods on validation data, by successive halving.

    All methods spend the same number of gradients; the test set is not read.
    """

    settings: _InGroups

    methods: tuple[str, ...] = ()
    """Methods to tune; `--algorithm` takes several as well."""

    space: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Hyperparameter to tune, as name=log:low:high or name=value,value; METHOD.name= for one
    method only."""

    score: Literal["loss", "accuracy"] = "loss"
    """Score of a point: its mean over the validation examples, without dropout and augmentation."""

    validation: float = 0.2
    """Share of the data that is held out to score the points."""

    hold_out: Literal["examples", "clients"] = "examples"
    """What is held out: a share of each client's examples, or a share of the clients."""

    budget: int = 24
    """Number of initial points of the method with the most gradients per local step; the others
    get as many gradients, and so more points."""

    finalists: int = 2
    """Number of points of each method that run to the end, with all seeds."""

    start_point: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A value of a point that is known to be good, as name=value; METHOD.name= for one method only.
    The search tries this point first and runs it to the end."""

    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the finalists; earlier comparisons use the first one."""

    average: int = 1
    """Score a point by the mean of this number of last evaluations; there is one after each ninth
    of the rounds."""

    sampler: Literal["random", "tpe"] | None = None
    """Sampler of optuna that proposes the points (extra `tune`). None: even points."""

    keep_in: str | None = None
    """Folder for the search; the same command resumes it."""

    out: str | None = None
    """File with all trials: Markdown if it ends in .md, else CSV."""

    figure: str | None = None
    """PNG file with the score of each trial over each hyperparameter."""


@dataclasses.dataclass(frozen=True)
class ReportCommand(_Quiet):
    """Write report.md and report.html with tables and figures over runs; or print a table."""

    runs: tuple[str, ...]
    """Run directories, or folders that contain run directories."""

    out: str | None = None
    """Folder for the report. None: the run directory, or `report` beside several. With --format: a
    file for the text. None: print it."""

    format: Literal["markdown", "html", "latex", "csv"] | None = None
    """Write one text instead of a folder: markdown (tables), html (a page with figures), latex (a
    table of accuracies, for booktabs) or csv (a line for each group and metric)."""

    figures: Literal["png", "pdf", "svg"] = "png"
    """Format of the figures. pdf and svg add figures for a paper: vector graphics with embedded
    fonts, as wide as a column."""

    target: float | None = None
    """Target accuracy, such as 0.9. None: 95 % of the best method's."""

    rows: str | None = None
    """What the rows of a first table stand for; with --columns, such as --rows method --columns
    partition. With --format: print only this table."""

    columns: str | None = None
    """What its columns stand for: a setting, such as partition, num_clients, cohort_size,
    local_steps, batch_size, model or dataset; or method, with a setting as rows."""

    metric: str | None = None
    """Compare the runs by this number of metrics.jsonl, such as f1. None: accuracy,
    mean_squared_error or perplexity."""

    mode: Literal["max", "min"] = "max"
    """With --metric: whether more is better (max) or less (min)."""

    compare: tuple[str, ...] = ()
    """Settings to compare like methods, such as deadline: runs that differ in them share a
    section."""


@dataclasses.dataclass(frozen=True)
class ExportCommand(_Quiet):
    """Write the model of a run to a file, under names like blocks_0/dense/kernel."""

    run_dir: Annotated[str, tyro.conf.arg(metavar="RUN_DIR")]
    """Run directory; the model is that of its last checkpoint."""

    file: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """File to write: .npz (NumPy), .safetensors (PyTorch, JAX and others) or .pt (PyTorch)."""

    client: str | None = None
    """Id (from 0) or name of a client whose own model to write, of a method with such models."""

    data_dir: str | None = None
    """With --client: folder with the files of the data set. None: the usual places."""


@dataclasses.dataclass(frozen=True)
class RerunCommand(_Quiet):
    """Repeat a finished run from its config.json; compare metrics and params bit for bit.

    Exit status 1 means that they differ; the first difference and differing versions are printed.
    """

    run_dir: Annotated[str, tyro.conf.arg(metavar="RUN_DIR")]
    """Run directory."""

    quiet: bool = dataclasses.field(default=False, kw_only=True)
    """Print whether they differ, and errors, only."""

    out: str | None = None
    """Directory of the repetition. None: RUN_DIR-rerun."""

    data_dir: str | None = None
    """Folder with the files of the data set. None: the usual places."""


class ListCommand:
    """A command that prints a text.

    Attributes:
      text: function of ``listings``, which takes the command's arguments.
    """

    text: ClassVar[Callable[..., str]]


@dataclasses.dataclass(frozen=True)
class AlgorithmsCommand(ListCommand):
    """List the methods: paper, traffic, client state, gradients, options and defaults."""

    text = staticmethod(listings.algorithms)

    markdown: bool = False
    """Print them as a page of Markdown."""


@dataclasses.dataclass(frozen=True)
class RecipeCommand(ListCommand):
    """Print a short program to start from, such as recipe ditto > mine.py; without it, list all."""

    text = staticmethod(listings.recipe)

    name: Annotated[str | None, tyro.conf.arg(metavar="NAME"), tyro.conf.Positional] = None
    """Name of the recipe. None: list all."""


def _listing(text: Callable[[], str]) -> type[ListCommand]:
    """Make the command without arguments that prints what a function of ``listings`` returns."""
    namespace = {"__doc__": text.__doc__, "text": staticmethod(text)}
    return dataclasses.make_dataclass(text.__name__, [], bases=(ListCommand,), namespace=namespace)


_METHODS_OF_TUNE = re.compile(r"^--algorithm(=|$)")


def parse(argv: list[str]) -> Any:
    """Parse the arguments into a command; the file of --config gives the defaults.

    Raises:
      SystemExit: help was requested, or an argument is not understood.
      FileNotFoundError, ValueError, TypeError: as in ``RunConfig.from_file``; or the command does
        not use a flag or a setting of the file.
    """
    if argv[:1] == ["tune"]:  # a setting of one value elsewhere
        argv = [_METHODS_OF_TUNE.sub(r"--methods\1", text) for text in argv]
        if sum(text.partition("=")[0] == "--methods" for text in argv) > 1:
            raise ValueError("tune has --methods (or --algorithm) twice; give all methods at once.")
    # tyro looks only at stdout, but its errors go to stderr.
    plain = os.environ.get("NO_COLOR") or not (sys.stdout.isatty() and sys.stderr.isatty())
    tyro._experimental_options["ansi_codes"] = not plain
    name = argv[0] if argv and argv[0] in _WITH_SETTINGS else ""
    first = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    first.add_argument("--config", nargs="?")
    path = first.parse_known_args(argv)[0].config if name else None
    lists: Lists = {}
    seeds: tuple[int, ...] = ()
    if path is None:
        file = RunConfig()
    elif name == "run":
        file, lists, seeds = read_runs(path)
    else:
        file = RunConfig.from_file(path)
        _check_file(name, path, file)
    shown = _in_paragraphs if {"-h", "--help"} & set(argv) else lambda kind: kind
    commands: list[Any] = []
    for n, kind in _WITH_SETTINGS.items():
        default = shown(kind)(settings=_as_flags(n, file, lists, shown))
        default = dataclasses.replace(default, seeds=seeds) if n == "run" else default
        commands += [Annotated[shown(kind), tyro.conf.subcommand(n, default=default)]]
    for n, kind in _WITHOUT_SETTINGS.items():
        commands += [Annotated[shown(kind), tyro.conf.subcommand(n)]]
    union: Any = functools.reduce(operator.or_, commands)
    command = tyro.cli(
        union,
        prog=PROG,
        description="Federated learning in JAX: run simulations, and report on them. --version "
        "prints the version, --tyro-print-completion bash (zsh, fish) a completion script.",
        args=argv,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs),
    )
    return _from_flags(name, command, file) if name else command


def _check_file(name: str, path: str, file: RunConfig) -> None:
    """Check that a command uses the settings of a file that differ from their defaults."""
    values = file.settings()
    for setting, facts in FACTS.items():
        if name in facts.refused_by and values[setting] != DEFAULTS[setting]:
            raise ValueError(
                f"{path}: {setting} is {values[setting]!r}; `fedjax-lab {name}` does not use it: "
                "omit it."
            )


@functools.cache
def _in_paragraphs(kind: Any) -> Any:
    """Make a class whose fields have their help in one line: tyro breaks it as the source does."""
    if issubclass(kind, ListCommand):
        return kind
    hints = get_type_hints(kind, include_extras=True)
    fields: dict[str, Any] = {}
    for base in kind.__mro__[:-1]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                name = field.target.id  # type: ignore[union-attr]
                about = tyro.conf.arg(help=" ".join(ast.literal_eval(text.value).split()))
                fields.setdefault(name, Annotated[hints[name], about])
    return _subclass(kind, kind.__name__, fields)


def _subclass(kind: Any, name: str, fields: Mapping[str, Any]) -> Any:
    """Make a class with other types of some fields, and the same defaults and docstring."""
    about = {"__doc__": kind.__doc__}
    return dataclasses.make_dataclass(
        name, fields.items(), bases=(kind,), namespace=about, frozen=True, kw_only=True
    )


def _as_flags(
    name: str, config: RunConfig, lists: Lists, shown: Callable[[type], type]
) -> RunConfig:
    """Return the defaults of a command's flags, in groups whose types are those of the flags."""
    groups = {}
    for group in dataclasses.fields(config):
        values = vars(getattr(config, group.name))
        if name == "run":
            values = {n: lists.get(n, (v,)) if n in LISTED else v for n, v in values.items()}
        groups[group.name] = _flags_of(name, shown(GROUPS[group.name]))(**values)
    return RunConfig(**groups)


@functools.cache
def _flags_of(name: str, group: type) -> Any:
    """Make a group's class with the flags of a command; tyro takes it from the default."""
    flags = {}
    for setting, hint in get_type_hints(group, include_extras=True).items():
        if name in FACTS[setting].refused_by + FACTS[setting].ignored_by:
            hint = Annotated[hint, *_NO_FLAG]
        elif name == "run" and setting in LISTED:
            kind = next(k for k in kinds_of(HINTS[setting]) if k in _WORDS)
            several = tyro.conf.arg(metavar=f"{_WORDS[kind]} ...")
            about = getattr(hint, "__metadata__", ())
            values: Any = tuple[HINTS[setting], ...]  # type: ignore[valid-type]
            hint = Annotated[values, several, *about]
        elif name == "plan" and setting == "target":  # its --target is a machine
            hint = Annotated[hint, tyro.conf.arg(name="target-column")]
        flags[setting] = hint
    return _subclass(group, f"{name}_{group.__name__}", flags)


def _from_flags(name: str, command: Any, file: RunConfig) -> Any:
    """Return a command with the settings of its flags, after checking flags that exclude others."""
    values, lists = command.settings.settings(), {}
    if name == "run":
        lists = {n: values[n] for n in LISTED if len(values[n]) != 1}
        check_lists(lists)
        values |= {n: values[n][0] for n in LISTED}
        command = dataclasses.replace(command, lists=tuple(lists.items()))
    command = dataclasses.replace(command, settings=RunConfig.of(**values))
    if name == "run":
        _check_run(command, file)
    if name in ("sweep", "tune"):
        _check_varied(name, command, file)
    return command


def _check_run(command: RunCommand, file: RunConfig) -> None:
    """Check the flags of ``run`` that have no effect beside --seeds or --print-config."""
    seed = command.settings.rounds.seed
    if command.seeds and seed != file.rounds.seed:
        raise ValueError(
            f"seed is {seed} and seeds {list(command.seeds)}; `fedjax-lab run` uses --seeds alone: "
            "omit --seed."
        )
    if command.print_config is None:
        return
    for name in ("cpu_devices", "distributed", "quiet", *OF_PROCESSES):
        value = getattr(command, name)
        if value is not None and value is not False:  # process 0 is one
            raise ValueError(
                f"{name} is {value!r}; `fedjax-lab run --print-config` does not use "
                f"{flag_of(name)}: it runs nothing; omit it."
            )


def _check_varied(name: str, command: Any, file: RunConfig) -> None:
    """Check that no flag gives one value of what --point or --space gives all values of."""
    methods: tuple[str, ...] = (command.settings.method.algorithm,)
    if name == "sweep":
        flag, texts = "--point", command.point
    else:
        flag, texts, methods = "--space", command.space, command.methods or methods
        check_shared_options(command.settings.method.option, methods)
    said = read_assignments(flag[2:], texts, methods)
    varied = {method: {one.name for one in said if one.is_of(method)} for method in methods}
    varied_by_all = set.intersection(*varied.values())
    for method in methods:
        now, before = (
            {**config.settings(), **{f"option {n}": v for n, v in parse_options(own).items()}}
            for config in (command.settings, file)
            for own in [options_of(config.method.option, method, methods)]
        )
        for setting, value in now.items():
            option = setting.removeprefix("option ")
            is_varied = option in (varied_by_all if setting == option else varied[method])
            if is_varied and value != before.get(setting):
                raise ValueError(
                    f"{setting} is {value!r}, and {flag} varies it: `fedjax-lab {name}` uses the "
                    f"values of {flag} alone; omit one of them."
                )


_WITH_SETTINGS: dict[str, Any] = {
    "run": RunCommand,
    "plan": PlanCommand,
    "sweep": SweepCommand,
    "tune": TuneCommand,
}
_WITHOUT_SETTINGS: dict[str, type] = {
    "report": ReportCommand,
    "export": ExportCommand,
    "rerun": RerunCommand,
    "recipe": RecipeCommand,
    "algorithms": AlgorithmsCommand,
    "published": _listing(listings.published),
    "compressors": _listing(listings.compressors),
    "datasets": _listing(listings.datasets),
    "partitions": _listing(listings.partitions),
    "models": _listing(listings.models),
}
