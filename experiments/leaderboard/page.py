"""docs/leaderboard.md, its figure and its files of settings, from the stored cells alone."""

import csv
import html
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.leaderboard import claims
from experiments.leaderboard.cells import AS_MANY_POINTS, POINTS, RESULTS, load, slug
from experiments.leaderboard.figure import heat_map
from experiments.leaderboard.methods import LEFT_OUT, METHODS
from experiments.leaderboard.scores import Row, difference, ranks, rows_of, tails_of
from experiments.leaderboard.tasks import SEEDS, TASKS, Task
from experiments.studies import chance
from experiments.studies.verdicts import CONTRADICTED
from fedjax_lab.estimates import NOTHING, Estimate, format_estimate
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import markdown_table
from fedjax_lab.report.statistics import mean

PAGE = Path(__file__).parents[2] / "docs" / "leaderboard.md"
FIGURE = "images/leaderboard.svg"

_FEW = 5  # methods, below which a task's best one says little

Cells = Mapping[str, Mapping[str, Any]]


def write(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the page, and next to it the figure and a file of settings for each task.

    Args:
      folder: folder of all results.
      page: the file.
    """
    stored = {name: load(folder, name) for name in TASKS}
    more = {name: load(AS_MANY_POINTS, name) for name in TASKS} if folder == RESULTS else {}
    files = {page: text(stored, more)}
    files[page.parent / FIGURE] = heat_map(rows_of_tasks(stored), _names(stored))
    for name, cells in stored.items():
        if cells:
            files[page.parent / _settings_file(name)] = settings(cells)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, content)


def rows_of_tasks(stored: Mapping[str, Cells]) -> dict[str, Mapping[str, Row]]:
    """Return the rows of all tasks: task -> method -> row.

    Args:
      stored: task -> method -> cell.
    """
    return {name: rows_of(TASKS[name], cells) for name, cells in stored.items()}


def _names(stored: Mapping[str, Cells]) -> list[str]:
    """Return the names of all methods, those of the catalogue first."""
    return list(dict.fromkeys([*METHODS, *(name for cells in stored.values() for name in cells)]))


def text(stored: Mapping[str, Cells], more: Mapping[str, Cells] | None = None) -> str:
    """Return the page as Markdown, results first.

    Args:
      stored: task -> method -> cell.
      more: the same, of rows that were tuned again with as many points as others.
    """
    found = rows_of_tasks(stored)
    parts = [_HEAD, "## At a glance", _glance(found), _ROWS, _MEMORY]
    parts += ["## All tasks", _FIGURE, f"![Gap to the best method, methods by tasks]({FIGURE})"]
    parts += ["## Tables", _COLUMNS]
    for name, rows in found.items():
        if rows:
            parts.append(_section(name, TASKS[name], rows))
    parts += _gains(stored)
    parts += _as_many_points(stored, more or {})
    parts += _claims(stored.get(claims.TASK, {}))
    parts += ["## What the numbers do not say", _LIMITS]
    parts += ["## Running it", _run(stored), *_missing(stored, _names(stored)), _left_out()]
    return "\n\n".join(parts) + "\n"


_HEAD = f"""\
# Leaderboard

<!-- Written by `python -m experiments.leaderboard --report`. -->

Methods of the catalogue on small tasks that tell them apart. All methods are tuned by
[`fedjax_lab.tune`](guides/tune.md) with the same number of gradients, and then run with
{len(SEEDS)} other seeds, each of which divides the data among the clients anew. The tasks are small
on purpose: Fashion-MNIST at 14 x 14 pixels and a network with one hidden layer, or Shakespeare's
characters and an LSTM of 32 units; 60 or 90 rounds. A rank here says nothing about large models."""

_ROWS = """\
**Level with it**: methods whose paired difference from the best one has a 95 % interval that
contains 0. **FedAvg's gap** is the difference between the best method and FedAvg.

The rows are the papers' methods as their texts have them. `W` and `G` are the two methods called
FedADMM, `S` and `D` variants of FedLESAM. **FedSpeed has two rows**: by the paper's text the server
averages the duals of the cohort (`fedspeed`), in the published code those of all clients
(`fedspeed all`). Under partial participation, the first is far behind, and tuning is a part of why:
with three times the points it gains much on the skewed tasks, and stays far behind FedAvg (see
"With as many points"). Without the dual correction (`correction=False`) or with the duals of all
clients, FedSpeed is among the others there."""

_MEMORY = """\
**Why GradMA-S is ahead**: its server keeps a fading sum of what each client has sent, N vectors of
the model's size, and corrects the update so that it opposes none of them. With the point that was
chosen on `skew-0.1`, `skew-0.01` and `unequal` it ends at 82.6, 81.8 and 82.0 %; without the memory
(`memory_size=0`) at 76.9, 73.4 and 76.5 %, and with a memory of one cohort at 77.2, 74.0 and
76.8 %. So the memory of clients that are absent makes the difference
(`python -m experiments.leaderboard.memory`). `gradma` and `mifa` keep N vectors, too; `gradma` is
level with `gradma_s` on the skewed tasks if it has as many points. In the convex task, `gradma_s`
is behind FedAvg."""

_FIGURE = """\
A number is the gap to the best method of the task: points of accuracy, or decimal digits in the
convex task. The darkest color stands for 5 points or 2 digits and more. Methods with many cells
come first, then those with small gaps. Empty cells have not been run; a dot means that the method
does not fit the task."""

_COLUMNS = """\
Click on a column's head to sort by it.

- **Score**: mean over the last tenth of the rounds, mean ± 95 % interval over the seeds.
  **Top** is the best evaluation of a run; it is chosen on the test set and rewards oscillation.
- **Rank**: by score. In brackets, the ranks that the paired differences allow: methods whose 95 %
  interval lies above this method's come before it, those whose interval lies below come after it.
- **Gap**: how far the method is behind the best one, in units of the score. It is the mean of the
  differences between runs with the same seed, with a 95 % interval.
- **Rounds**, **MB up** and **gradients**: what it takes until the first evaluation that reaches the
  target, for all clients together (1 MB = 10^6 bytes); mean over the seeds. A dash: a seed does
  not reach it.
- **Diverged**: share of the tuning points that diverged.

Each table has a file of settings. **Chosen** is the point that tuning chose. **At an end**:
hyperparameters whose best value is the smallest or largest one tried; a better one may lie beyond.
**Again from**: the simpler method from which a search was repeated, because its best point scored
lower on validation.
**Tuning gradients**: mini-batch gradients per client and local step that the search spent, and the
repeated one if its point was chosen. **Tuning scores**: those of the chosen point with both tuning
seeds. **Rounds**: of a final run."""

_LIMITS = f"""\
- All points were tuned on one partition, by version 0.4.0 where the ranges have not changed since.
  The final runs of a task have {len(SEEDS)} others (in the convex task, other problems), so the
  intervals cover partitions; `natural` has one set of roles and five seeds.
- Tuning and final runs share a task's training images, but neither seeds nor the images that they
  score on. In the convex task, both score the distance to the optimum.
- `natural` has 100 of 1,136 roles, a small network and 60 rounds; it scores on 500 sequences of the
  last fifths of these roles' texts. The study of all roles (`experiments/natural/RESULTS.md`) has
  more rounds, a larger network, fewer methods, and another budget. Rows below 17 % (`fedpd`,
  `fedadmm`) predict little but the most frequent character: their searches found no point that
  learns, in ranges of rates ten times those of images.
- Best, gaps and ranks are among the methods that have been run; further cells can change them. The
  intervals are not corrected for the number of comparisons.
- The searches are small: about 45 points for a method with one gradient in a local step, 20 for two
  and 8 for three, whatever the number of its hyperparameters. Budgets agree up to about a tenth;
  with a compressed uplink they are equal in bytes. Early rungs favor points that learn fast. A
  method far behind may have a better point that its search missed. Searches that ended below a
  simpler method that has a row, and that the method contains, were repeated from there, which
  doubles their gradients. Other methods may be behind because no such point was tried.
- Times are not shown: the cells ran beside other programs.
  `python -m experiments.benchmarks.methods --methods all` measures what a round of each method
  costs.
- 60 and 90 rounds are few. A method that is slow at first and good at last is behind here."""


def _glance(found: Mapping[str, Mapping[str, Row]]) -> str:
    """Return the best method of each task, those level with it, and how far FedAvg is behind."""
    table = [["task", "methods", "best", "score", "level with it", "FedAvg's gap"]]
    for name, rows in found.items():
        ranked = [method for method, row in rows.items() if row.gap is not None]
        if len(ranked) < _FEW:
            continue
        task, (best, *rest) = TASKS[name], ranked
        unit = "digits" if task.unit == "digits" else "points"
        level = [m for m in rest if (gap := rows[m].gap) and gap.mean <= gap.half_width]
        gap = rows["fedavg"].gap if "fedavg" in rows and best != "fedavg" else None
        line = [task.title, str(len(rows)), html.escape(best)]
        line += [f"{_shown(rows[best].score)} {task.unit}", ", ".join(level) or NOTHING]
        table.append([*line, NOTHING if gap is None else f"{_shown(gap)} {unit}"])
    return markdown_table(table, text=True)


def _gains(stored: Mapping[str, Cells]) -> list[str]:
    """Show what each method gains over the simpler ones that it contains."""
    tails = {name: tails_of(cells) for name, cells in stored.items()}
    table = [["method: simpler one", *tails, "ahead", "behind"]]
    for method, row in ((m, row) for m, of in METHODS.items() for row in of.simpler):
        gains = [
            difference(scores[method], scores[row]) if {method, row} <= scores.keys() else None
            for scores in tails.values()
        ]
        found = [gain for gain in gains if gain is not None]
        ahead = sum(gain.mean > (gain.half_width or 0.0) for gain in found)
        behind = sum(gain.mean < -(gain.half_width or 0.0) for gain in found)
        line = [html.escape(f"{method}: {row}"), *map(_shown, gains)]
        table += [[*line, str(ahead), str(behind)]] if found else []
    again = sum("start" in cell for cells in stored.values() for cell in cells.values())
    if len(table) == 1:
        return []
    about = f"""\
Many methods are a simpler one at some value of a hyperparameter, or come near to it. A number is
the difference of the scores, paired over the seeds, with a 95 % interval; the last columns count
the tasks on which the method is ahead and behind. Searches that ended below the simpler method, by
their scores on validation, were repeated with its point as a start point: {again} of them. A
difference near 0 with a small interval is often the simpler method itself, chosen by the search."""
    return ["## What a method adds to a simpler one", about, markdown_table(table)]


def _as_many_points(stored: Mapping[str, Cells], more: Mapping[str, Cells]) -> list[str]:
    """Show what the methods with several gradients in a local step gain by a larger search."""
    tasks = [name for name, cells in more.items() if cells]
    if not tasks:
        return []
    tails = {name: tails_of(stored[name]) for name in tasks}
    again = {name: tails_of(more[name]) for name in tasks}
    methods = [name for name in METHODS if any(name in scores for scores in again.values())]
    table = [["method", *tasks]]
    for method in methods:
        cells = []
        for name in tasks:
            if method not in again[name] or method not in tails[name]:
                cells.append(NOTHING)
                continue
            now, before = again[name][method], tails[name][method]
            gain = _shown(difference(now, before))
            cells.append(f"{mean(now):.2f} ({gain}), {ranks({**tails[name], method: now}, method)}")
        table.append([html.escape(method), *cells])
    about = f"""\
In the tables, a method with two or three gradients in a local step has 20 or 8 points, so that its
search costs as much as another's. Here these methods had {POINTS.points} points each, as many as
the largest search of the others, and so two or three times the gradients. A number is the score,
in brackets its change against the table (paired over the seeds, 95 %), and then the ranks that the
differences from all other rows of the table allow."""
    return ["## With as many points", about, markdown_table(table)]


def _claims(cells: Cells) -> list[str]:
    """Say which claims of generalisation show."""
    found = claims.decided(cells)
    if not found:
        return []
    few, lead = cells["fedavg"]["runs"], _shown(claims.lead(cells["fedavg"]), 1)
    chances = [chance.of(len(claim.of), len(few)) for claim, *_ in found]
    shows, contradicted = (sum(values) / 100 for values in zip(*chances, strict=True))
    about = f"""\
What the papers of FedSWA and FedSpeed claim, on `{claims.TASK}` with {len(few)} seeds: paired
differences in points with 95 % intervals, by the rules of the papers' studies
(`experiments/PROTOCOL.md`). The claims were written before the runs. FedAvg's training accuracy is
{lead} points above its test accuracy; at least {claims.LEAST_GAP:g} were required. "Generalizes
better" compares this lead. If no method differed from another, {shows:.1f} of {len(found)} claims
would show by chance by one measure, and {contradicted:.1f} would be contradicted, which is likelier
against the best of several rivals.

An undecided claim is not an open one here: its interval says how large the difference can be."""
    table = [["claim", "top", "tail", "verdict"]]
    table += [[_with_rivals(claim), *said] for claim, *said in found]
    whys = [f"- {c.text}: {c.why or 'not known'}." for c, *_, v in found if v == CONTRADICTED]
    parts = ["## Claims of generalization", about, markdown_table(table, text=True)]
    return [*parts, "Why a claim is contradicted here:", "\n".join(whys)] if whys else parts


def _with_rivals(claim: claims.Claim) -> str:
    return claim.text if len(claim.of) == 1 else f"{claim.text}: of {', '.join(claim.of)}"


def _run(stored: Mapping[str, Cells]) -> str:
    """Say who made the cells, and how to run more."""
    cells = [cell for of_task in stored.values() for cell in of_task.values()]
    versions = ", ".join(sorted({cell["versions"]["fedjax_lab"] for cell in cells}))
    minutes = sum(cell.get("processor_seconds", 0) for cell in cells) / 60
    return f"""\
{len(cells)} cells have been run, by version {versions or NOTHING}, in {minutes:.0f} processor
minutes, tuning and compilation included. Each is a file,
`experiments/leaderboard/results/TASK/METHOD.json`; a cell is run again after its file is deleted.

    python -m experiments.leaderboard                     # runs the cells that are missing
    python -m experiments.leaderboard --tasks skew-0.1 --methods fedavg scaffold
    python -m experiments.leaderboard --method mine=package.module:factory   # only your row
    python -m experiments.leaderboard --report            # writes this page; runs nothing

A factory of your own takes `(loss_fn, client_lr=..., ...)` like those of the catalogue. It is tuned
over those of its arguments that `SPACE` in `experiments/leaderboard/methods.py` names, and over
`--space mine.decay=0.5,0.9` or `--space mine.decay=log:0.01:1`. An entry in `METHODS` there does
the same."""


def _missing(stored: Mapping[str, Cells], names: list[str]) -> list[str]:
    """Return a section on the tasks of which cells have not been run; none if all have."""
    lines = []
    for name, cells in stored.items():
        task = TASKS[name]
        fitting = [m for m in names if m not in METHODS or METHODS[m].refused(task) is None]
        missing = [m for m in fitting if m not in cells]
        said = f"- {task.title} (`{name}`): {len(fitting) - len(missing)} of {len(fitting)}."
        if len(missing) < len(fitting):
            said += f" Not run: {', '.join(missing)}."
        lines += [said] if missing else []
    return ["## How much has been run", "\n".join(lines)] if lines else []


def _section(name: str, task: Task, rows: Mapping[str, Row]) -> str:
    unit = "digits" if task.unit == "digits" else "points"
    head = ["method", "rank", f"score ({task.unit})", f"gap ({unit})", "top"]
    train = any(row.train is not None for row in rows.values())
    head += ["train (%)"] if train else []
    head += ["rounds", "MB up", "gradients", "diverged"]
    table = [head]
    for method, row in rows.items():
        gap = "best" if row.is_best else _shown(row.gap)
        line = [html.escape(method), row.rank, _shown(row.score), gap, _shown(row.top)]
        line += [_shown(row.train, 1)] if train else []
        line += [_number(row.rounds, 0), _number(row.megabytes, 2), _number(row.gradients, 0)]
        table.append([*line, f"{row.diverged:.0%}"])
    about = f"{task.asks} The target is a score of {task.target:g}. "
    about += f"[The settings of all rows]({_settings_file(name)})."
    return f"### {task.title}\n\n{about}\n\n{markdown_table(table)}"


def _settings_file(task: str) -> str:
    return f"leaderboard/{slug(task)}.csv"


def settings(cells: Cells) -> str:
    """Return the settings of a task's cells as CSV.

    Args:
      cells: method -> cell.
    """
    head = ["method", "chosen", "at an end", "again from", "points"]
    rows = [[*head, "tuning gradients", "tuning scores", "rounds"]]
    for method, cell in cells.items():
        if cell["chosen"] is None:
            rows.append([method, "all points diverged", *[""] * 6])
            continue
        fixed = cell["declared"]["method"]["fixed"]
        chosen = [f"{n} {value:.4g}" for n, value in cell["chosen"].items()]
        chosen += [f"{n} {value}" for n, value in fixed.items()]
        scores = ", ".join(f"{score:.2f}" for score in cell["validation"])
        again = cell.get("start", {}).get("row", "")
        row = [method, ", ".join(chosen), ", ".join(cell["edges"]), again, str(cell["points"])]
        rows.append([*row, str(cell["tuning_gradients"]), scores, str(cell["rounds"][-1])])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _left_out() -> str:
    lines = []
    for reason in dict.fromkeys(LEFT_OUT.values()):
        names = [name for name, why in LEFT_OUT.items() if why == reason]
        lines.append(f"- {', '.join(names)}: {reason}.")
    return "## Methods that have no row\n\n" + "\n".join(lines)


def _shown(value: Estimate | None, digits: int = 2) -> str:
    return NOTHING if value is None else format_estimate(value, digits)


def _number(value: float, digits: int) -> str:
    return NOTHING if math.isnan(value) else f"{value:,.{digits}f}"
