"""A report's tables, as Markdown."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from fedjax_lab.estimates import NOTHING, digits_of, digits_of_amount, estimate, format_estimate
from fedjax_lab.markdown import Cells, code, inert, markdown_table
from fedjax_lab.qp.residuals import LARGEST_RESIDUAL, unsolved
from fedjax_lab.report.distribution import spread_measures
from fedjax_lab.report.paired import NOISE, behind_best
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.sections import Section, Tail, runs_of, score_of, sections_of, tail_of
from fedjax_lab.report.settings_table import settings_chapter
from fedjax_lab.report.statistics import (
    ACCURACY,
    ERROR,
    OWN,
    PERPLEXITY,
    ROUNDING,
    Score,
    best,
    lowest,
    number,
    reach,
)

PAIRED = (
    "Behind the best: the mean difference over the seeds that both have, which share partition, "
    "cohorts and mini-batches, with its 95 % interval and the p-value of the paired t-test; "
    f"{NOISE}: the interval contains 0, the difference is within noise."
)

UNSOLVED = "†"
UNSOLVED_NOTE = (
    f"{UNSOLVED}: quadratic programs of the method were not solved (a row's mean residual is above "
    f"{LARGEST_RESIDUAL:g}); the numbers are not the method's."
)
SEVERAL = (
    "The runs are of several data sets, metrics, numbers of rounds or settings (partition, "
    "clients, cohort, local steps, mini-batches, model): each part compares those that have all "
    "in common."
)
# What runs are scored by -> heading and first sentence of its chapter.
_MEASURED = {
    ACCURACY: ("Accuracy", "Test accuracy in percent."),
    ERROR: ("Error", "Mean squared error of the test set; less is better."),
    PERPLEXITY: ("Accuracy", "Test accuracy in percent: the share of next words foretold."),
}
OWN_MODELS = (
    "Some methods make a model for each client. All are compared by the models that the clients "
    "use, each on the client's own test examples: the client's own model, or the global model of a "
    "method that has no other. These are means over the clients."
)
_WORST = "worst 10 % of clients"
_ON_TRAINING_DATA = (
    "The worst 10 % of clients are those on whose own training data the last model does worst."
)
OVER_CLIENTS = (
    "The worst and the best tenth of the clients, and the variance over the clients, are of the "
    "last model on each client's own test examples."
)
_NOT_OF_SEEDS = ("best tenth", "variance")  # for which a terminal is too narrow
_WITHOUT_HEADING = {"top (%)": "top accuracy (%)", "last (%)": "last accuracy (%)"}
_GLOBAL = "global model, "  # before a column's name
_EPSILON = "epsilon"
_BY_GLOBAL_MODEL = (
    " **Compared by the global model, because no run scored the clients' own models: {}.**"
)
_NOT_SCORED = " **Without scores on the clients' test examples, and so not compared: {}.**"


def default_target(groups: Iterable[Group], score: Score | None = None) -> float:
    """Compute 95 % of the best group's best accuracy (mean over its seeds), cut to 0.001.

    NaN if no run has an accuracy, or another score compares them.

    Args:
      groups: from ``group_runs``.
      score: the score that compares runs; None: that of the groups.
    """
    groups = list(groups)
    score = score or score_of(runs_of(groups))
    if not score.is_accuracy:
        return math.nan
    means = [group.over_seeds(lambda run: best(run.values(score.name))).mean for group in groups]
    highest = best(means) * (1 + ROUNDING)
    return math.nan if math.isnan(highest) else math.floor(950 * highest) / 1000


def top(run: Run) -> float:
    """Return the highest accuracy of a run."""
    return best(run.values("accuracy"))


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
    columns = measures(runs, tail)
    if score.is_own:  # a page has no room for all of the global model's
        beside = [name for name in columns if name.startswith(_GLOBAL) and tail.name not in name]
        columns = {name: value for name, value in columns.items() if name not in beside}
    if brief:
        columns = {name: value for name, value in columns.items() if tail.name in name}
    unit = " (points)" * score.is_accuracy
    head = ["method", "seeds", *columns, f"behind the best{unit}", "p"]
    compared = measure or (lambda run: score.sign * tail.mean(run, score.name))
    behind = behind_best(
        groups, lambda run: score.scale * compared(run), is_error=not score.is_accuracy
    )
    cells = _formatted([group.runs for group in groups], columns, score)
    rows = [head]
    for group, values, distance in zip(groups, cells, behind, strict=True):
        rows.append([marked(group), str(len(group.runs)), *values, *distance])
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


def marked(group: Group) -> str:
    """Return a group's label, marked if quadratic programs of its method were not solved."""
    return f"{group.label} {UNSOLVED}" if any(map(worst_residual, group.runs)) else group.label


