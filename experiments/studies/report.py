"""The report of a paper's studies: RESULTS.md, RESULTS.html and figures, from their results alone.

What is the same for all run directories (tables, curves, partitions, loss surfaces) comes from
``fedjax_lab.report``; here is what a study adds: the paper's numbers, what tuning chose, accuracy
against a hyper-parameter.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.leaderboard import beside
from experiments.studies.ablation import ablation_figure
from experiments.studies.claims import Judged, claims_section
from experiments.studies.groups import groups_of, is_drawn_as_today
from experiments.studies.measures import flatness
from experiments.studies.numbers import DISCUSSION, RESULTS, filled
from experiments.studies.runs import slug
from fedjax_lab.estimates import NOTHING, estimate, format_estimate
from fedjax_lab.markdown import markdown_table
from fedjax_lab.report.cells import accuracy_table, target_table, worst_residual
from fedjax_lab.report.curves import (
    ACCURACY,
    DRIFT,
    ERROR_MEMORY,
    accuracy_figure,
    has,
    metric_figure,
    panels_note,
    panels_of,
    ranking_figure,
    spread_note,
)
from fedjax_lab.report.figures import MOST_CURVES, landscapes_of
from fedjax_lab.report.paired import behind_best
from fedjax_lab.report.partition_figure import partition_figure
from fedjax_lab.report.runs import Group
from fedjax_lab.report.style import COLOURS, Styles, line_style, save
from fedjax_lab.report.surfaces import surface_figure
from fedjax_lab.report.tables import PAIRED, UNSOLVED_NOTE, default_target, show_figures, top
from fedjax_lab.report.write import write_page

FIGURES = "figures"
_PAPERS = {
    "catalogue": "a model for each client, and old control variates",
    "cfedavg": "CFedAvg",
    "fafed": "FAFED",
    "fedspeed": "FedSpeed",
    "fedswa": "FedSWA and FedMoSWA",
    "gradma": "GradMA",
}
_READING = f"""\
## How to read the tables

