"""``fedjax-lab sweep``: a grid of hyperparameters and seeds as one compiled program."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from fedjax_lab.checks import check_choice, warn
from fedjax_lab.command.commands import PROG, SweepCommand
from fedjax_lab.command.config import VARIED, RunConfig
from fedjax_lab.command.launch import INTERRUPTED, start
from fedjax_lab.command.options import float_options, parse_options, server_lr_of
from fedjax_lab.command.screen import file_to_write, print_rows
from fedjax_lab.estimates import estimate, format_estimate
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import Cells
from fedjax_lab.report.csv_text import estimates_csv
from fedjax_lab.simulation.sweep_points import Point, check_seeds, list_points
from fedjax_lab.simulation.sweep_result import SweepResult

# Column -> (metric, "last" or "best" evaluation, scale, digits).
_SHOWN = {
    "accuracy (%)": ("accuracy", "last", 100, 2),
    "best (%)": ("accuracy", "best", 100, 2),
    "mean squared error": ("mean_squared_error", "last", 1, 4),
    "test loss": ("test_loss", "last", 1, 4),
    "perplexity": ("perplexity", "last", 1, 2),
    "epsilon": ("epsilon", "last", 1, 2),
}


def sweep_command(command: SweepCommand) -> int:
    """Sweep, print the table and write it to a file; returns the exit status.

    Raises:
      ValueError, TypeError, OSError, ImportError: as ``setup.build`` and ``sweep``; or a point, a
        seed or a setting is not allowed.
    """
    points, config = sweep_points(command.point, command.settings)
    seeds = check_seeds(command.seeds)
    out = file_to_write("out", command.out)
    start(command.cpu_devices, command.quiet)
    result = run_sweep(config, points, seeds, progress=not command.quiet)
    print_rows(sweep_table(result))
    if out is not None:
        write_text(out, sweep_csv(result))
        print(f"\n{out}")
    if result.interrupted:
        print(
            f"{PROG}: stopped early; evaluations that were not reached have no value."
            + " The same command resumes." * (config.output.run_dir is not None),
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0


def run_sweep(
    config: RunConfig, points: Sequence[Point], seeds: Sequence[int], *, progress: bool = False
) -> SweepResult:
    """Sweep a config over points and seeds.

    A run equals ``run`` with that seed and point, and the config's ``partition_seed`` (None:
    ``seed``), up to rounding; but attackers are those of the config's ``seed`` in all runs.

    Args:
      points: hyperparameters, such as those of ``sweep_points``.
      seeds: each point is run once with each seed.

    Raises:
      ValueError, TypeError, FileNotFoundError, ImportError: as ``setup.build`` and ``sweep``.
    """
    from fedjax_lab.command.setup import build
    from fedjax_lab.simulation.sweep import sweep

    setup = build(config)
    if setup.algorithm.personal is not None:
        warn(
            f"a sweep evaluates only the global model, and {config.method.algorithm} has a model "
            "for each client: use run, whose rows have personal_accuracy.",
        )
    warn_of_attackers("a sweep", config, seeds)
    if progress:
        print(setup.clients.summary(), file=sys.stderr, flush=True)
    return sweep(
        setup.vary,
        setup.init if config.model.init_seed is None else setup.params,
        setup.clients,
        points=points,
        seeds=seeds,
        **config.schedule(),
        evaluate=setup.evaluate,
        client_map=config.machine.client_map,
        on_nonfinite=config.rounds.on_nonfinite,
        lowering=config.machine.lowering,
        run_dir=config.output.run_dir,
        progress=progress,
    )


def warn_of_attackers(what: str, config: RunConfig, seeds: Sequence[int]) -> None:
    """Warn if runs with several seeds have the same attackers, those of the config's ``seed``."""
    if config.privacy.attack is not None and len(seeds) > 1:
        warn(
            f"all runs of {what} have the attackers of seed {config.rounds.seed}; use run "
            "--seeds, which draws them for each seed."
        )


def sweep_points(texts: Iterable[str], settings: RunConfig) -> tuple[list[Point], RunConfig]:
    """Return (all combinations, the config resolved with the first one), after checking each.

    Args:
      texts: such as "client_lr=0.1,0.01".

    Raises:
      ValueError, TypeError: a text has another form, names something that cannot be varied, or has
        a value that is out of range.
    """
    axes: dict[str, list[float]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip()
        check_choice("the name in point", name, may_vary(settings))
        if name in axes:
            raise ValueError(f"point names {name} twice; give all its values at once.")
        axes[name] = parse_numbers(f"point is {text!r}", values, "name=value,value with numbers")
    if not axes:
        raise ValueError("point is missing; add at least one, such as --point client_lr=0.1,0.01.")
    points = list_points(axes)
    configs = [at_point(settings, point).resolve() for point in points]
    return points, configs[0].replace(run_dir=settings.output.run_dir)


def parse_numbers(given: str, values: str, form: str) -> list[float]:
    """Parse numbers with commas between them.

    Args:
      values: such as "0.1,0.01".

    Raises:
      ValueError: one is no number, or stands twice.
    """
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        raise ValueError(f"{given}; it must be of the form {form}.") from None
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{given}; it has a value twice.")
    return numbers


def may_vary(settings: RunConfig) -> list[str]:
    """Return the hyperparameters of a method that can be arguments of a program.

    Raises:
      ValueError: the algorithm is unknown.
    """
    optimizer = parse_options(settings.method.option, "option").get("server_optimizer")
    names = [*VARIED, *float_options(settings.method.algorithm, optimizer)]
    takes_none = server_lr_of(settings.method.algorithm) == "none taken"
    return [name for name in names if not (takes_none and name == "server_lr")]


def at_point(settings: RunConfig, point: Point) -> RunConfig:
    """Return the settings of a run at a point."""
    varied: dict[str, Any] = {name: v for name, v in point.items() if name in VARIED}
    options = [f"{name}={value!r}" for name, value in point.items() if name not in VARIED]
    return settings.replace(**varied, option=(*settings.method.option, *options))


def sweep_table(result: SweepResult) -> Cells:
    """Return header and rows: each point with the means of its scores and 95 % intervals."""
    shown = {name: about for name, about in _SHOWN.items() if about[0] in result.history}
    rows = [[*result.points[0], *shown]]
    for place, point in enumerate(result.points):
        cells = [f"{value:g}" for value in point.values()]
        for metric, at, scale, digits in shown.values():
            values = scale * result.values(metric, at=at)[place]
            if metric == "epsilon":  # one number for all seeds
                values = values[:1]
            cells.append(format_estimate(estimate(list(values)), digits))
        rows.append(cells)
    return rows


def sweep_csv(result: SweepResult) -> str:
    """Format a CSV line for each point and metric of the last evaluation: mean, half_width, n."""
    lines = [
        ([repr(value) for value in point.values()], name, estimate(list(values[place])))
        for place, point in enumerate(result.points)
        for name in result.history
        for values in [result.values(name)]
    ]
    return estimates_csv(list(result.points[0]), lines)