def worst_residual(run: Run) -> float:
    """Return the largest mean residual of a run's quadratic programs; 0 if all are within
    bounds."""
    return max((value for row in run.rows for value in unsolved(row).values()), default=0.0)


def measures(runs: Iterable[Run], tail: Tail) -> dict[str, Callable[[Run], float]]:
    """Return the columns of a table: header -> value of a run.

    Args:
      runs: language models add the lowest perplexity, regressions have errors in place of
        accuracies, private runs add epsilon. The worst 10 % of clients, by their training data, are
        a column if a run has them and none has scores on the clients' test examples, see
        ``spread_measures``.
    """
    runs = list(runs)
    score = score_of(runs)
    name, unit = score.of_global_model, score.unit
    columns: dict[str, Callable[[Run], float]] = {}
    before = ""
    if score.is_own:  # all clients' models, before those of the global model
        before = _GLOBAL
        columns[f"own models, {tail.name}{unit}"] = lambda run: (
            score.scale * tail.mean(run, score.name)
        )
        columns[f"own models{unit}"] = lambda run: score.scale * run.last(score.name)
    if score.is_accuracy:
        columns[f"{before}top (%)"] = lambda run: 100 * top(run)
        columns[f"{before}last (%)"] = lambda run: 100 * run.last(name)
    elif score.metric:
        extreme, words = (lowest, "lowest") if score.sign < 0 else (best, "highest")
        columns[f"{before}last {score.words}"] = lambda run: run.last(name)
        columns[f"{before}{words} {score.words}"] = lambda run: extreme(run.values(name))
    if score.metric:
        columns[f"{before}{tail.name}{unit}"] = lambda run: score.scale * tail.mean(run, name)
    worst = f"worst_10_percent_{name}"
    columns |= (spread := spread_measures(runs))
    if not spread and any(run.summary.get(worst) is not None for run in runs):
        columns[f"{_WORST}{unit}"] = lambda run: score.scale * number(run.summary.get(worst))
    if score.metric == PERPLEXITY:
        columns["lowest perplexity"] = lambda run: lowest(run.values(PERPLEXITY))
    if any(_EPSILON in run.rows[-1] for run in runs):
        columns[_EPSILON] = lambda run: run.last(_EPSILON)
    return columns


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
    if _are_timed(groups):
        columns["simulated seconds"] = ("simulated_seconds", 1, None)

    metric = score_of(runs_of(groups)).name

    def row(group: Group) -> list[str]:
        found = [reach(run.rows, target, metric) for run in group.runs]
        reached = [row for row in found if row is not None]
        scored = any(metric in run.names for run in group.runs)
        count = f"{len(reached)} of {len(group.runs)}" if scored else NOTHING
        if len(reached) < len(group.runs):
            return [group.label, count, *[NOTHING] * len(columns)]
        means = [
            estimate([scale * number(row.get(name)) for row in reached])
            for name, scale, _ in columns.values()
        ]
        shown = [
            format_estimate(mean, digits_of_amount(mean.mean) if digits is None else digits)
            for mean, (*_, digits) in zip(means, columns.values(), strict=True)
        ]
        return [group.label, count, *shown]

    return [["method", "seeds that reach it", *columns], *map(row, groups)]