Accuracy is test accuracy, mean ± 95 % interval over the seeds (Student's t). Top is a run's
highest one, as the papers' tables have it; it is chosen on the test set, and so a little too high
for all methods. The mean of the last tenth of the rounds is over its evaluations. The worst 10 % of
clients are those on whose own training data the last model does worst.

{PAIRED} With two or three seeds intervals are wide.

The target is 95 % of the best method's top accuracy. The costs up to the target are given only if
all seeds reach it: uplink counts all clients' messages (1 MB = 10^6 bytes), gradients are
mini-batch gradients, seconds leave compilation out. The machine did other work as well, so minutes
and seconds compare methods only roughly. A dash stands for what was not measured, and for
differences of runs whose versions drew other mini-batches. Compare the order of a paper's numbers,
not their size: they are of its data and model."""


def write_results(studies: Sequence[Any], folder: Path, judged: Sequence[Judged] = ()) -> Path:
    """Write RESULTS.md, RESULTS.html and the figures of all studies that have results.

    discussion.md of the folder, where it is, becomes the end of both, with its numbers filled in.

    Args:
      studies: of one paper.
      folder: with their results, and where the report goes.
      judged: the paper's claims, from ``claims.judge``.

    Returns:
      The path of RESULTS.md.

    Raises:
      FileNotFoundError: no study has results in the folder.
    """
    sections = []
    for study in studies:
        if not study.result_path(folder).exists():
            continue
        result = json.loads(study.result_path(folder).read_text(encoding="utf-8"))
        if groups_of(study, result):
            sections.append(study_section(study, result, folder, f"{FIGURES}/{study.short}_"))
    if not sections:
        names = ", ".join(str(study.result_path(folder)) for study in studies)
        raise FileNotFoundError(f"there are no results to report; looked for {names}.")
    title = f"# Results: {_PAPERS.get(studies[0].paper, studies[0].paper)}"
    pairs = beside.section(one.claim for one in judged)
    parts = [title, *claims_section(judged), *pairs, _READING, *sections]
    discussion = folder / DISCUSSION
    if discussion.exists():
        parts.append(filled(discussion.read_text(encoding="utf-8"), studies, folder))
    write_page("\n\n".join(parts) + "\n", folder / RESULTS)
    return folder / RESULTS


def study_section(study: Any, result: Mapping[str, Any], folder: Path, prefix: str) -> str:
    """Markdown of a study; its figures are written to ``folder``, by names with that prefix."""
    columns = groups_of(study, result)
    found = {group.label for groups in columns.values() for group in groups}
    shown = [name for name in study.methods if name in found]
    styles = _styles(study, shown)
    (folder / prefix).parent.mkdir(parents=True, exist_ok=True)
    parts = [f"## {study.title}", study.notes.strip(), _setting(study, result)]

    def show(figure: Any, name: str, caption: str) -> None:
        save(figure, folder / f"{prefix}{name}.png")
        parts.append(show_figures([(f"{prefix}{name}.png", caption)]))

    for name, groups in columns.items():
        file = slug(name)
        parts += [f"### {name}", _column_tables(study, result["columns"][name], groups)]
        if len(shown) > MOST_CURVES:
            caption = f"{name}: top accuracy, mean and 95 % interval; ticks are the seeds."
            show(ranking_figure(groups), file, caption)
        elif any(has([group], ACCURACY) for group in groups):
            caption = f"{name}: test accuracy against what it costs.{spread_note(groups)}"
            show(accuracy_figure(groups, styles), file, caption)
        landscapes = landscapes_of(groups)
        if landscapes:
            caption = (
                f"{name}: training loss on a plane through the last model (the cross) of one "
                "seed, with the largest eigenvalue λ of its Hessian."
            )
            show(surface_figure(landscapes), f"{file}_landscape", caption)
    if study.axis:
        caption = (
            f"Top accuracy against {study.axis}: means with 95 % intervals, short lines are the "
            "seeds; level lines are methods without it."
        )
        show(_ablation(study, columns), "ablation", caption)
    if len(shown) <= MOST_CURVES:
        for figure, name, caption in _diagnostics(columns, styles):
            show(figure, name, caption)
    histograms = {name: result["columns"][name]["label_histogram"] for name in columns}
    skewed = max(columns, key=lambda name: _skew(histograms[name]))
    if histograms[skewed]:
        seed = columns[skewed][0].runs[0].seed
        caption = f"Who holds which labels: {skewed}, seed {seed}."
        show(partition_figure(histograms[skewed]), "partition", caption)
    return "\n\n".join(parts)


def _skew(histogram: Any) -> float:
    """Mean distance of the clients' label shares from those of all, to choose what is drawn."""
    if not histogram:
        return -1.0
    counts = np.asarray(histogram, float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return float(abs(shares - counts.sum(0) / max(1.0, counts.sum())).sum(1).mean())


def _styles(study: Any, shown: Sequence[str]) -> Styles:
    """Each method's line, the same in all figures of the study."""
    return {
        name: line_style(*(study.methods[name].style or (place, place // len(COLOURS))))
        for place, name in enumerate(shown)
    }


def _setting(study: Any, result: Mapping[str, Any]) -> str:
    declared, cells = result["declared"], _cells(result)
    command = f"`python -m experiments.{study.paper} {study.short} --scale {result['scale']}`"
    seconds = sum(cell["seconds"] for cell in cells)
    seeds = sorted({run["seed"] for cell in cells for run in cell["runs"]})
    lines = [
        f"Command: {command}{_older(cells)}",
        f"Time: {_minutes(seconds)}, compilation and tuning included",
        f"Hardware: {declared['hardware']}",
        f"Seeds: {', '.join(map(str, seeds))}; each has its own partition, first model, cohorts "
        "and mini-batches, the same for all methods",
        f"Tuning: {_tuning(result)}",
    ]
    for one in result["versions"]:
        shown = ", ".join(f"{name} {version}" for name, version in sorted(one.items()))
        lines.append(f"Versions: {shown}")
    return "\n".join(f"- {line}." for line in [*lines, _code(cells)])


def _cells(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [cell for c in result["columns"].values() for cell in c["methods"].values()]


def _older(cells: Sequence[Mapping[str, Any]]) -> str:
    """Say how many cells the command does not repeat."""
    older = sum(not is_drawn_as_today(cell) for cell in cells)
    if not older:
        return ""
    which = f"{older} of the {len(cells)}" if older < len(cells) else f"all {len(cells)}"
    return (
        f"; {which} cells are of versions whose seeds draw other cohorts and mini-batches than "
        "today's, so that it repeats their settings and not their numbers"
    )


def _code(cells: Sequence[Mapping[str, Any]]) -> str:
    """Which version made the cells, and how many are compared with today's code."""
    codes = [cell["code"] for cell in cells]
    made = Counter(code["fedjax_lab"] for code in codes)
    text = ", ".join(f"{count} by {version}" for version, count in sorted(made.items()))
    compared = sum(code["fingerprint"] is not None for code in codes)
    same = f"{compared} have a fingerprint by which tests compare their method with today's code"
    return f"Cells made: {text}; {same}"


def _tuning(result: Mapping[str, Any]) -> str:
    tried = sum(len(cell["tuning"]["tried"]) for cell in _cells(result))
    if not tried:
        return "none"
    declared, columns = result["declared"], result["columns"].values()
    rounds = sorted({column["tuning_rounds"] for column in columns})
    text = f"{tried:,} points in all, with another seed, on {declared['held_out']:,} held-out "
    text += f"training images, for {' or '.join(f'{n:,}' for n in rounds)} rounds"
    if declared["finalists"] > 1:
        text += f"; the best {declared['finalists']} of a method once more for all rounds"
    return text


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def _column_tables(study: Any, column: Mapping[str, Any], groups: Sequence[Group]) -> str:
    """A column's comparison, what it costs to reach the target, and what tuning chose."""
    paper = column["paper"]
    target = default_target(groups)
    parts = []
    if column["published"]:
        parts.append(f"As published: {column['published']}'s way where a method has one.")
    if paper:
        parts.append(f"The paper's numbers: {paper['source']}.")
    parts.append(markdown_table(_with_paper(study, accuracy_table(groups, top), paper, groups)))
    if any(worst_residual(run) for group in groups for run in group.runs):
        parts.append(UNSOLVED_NOTE)
    if not math.isnan(target):
        parts += [
            f"Up to {100 * target:.10g} %, and what the whole run sends:",
            markdown_table(_cost_table(groups, target, paper)),
        ]
    parts += ["What was chosen:", markdown_table(_chosen_table(column, groups))]
    if any(_has_curvature(group) for group in groups):
        parts += [
            "Largest eigenvalue of the Hessian at the last model:",
            markdown_table(_curvature(groups)),
        ]
    return "\n\n".join(parts)


def _with_paper(
    study: Any, rows: list[list[str]], paper: Mapping[str, Any], groups: Sequence[Group]
) -> list[list[str]]:
    """The table with the paper's accuracies, which are of other data or other models."""
    accuracies = paper.get("accuracy") or {}
    if not accuracies:
        return rows
    added = [study.paper_head]
    for group in groups:
        printed = accuracies.get(group.label)
        added.append(NOTHING if printed is None else f"{printed:.2f}")
    return [[*row, more] for row, more in zip(rows, added, strict=True)]


def _cost_table(
    groups: Sequence[Group], target: float, paper: Mapping[str, Any]
) -> list[list[str]]:
    rows = target_table(groups, target)
    printed = paper.get("rounds_to") or {}
    head = ["MB up, all", "MB down, all", *(["paper: rounds to"] if printed else [])]
    added = [head]
    for group in groups:
        cells = [_megabytes(group, name) for name in ("bytes_up", "bytes_down")]
        if printed:
            found = printed.get(group.label) or {}
            cells.append(", ".join(f"{n:,} to {at} %" for at, n in found.items()) or NOTHING)
        added.append(cells)
    return [[*row, *more] for row, more in zip(rows, added, strict=True)]


def _megabytes(group: Group, name: str) -> str:
    """What a whole run moves, with three significant digits at least and no exponent."""
    value = estimate([run.values(name)[-1] for run in group.runs]).mean / 1e6
    if math.isnan(value):
        return NOTHING
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _chosen_table(column: Mapping[str, Any], groups: Sequence[Group]) -> list[list[str]]:
    rows = [["method", "points tried", "minutes", "chosen"]]
    for group in groups:
        cell = column["methods"][group.label]
        points = [json.loads(key) for key in cell["tuning"]["tried"]]
        chosen = ", ".join(
            f"{n} {_plain(v)}{_edge(n, v, points)}" for n, v in sorted(cell["chosen"].items())
        )
        minutes = f"{cell['seconds'] / 60:.1f}"
        rows.append([group.label, str(len(points) or NOTHING), minutes, chosen or NOTHING])
    return rows


def _edge(name: str, value: Any, points: Sequence[Mapping[str, Any]]) -> str:
    """A mark for a learning rate at an end of its grid."""
    tried = sorted({point[name] for point in points})
    if not name.endswith("_lr") or len(tried) < 3 or value not in (tried[0], tried[-1]):
        return ""
    return " (largest)" if value == tried[-1] else " (smallest)"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _has_curvature(group: Group) -> bool:
    return all(run.landscape.get("eigenvalues") for run in group.runs)


def _curvature(groups: Sequence[Group]) -> list[list[str]]:
    rows = [["method", "largest eigenvalue", "behind the flattest", "p"]]
    with_it = [group for group in groups if _has_curvature(group)]
    behind = behind_best(with_it, flatness)
    for group, cells in zip(with_it, behind, strict=True):
        shown = format_estimate(estimate([-flatness(run) for run in group.runs]), 1)
        rows.append([group.label, shown, *cells])
    return rows


def _ablation(study: Any, columns: Mapping[str, Sequence[Group]]) -> Any:
    """Methods of one algorithm are a line; those without a place have one of their own."""
    methods = study.methods

    def family(label: str) -> str:
        return label if methods[label].at is None else methods[label].algorithm

    return ablation_figure(columns, lambda label: methods[label].at, family, study.axis)


def _diagnostics(columns: Mapping[str, Sequence[Group]], styles: Styles) -> list[Any]:
    """(figure, name, caption) of client drift and of compression's error memory."""
    found = []
    groups = [group for some in columns.values() for group in some]
    drift = [panel for name, some in columns.items() for panel in panels_of(some, [DRIFT], name)]
    if drift:
        caption = "How far local models y get from the server's x in a round."
        found.append((metric_figure(drift, styles), "drift", f"{caption}{panels_note(drift)}"))
    shown = [y for y in ERROR_MEMORY if has(groups, y)]
    errors = [panel for name, some in columns.items() for panel in panels_of(some, shown, name)]
    if errors:
        caption = (
            "Compressed messages: what is kept for later, what was to be sent, and what was sent."
        )
        figure = metric_figure(errors, styles, columns=len(shown))
        found.append((figure, "error_memory", f"{caption}{panels_note(errors)}"))
    return found
