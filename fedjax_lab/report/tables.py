"""The text of a report: its tables, and what they mean, as Markdown."""

import math
from collections.abc import Iterable, Sequence

from fedjax_lab.markdown import Cells, code, inert, markdown_table
from fedjax_lab.qp.residuals import LARGEST_RESIDUAL
from fedjax_lab.report.cells import (
    UNSOLVED,
    WORST,
    accuracy_table,
    run_table,
    target_table,
    time_table,
    worst_residual,
)
from fedjax_lab.report.distribution import spread_measures
from fedjax_lab.report.paired import NOISE
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.sections import Section, runs_of, score_of, sections_of, tail_of
from fedjax_lab.report.settings_table import settings_chapter
from fedjax_lab.report.statistics import ACCURACY, ERROR, OWN, PERPLEXITY, ROUNDING, Score, best

PAIRED = (
    "Behind the best: the mean difference over the seeds that both have, which share partition, "
    "cohorts and mini-batches, with its 95 % interval and the p-value of the paired t-test; "
    f"{NOISE}: the interval contains 0, the difference is within noise."
)

UNSOLVED_NOTE = (
    f"{UNSOLVED}: quadratic programs of the method were not solved (a row's mean residual is above "
    f"{LARGEST_RESIDUAL:g}); the numbers are not the method's."
)
OWN_MODELS = (
    "Some methods make a model for each client. All are compared by the models that the clients "
    "use, each on the client's own test examples: the client's own model, or the global model of a "
    "method that has no other. These are means over the clients."
)
# What runs are scored by -> heading and first sentence of its chapter.
_MEASURED = {
    ACCURACY: ("Accuracy", "Test accuracy in percent."),
    ERROR: ("Error", "Mean squared error of the test set; less is better."),
    PERPLEXITY: ("Accuracy", "Test accuracy in percent: the share of next words foretold."),
}


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
    return best(run.values(ACCURACY))


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
    mark = "###" if several else "##"
    parts = [f"# {title}" if title else "", first]
    if several:
        parts += [
            "The runs are of several data sets, metrics, numbers of rounds or settings (partition, "
            "clients, cohort, local steps, mini-batches, model): each part compares those that "
            "have all in common."
        ]
    for section, shown in zip(sections, figures or [()] * len(sections), strict=True):
        groups = section.groups
        parts += [
            f"## {inert(section.title)}" if several else "",
            show_figures(shown[:1]),
            *_scores(groups, mark),
            *_costs(groups, target, mark),
            f"{mark} Time",
            "Rounds and their evaluations, compilation apart; means over the seeds.",
            _shown(time_table(groups)),
            f"{mark} Settings",
            *settings_chapter(groups),
            f"{mark} Runs",
            _shown(run_table(groups)),
            f"{mark} More figures\n\n{show_figures(shown[1:])}" if shown[1:] else "",
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def show_figures(figures: Iterable[tuple[str, str]]) -> str:
    """Format (file name, caption) of figures as Markdown, with captions below."""
    return "\n\n".join(f"![{caption}]({name})\n\n{caption}" for name, caption in figures)


def _shown(rows: Cells) -> str:
    return markdown_table([[inert(cell) for cell in row] for row in rows])


def _scores(groups: Sequence[Group], mark: str) -> list[str]:
    """Format the chapter of scores; none if nothing is known to compare the runs by."""
    runs = runs_of(groups)
    score = score_of(runs)
    if not score.metric:
        return []
    table, tail = accuracy_table(groups), tail_of(runs)
    better = "less" if score.sign < 0 else "more"
    chosen = score.words.capitalize(), f"{code(score.name)} of `evaluate`; {better} is better."
    head, said = _MEASURED.get(score.metric, chosen)
    if score.is_own:
        said += f" {OWN_MODELS}"
    count = len(tail.rounds)
    shared = f"the {count} evaluations" if count > 1 else "the one evaluation"
    shared = f", over {shared} that all runs have there," if count else ""
    said += f" The {tail.name}, the last tenth{shared} says which method is the best."
    if any(name.startswith(WORST) for name in table[0]):
        said += (
            " The worst 10 % of clients are those on whose own training data the last model does "
            "worst."
        )
    elif spread_measures(runs):
        said += (
            " The worst and the best tenth of the clients, and the variance over the clients, are "
            "of the last model on each client's own test examples."
        )
    if any(len(group.runs) > 1 for group in groups):
        said += f" Mean ± 95 % interval over the seeds (Student's t). {PAIRED}"
    said += _unfinished(runs) + _not_scored(groups, score.is_own)
    unsolved = [UNSOLVED_NOTE] if any(map(worst_residual, runs)) else []
    return [f"{mark} {inert(head)}", said, _shown(table), *unsolved]


def _unfinished(runs: Sequence[Run]) -> str:
    """Return a warning if a run did not reach the last round, or diverged."""
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


def _not_scored(groups: Sequence[Group], is_own: bool) -> str:
    """Return a warning if clients' models were not scored that the comparison would need."""

    def lacks(run: Run) -> bool:
        scored = any(name.startswith(OWN) for name in run.names)
        return bool(is_own or run.config.get("personal_models")) and not (scored or run.diverged)

    names = ", ".join(inert(group.label) for group in groups if any(map(lacks, group.runs)))
    if not names:
        return ""
    if is_own:
        return f" **Without scores on the clients' test examples, and so not compared: {names}.**"
    return (
        " **Compared by the global model, because no run scored the clients' own models: "
        f"{names}.**"
    )


def _costs(groups: Sequence[Group], target: float | None, mark: str) -> list[str]:
    """Format the chapter of costs up to the target; none if runs have no accuracy."""
    origin, score = "", score_of(runs_of(groups))
    if target is None:
        target = default_target(groups)
        origin = ": 95 % of the best method's best accuracy (mean over seeds), cut to 0.1 %"
    if math.isnan(target) or not score.is_accuracy:
        return []
    table = target_table(groups, target)
    of_what = "of the own models " * score.is_own
    timed = ", simulated seconds are the clients'" * ("simulated seconds" in table[0])
    return [
        f"{mark} Up to the target",
        f"What it takes until the first evaluation with a test accuracy {of_what}of at least the "
        f"target; the target is {100 * target:.10g} %{origin}. Uplink counts all clients' messages "
        "(1 MB = 10^6 bytes), gradients are mini-batch gradients, seconds leave compilation "
        f"out{timed}.",
        _shown(table),
    ]