def time_table(groups: Sequence[Group]) -> Cells:
    """Return header and rows: compile seconds, run seconds, rounds per second; means over seeds."""
    head = ["method", "compile (s)", "run (s)", "rounds per second"]

    def row(group: Group) -> list[str]:
        # No interval: a program that was compiled before comes from a cache, all or nothing.
        means = [
            group.over_seeds(lambda run: run.compile_seconds),
            group.over_seeds(lambda run: run.seconds),
            group.over_seeds(_rounds_per_second),
        ]
        shown = [m._replace(half_width=None) for m in means]
        return [group.label, *(format_estimate(m, digits_of_amount(m.mean)) for m in shown)]

    return [head, *map(row, groups)]


def _rounds_per_second(run: Run) -> float:
    return run.rows[-1]["round"] / run.seconds if run.seconds > 0 else math.nan


def run_table(groups: Sequence[Group]) -> Cells:
    """Return header and rows: every run with its partition's hash and its state."""
    score = score_of(runs_of(groups))

    def last_score(run: Run) -> float:
        return score.scale * run.last(score.name)

    column = f"{'own models, ' * score.is_own}{score.words}{score.unit}"
    head = ["run", "method", "seed", "partition", "rounds", *([column] if score.metric else [])]
    digits = score.digits(map(last_score, runs_of(groups)))

    def row(group: Group, run: Run) -> list[str]:
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
        cells = [str(run.path), group.label, str(run.seed), partition, rounds]
        return [*cells, shown] if score.metric else cells

    return [head, *(row(group, run) for group in groups for run in group.runs)]


def summary_table(groups: Iterable[Group], target: float | None = None) -> str:
    """Format the report without figures and title, as Markdown.

    Args:
      groups: result of ``group_runs``; there is a section for each data set, metric, number of
        rounds and setting.
      target: accuracy in (0, 1); None: ``default_target``.
    """
    return report_text(sections_of(runs_of(groups)), target)


