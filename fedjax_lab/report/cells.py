"""The cells of a report's tables.

A table is its header and its rows, texts. Means are over the seeds of a group.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from fedjax_lab.estimates import NOTHING, digits_of, digits_of_amount, estimate, format_estimate
from fedjax_lab.markdown import Cells
from fedjax_lab.qp.residuals import unsolved
from fedjax_lab.report.distribution import spread_measures
from fedjax_lab.report.paired import behind_best
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.sections import Tail, runs_of, score_of, tail_of
from fedjax_lab.report.statistics import PERPLEXITY, Score, best, lowest, number, reach

UNSOLVED = "†"
WORST = "worst 10 % of clients"
_NOT_OF_SEEDS = ("best tenth", "variance")  # for which a terminal is too narrow
_WITHOUT_HEADING = {"top (%)": "top accuracy (%)", "last (%)": "last accuracy (%)"}
_GLOBAL = "global model, "  # before a column's name
_EPSILON = "epsilon"


def measures(runs: Iterable[Run], tail: Tail) -> dict[str, Callable[[Run], float]]:
    """Return the columns of a table: header -> value of a run.

    Args:
      runs: language models add the lowest perplexity, regressions have errors in place of
        accuracies, private runs add epsilon. The worst 10 % of clients, by their training data, are
        a column if a run has them and none has scores on the clients' test examples, see
        ``spread_measures``.
    """
    runs = list(runs)
    score, spread = score_of(runs), spread_measures(runs)
    name, scale, unit = score.of_global_model, score.scale, score.unit
    columns: dict[str, Callable[[Run], float]] = {}
    if score.is_own:  # all clients' models, before those of the global model
        columns[f"own models, {tail.name}{unit}"] = lambda run: scale * tail.mean(run, score.name)
        columns[f"own models{unit}"] = lambda run: scale * run.last(score.name)
    before = _GLOBAL * score.is_own
    if score.is_accuracy:
        columns[f"{before}top (%)"] = lambda run: scale * best(run.values(name))
        columns[f"{before}last (%)"] = lambda run: scale * run.last(name)
    elif score.metric:
        extreme, words = (lowest, "lowest") if score.sign < 0 else (best, "highest")
        columns[f"{before}last {score.words}"] = lambda run: run.last(name)
        columns[f"{before}{words} {score.words}"] = lambda run: extreme(run.values(name))
    if score.metric:
        columns[f"{before}{tail.name}{unit}"] = lambda run: scale * tail.mean(run, name)
    columns |= spread
    worst = f"worst_10_percent_{name}"
    if not spread and any(run.summary.get(worst) is not None for run in runs):
        columns[f"{WORST}{unit}"] = lambda run: scale * number(run.summary.get(worst))
    if score.metric == PERPLEXITY:
        columns["lowest perplexity"] = lambda run: lowest(run.values(PERPLEXITY))
    if any(_EPSILON in run.rows[-1] for run in runs):
        columns[_EPSILON] = lambda run: run.last(_EPSILON)
    return columns


def worst_residual(run: Run) -> float:
    """Return the largest mean residual of a run's quadratic programs; 0 if all are within
    bounds."""
    return max((value for row in run.rows for value in unsolved(row).values()), default=0.0)


def accuracy_table(
    groups: Sequence[Group], measure: Callable[[Run], float] | None = None, *, brief: bool = False
) -> Cells:
    """Return header and rows: accuracies in percent, and each group's distance from the best.

    Language models also have the lowest perplexity, and private runs have epsilon; regressions have
    errors.

    Args:
      groups: one row for each group.
      measure: determines the best group and the paired differences from it. None: the mean over the
        last tenth of the rounds.
      brief: only the columns that decide, for a terminal.

    Raises:
      ValueError: the groups differ in data set, metric or number of rounds.
    """
    runs = runs_of(groups)
    tail, score = tail_of(runs), score_of(runs)
    columns = {  # a page has no room for all of the global model's beside those of the own models
        name: of
        for name, of in measures(runs, tail).items()
        if tail.name in name or not (brief or name.startswith(_GLOBAL))
    }
    compared = measure or (lambda run: score.sign * tail.mean(run, score.name))
    behind = behind_best(
        groups, lambda run: score.scale * compared(run), is_error=not score.is_accuracy
    )
    cells = _formatted([group.runs for group in groups], columns, score)
    unit = " (points)" * score.is_accuracy
    rows = [["method", "seeds", *columns, f"behind the best{unit}", "p"]]
    for group, values, distance in zip(groups, cells, behind, strict=True):
        mark = f" {UNSOLVED}" * any(map(worst_residual, group.runs))
        rows.append([f"{group.label}{mark}", str(len(group.runs)), *values, *distance])
    return [row[:-1] for row in rows] if brief else rows


def _formatted(
    several: Sequence[Sequence[Run]], columns: Mapping[str, Callable[[Run], float]], score: Score
) -> Cells:
    """Format the columns' means and intervals of each of several lists of runs.

    A column has two decimals, or what the sizes of its numbers need: of errors, and of epsilon.
    """
    found = [[estimate(list(map(of, runs))) for of in columns.values()] for runs in several]
    digits = [
        digits_of((value.mean for value in column), not score.is_accuracy or name == _EPSILON)
        for name, column in zip(columns, zip(*found, strict=True), strict=True)
    ]
    return [list(map(format_estimate, row, digits)) for row in found]


def seed_table(runs: Sequence[Run]) -> Cells:
    """Return header and rows for a terminal: one row for each run, then their mean.

    Args:
      runs: at least one run of one method with the same settings.
    """
    columns = measures(runs, tail_of(runs))
    columns = {n: f for n, f in columns.items() if not n.startswith(_NOT_OF_SEEDS)}
    cells = _formatted([*([run] for run in runs), runs], columns, score_of(runs))
    names = [*(str(run.seed) for run in runs), "mean ± 95 %"]
    head = ["seed", *(name.replace(" of clients (%)", " (%)") for name in columns)]
    head = [_WITHOUT_HEADING.get(name, name) for name in head]
    return [head, *([name, *row] for name, row in zip(names, cells, strict=True))]


def target_table(groups: Sequence[Group], target: float) -> Cells:
    """Return header and rows: cost to reach ``target``; a mean only if all seeds reach it."""
    # The name in a row, a factor, digits (None: by the size).
    columns: dict[str, tuple[str, float, int | None]] = {
        "rounds": ("round", 1, 0),
        "uplink (MB)": ("bytes_up", 1e-6, None),
        "gradients": ("gradients", 1, 0),
        "seconds": ("seconds", 1, 2),
    }
    runs = runs_of(groups)
    if any("simulated_seconds" in run.rows[-1] for run in runs):
        columns["simulated seconds"] = ("simulated_seconds", 1, None)
    metric = score_of(runs).name
    rows = [["method", "seeds that reach it", *columns]]
    for group in groups:
        found = [reach(run.rows, target, metric) for run in group.runs]
        reached = [row for row in found if row is not None]
        scored = any(metric in run.names for run in group.runs)
        count = f"{len(reached)} of {len(group.runs)}" if scored else NOTHING
        cells = [NOTHING] * len(columns)
        if len(reached) == len(group.runs):
            for place, (name, scale, digits) in enumerate(columns.values()):
                mean = estimate([scale * number(row.get(name)) for row in reached])
                digits = digits_of_amount(mean.mean) if digits is None else digits
                cells[place] = format_estimate(mean, digits)
        rows.append([group.label, count, *cells])
    return rows


def time_table(groups: Sequence[Group]) -> Cells:
    """Return header and rows: compile seconds, run seconds, rounds per second; means over seeds."""

    def speed(run: Run) -> float:
        return run.rows[-1]["round"] / run.seconds if run.seconds > 0 else math.nan

    columns: dict[str, Callable[[Run], float]] = {
        "compile (s)": lambda run: run.compile_seconds,
        "run (s)": lambda run: run.seconds,
        "rounds per second": speed,
    }
    rows = [["method", *columns]]
    for group in groups:
        # No interval: a program that was compiled before comes from a cache, all or nothing.
        means = [group.over_seeds(of)._replace(half_width=None) for of in columns.values()]
        rows.append([group.label, *(format_estimate(m, digits_of_amount(m.mean)) for m in means)])
    return rows


def run_table(groups: Sequence[Group]) -> Cells:
    """Return header and rows: every run with its partition's hash and its state."""
    score = score_of(runs_of(groups))

    def last_score(run: Run) -> float:
        return score.scale * run.last(score.name)

    column = f"{'own models, ' * score.is_own}{score.words}{score.unit}"
    rows = [["run", "method", "seed", "partition", "rounds", column]]
    digits = score.digits(map(last_score, runs_of(groups)))
    for group in groups:
        for run in group.runs:
            rounds = f"{run.rows[-1]['round']:,}"
            if run.ended_early:
                rounds += f" of {run.config['rounds']:,}, ended by stop_when"
            elif not run.finished:
                end = "diverged" if run.diverged else "unfinished"
                rounds += f" of {run.config['rounds']:,}, {end}"
            if residual := worst_residual(run):
                rounds += f" {UNSOLVED} residual {residual:.2g}"
            partition = run.config.get("partition", {}).get("hash", NOTHING)
            shown = format_estimate(estimate([last_score(run)]), digits)
            rows.append([str(run.path), group.label, str(run.seed), partition, rounds, shown])
    return rows if score.metric else [row[:-1] for row in rows]
