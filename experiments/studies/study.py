"""A study of a paper's table or figure, as it is declared.

A paper's package holds a module for each table or figure, with a ``Study``: methods (rows) with
their grids, and scales, each with its columns: "paper" is the paper's own setting, "machine" what
two CPU cores do in minutes, "smoke" what CI runs. How one is called stands in
``experiments.studies.command``, how it is tuned and run in ``experiments.studies.runs``.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies.personal import Personal
from fedjax_lab.algorithms import PUBLISHED
from fedjax_lab.command.config import VARIED, RunConfig
from fedjax_lab.round import Algorithm

Point = dict[str, float]
SEEDS = (11, 12, 13)  # of all final runs, see PROTOCOL.md


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the paper's table.

    Attributes:
      algorithm: the method's name in fedjax_lab.
      grid: hyper-parameter -> values, of which all combinations are tried: client_lr,
        server_lr, or the method's own.
      then: hyper-parameter -> values, tried one after the other at the best of ``grid``.
      start: where those of ``then`` begin; its first value where it is not given.
      option: the method's other arguments.
      settings: other settings of its runs, such as client_lr_schedule.
      style: (colour, dash) in figures; None: by its place.
      at: where it stands on the study's axis.
      wrap: makes of the method the one that is run; None: the method itself.
      personal: makes a method of which each client has a model of its own, with the point's values;
        its accuracy is that of these models. None: ``algorithm`` is run.
    """

    algorithm: str
    grid: Mapping[str, Sequence[float]]
    then: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    start: Mapping[str, float] = dataclasses.field(default_factory=dict)
    option: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    style: tuple[int, int] | None = None
    at: float | None = None
    wrap: Callable[[Algorithm], Algorithm] | None = None
    personal: Personal | None = None

    def config(self, column: "Column", point: Mapping[str, float], **more: Any) -> RunConfig:
        """The settings of a run at a point of the grid."""
        return RunConfig.from_dict(self.settings_of(column, point, **more))

    def settings_of(
        self, column: "Column", point: Mapping[str, float], **more: Any
    ) -> dict[str, Any]:
        """The settings of a run at a point of the grid, by the names of ``RunConfig``."""
        rates = {name: point[name] for name in VARIED if name in point}
        option = {name: value for name, value in point.items() if name not in rates}
        if self.personal is not None:  # it takes them itself
            option = {}
        settings = {**column.settings, **self.settings, **column.override, **rates, **more}
        known = PUBLISHED.get(self.algorithm)
        settings["as_published"] = known is not None and known.code == column.published
        return {**settings, "algorithm": self.algorithm, "option": {**self.option, **option}}

    def declared(self) -> dict[str, Any]:
        """What decides its numbers, as JSON has it."""
        names = ("algorithm", "grid", "then", "start", "option", "settings")
        wrapped = {} if self.wrap is None else {"wrap": self.wrap.__name__}
        if self.personal is not None:
            wrapped["personal"] = self.personal.name
        return as_json({**{name: getattr(self, name) for name in names}, **wrapped})


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table: the conditions under which methods are compared.

    Attributes:
      settings: of its runs, by the names of ``RunConfig``.
      tuning_rounds: of the grids.
      paper: what to look up among the paper's numbers, such as {"table": "1", "dataset":
        "MNIST", "partition": "dirichlet:0.1"}; {}: the paper has no such column.
      published: the code as which it runs its methods (``fedjax_lab.algorithms.PUBLISHED``); "":
        as the papers write them.
      override: settings that count more than a method's own.
      methods: those that it has; None: all.
    """

    settings: Mapping[str, Any]
    tuning_rounds: int
    paper: Mapping[str, str] = dataclasses.field(default_factory=dict)
    published: str = ""
    override: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    methods: tuple[str, ...] | None = None

    def conditions(self) -> dict[str, Any]:
        """What decides its runs' numbers, as JSON has it."""
        names = ("settings", "tuning_rounds", "published", "override")
        return as_json({name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large a study is run, on what, and for how long.

    Attributes:
      columns: name -> column.
      minutes: that it takes on its hardware, roughly.
      hardware: on which it is meant to run.
      finalists: points of a grid that stay finite for all rounds; 1: tuning decides alone.
      seeds: of the final runs; not 0, which tunes.
      held_out: training images that tuning takes as validation data.
      grid_points: values of each hyper-parameter that are tried; None: all.
      methods: those that are run; None: all.
      landscape: methods for which the Hessian's largest eigenvalue is computed at each seed's last
        model, and a loss surface around the first one's.
    """

    columns: Mapping[str, Column]
    minutes: float
    hardware: str = "2 CPU cores"
    finalists: int = 2
    seeds: tuple[int, ...] = SEEDS
    held_out: int = 5_000
    grid_points: int | None = None
    methods: tuple[str, ...] | None = None
    landscape: tuple[str, ...] = ()

    def declared(self) -> dict[str, Any]:
        """As JSON has it."""
        return as_json(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Study:
    """A table or figure of a paper.

    Attributes:
      name: "PAPER/STUDY".
      title: its heading in the report.
      notes: the setting and how it departs from the paper's, for the report.
      methods: name in the table, as the paper has it -> method.
      scales: name -> scale.
      allowed: whether a point of a method's grid is tried.
      paper_head: the head of the column with the paper's numbers.
      axis: the hyper-parameter by which the methods differ, against which accuracy is drawn.
    """

    name: str
    title: str
    notes: str
    methods: Mapping[str, Method]
    scales: Mapping[str, Scale]
    allowed: Callable[[Point], bool] = lambda point: True
    paper_head: str = "paper %"
    axis: str | None = None

    @property
    def paper(self) -> str:
        """The paper's package."""
        return self.name.partition("/")[0]

    @property
    def short(self) -> str:
        """The study's name within its paper."""
        return self.name.partition("/")[2]

    def result_path(self, folder: Path) -> Path:
        """Where a paper's folder keeps the compact copy of its run directories."""
        return folder / "results" / f"{self.short}.json"

    def shown(self, scale: Scale, column: Column) -> list[str]:
        """The methods that a column has at a scale, in the study's order."""
        wanted = [scale.methods or self.methods, column.methods or self.methods]
        return [name for name in self.methods if all(name in names for names in wanted)]


def columns(settings: Mapping[str, Any], partitions: Sequence[str], tuning_rounds: int, **paper):
    """Columns that differ in the partition only, named by it."""
    return {
        spec: Column(
            {**settings, "partition": spec},
            tuning_rounds,
            {**paper, "partition": spec} if paper else {},
        )
        for spec in partitions
    }


def both_ways(
    found: Mapping[str, Column],
    code: str,
    methods: Sequence[str] | None = None,
    **override: Any,
) -> dict[str, Column]:
    """Columns as the paper writes its methods, and then again as its code runs them.

    Args:
      found: name -> column.
      code: the published code.
      methods: those of the second kind of columns; None: all.
      override: settings of the code's runs.
    """
    again = {
        f"{name}, as published": dataclasses.replace(
            column,
            published=code,
            override=override,
            methods=None if methods is None else tuple(methods),
        )
        for name, column in found.items()
    }
    return {**found, **again}


def smoke(num_clients: int, cohort_size: int, methods: Sequence[str] = (), **settings) -> Scale:
    """The scale on which CI runs a study: a few rounds on digits, one point of each grid."""
    column = {
        "dataset": "digits",
        "model": "mlp",
        "model_option": {"hidden": [16]},
        "partition": "dirichlet:0.1",
        "num_clients": num_clients,
        "cohort_size": cohort_size,
        "batch_size": 16,
        "local_steps": 3,
        "rounds": 4,
        "eval_every": 2,
        **settings,
    }
    return Scale(
        columns={"digits": Column(column, tuning_rounds=2)},
        hardware="any",
        minutes=1,
        seeds=(1,),
        held_out=200,
        grid_points=1,
        methods=tuple(methods) or None,
    )


def finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def as_json(value: Any) -> Any:
    """What a JSON file gives back."""
    return json.loads(json.dumps(finite(value)))