def report_text(
    sections: Sequence[Section],
    target: float | None,
    figures: Sequence[Sequence[tuple[str, str]]] = (),
    title: str = "",
    first: str = "",
) -> str:
    """Format report.md: title; for each section main figure, tables, settings, other figures.

    Args:
      target: accuracy in (0, 1); None: 95 % of the best method's.
      figures: for each section, (file name, caption); (): none.
      title: the first line; "": none.
    """
    several = len(sections) > 1
    level = 3 if several else 2
    parts = [f"# {title}" if title else "", first, SEVERAL if several else ""]
    for section, shown in zip(sections, figures or [()] * len(sections), strict=True):
        parts += [
            f"## {inert(section.title)}" if several else "",
            show_figures(shown[:1]),
            section_text(section, target, level).rstrip(),
            f"{'#' * level} More figures\n\n{show_figures(shown[1:])}" if shown[1:] else "",
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def show_figures(figures: Iterable[tuple[str, str]]) -> str:
    """Format (file name, caption) of figures as Markdown, with captions below."""
    return "\n\n".join(f"![{caption}]({name})\n\n{caption}" for name, caption in figures)


def section_text(section: Section, target: float | None = None, level: int = 2) -> str:
    """Format the text of a section of comparable runs, as Markdown."""
    groups, mark = section.groups, "#" * level
    parts = [*_scores(groups, mark), *_costs(groups, target, mark)]
    timing = "Rounds and their evaluations, compilation apart; means over the seeds."
    parts += [f"{mark} Time", timing, _shown(time_table(groups))]
    parts += [f"{mark} Settings", *settings_chapter(groups)]
    parts += [f"{mark} Runs", _shown(run_table(groups))]
    return "\n\n".join(parts) + "\n"


def _scores(groups: Sequence[Group], mark: str) -> list[str]:
    """Format the chapter of scores; none if nothing is known to compare the runs by."""
    runs = runs_of(groups)
    score = score_of(runs)
    if not score.metric:
        return []
    table = accuracy_table(groups)
    several = any(len(group.runs) > 1 for group in groups)
    interval = f" Mean ± 95 % interval over the seeds (Student's t). {PAIRED}" if several else ""
    better = "less" if score.sign < 0 else "more"
    chosen = score.words.capitalize(), f"{code(score.name)} of `evaluate`; {better} is better."
    head, measured = _MEASURED.get(score.metric, chosen)
    spread = f" {OVER_CLIENTS}" if spread_measures(runs) else ""
    if any(name.startswith(_WORST) for name in table[0]):
        spread = f" {_ON_TRAINING_DATA}"
    compared = f" {OWN_MODELS}" if score.is_own else ""
    return [
        f"{mark} {inert(head)}",
        f"{measured}{compared} {_tail_explained(tail_of(runs))}.{spread}{interval}"
        f"{_unfinished(groups)}{_not_scored(groups, score.is_own)}",
        _shown(table),
        *([UNSOLVED_NOTE] if any(map(worst_residual, runs)) else []),
    ]


def _costs(groups: Sequence[Group], target: float | None, mark: str) -> list[str]:
    """Format the chapter of costs up to the target; none if runs have no accuracy."""
    origin = ""
    if target is None:
        target = default_target(groups)
        origin = ": 95 % of the best method's best accuracy (mean over seeds), cut to 0.1 %"
    score = score_of(runs_of(groups))
    if math.isnan(target) or not score.is_accuracy:
        return []
    of_what = "of the own models " if score.is_own else ""
    timed = ", simulated seconds are the clients'" if _are_timed(groups) else ""
    return [
        f"{mark} Up to the target",
        f"What it takes until the first evaluation with a test accuracy {of_what}of at least the "
        f"target; the target is {100 * target:.10g} %{origin}. Uplink counts all clients' messages "
        "(1 MB = 10^6 bytes), gradients are mini-batch gradients, seconds leave compilation "
        f"out{timed}.",
        _shown(target_table(groups, target)),
    ]


def _not_scored(groups: Sequence[Group], personal: bool) -> str:
    """Return a warning if clients' models were not scored that the comparison would need."""

    def lacks(run: Run) -> bool:
        needed = personal or run.config.get("personal_models")
        scored = any(name.startswith(OWN) for name in run.names)
        return bool(needed) and not scored and not run.diverged

    names = ", ".join(inert(group.label) for group in groups if any(map(lacks, group.runs)))
    return (_NOT_SCORED if personal else _BY_GLOBAL_MODEL).format(names) if names else ""


def _shown(rows: Cells) -> str:
    return markdown_table([[inert(cell) for cell in row] for row in rows])


def _tail_explained(tail: Tail) -> str:
    count = len(tail.rounds)
    shared = f"the {count} evaluations" if count > 1 else "the one evaluation"
    shared = f", over {shared} that all runs have there," if count else ""
    return f"The {tail.name}, the last tenth{shared} says which method is the best"


def _are_timed(groups: Sequence[Group]) -> bool:
    """Return True if a run simulates time."""
    return any("simulated_seconds" in run.rows[-1] for run in runs_of(groups))


def _unfinished(groups: Sequence[Group]) -> str:
    """Return a warning if a run did not reach the last round, or diverged."""
    runs = runs_of(groups)
    diverged = sum(run.diverged for run in runs)
    early = f"ended by stop_when before round {runs[0].config['rounds']:,}"
    counts = {
        "Unfinished runs": sum(not run.finished for run in runs) - diverged,
        "Runs that diverged and have no score": diverged,
        f"Runs that {early} and have no mean of the last tenth": sum(
            run.ended_early for run in runs
        ),
    }
    return "".join(f" **{name}: {n}** (see the last table)." for name, n in counts.items() if n)
