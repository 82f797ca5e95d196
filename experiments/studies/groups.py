"""A study's results, as they are kept, as groups of runs: what tables and claims are made of."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedjax_lab.estimates import Estimate, estimate, standard_errors
from fedjax_lab.report.paired import paired_difference
from fedjax_lab.report.runs import Group, Run, with_own


def groups_of(study: Any, result: Mapping[str, Any]) -> dict[str, list[Group]]:
    """Column -> the groups of the methods that it has, in the study's order of both."""
    scale = study.scales.get(result["scale"])
    order = list(scale.columns) if scale else []
    names = [name for name in order if name in result["columns"]]
    names += [name for name in result["columns"] if name not in names]
    groups = {
        name: [
            _group(method, cell, result["columns"][name]["settings"]["rounds"])
            for method in study.methods
            if (cell := result["columns"][name]["methods"].get(method))
        ]
        for name in names
    }
    return {name: found for name, found in groups.items() if found}


def is_drawn_as_today(cell: Mapping[str, Any]) -> bool:
    """Whether the version that made a cell draws the cohorts and mini-batches of today's.

    Args:
      cell: a stored cell.
    """
    version = cell["code"]["fedjax_lab"]
    # Its development version still drew those of 0.3.0.
    return version >= "0.4.0" and version != "0.4.0.dev0"


def difference(one: Group, other: Group, measure: Callable[[Run], float]) -> Estimate | None:
    """Return ``measure`` of the first group less that of the second; None without runs in common.

    Seeds pair the runs. Those of versions that draw other mini-batches for a seed are no pairs:
    their means are compared, with Welch's interval.

    Args:
      one, other: groups of runs.
      measure: of a run.
    """
    if one.runs[0].config["drawn"] == other.runs[0].config["drawn"]:
        return paired_difference(one, other, measure)
    means, squares, counts = [], [], []
    for group in (one, other):
        found = estimate([measure(run) for run in group.runs])
        if found.half_width is None or math.isnan(found.mean):
            return None
        means.append(found.mean)
        squares.append((found.half_width / standard_errors(found.n)) ** 2)
        counts.append(found.n)
    total = math.fsum(squares)
    freedom = sum(square**2 / (n - 1) for square, n in zip(squares, counts, strict=True))
    n = 1 + max(1, math.floor(total**2 / freedom)) if freedom else min(counts)
    return Estimate(means[0] - means[1], standard_errors(n) * math.sqrt(total), n)


def _group(method: str, cell: Mapping[str, Any], rounds: int) -> Group:
    drawn = is_drawn_as_today(cell)
    runs = [
        Run(
            path=Path(method) / f"seed{run['seed']}",
            algorithm=method,
            seed=run["seed"],
            settings={},
            rows=[
                with_own(dict(zip(run["curves"], row, strict=True)))
                for row in zip(*run["curves"].values(), strict=True)
            ],
            config={
                "rounds": rounds,
                # Runs that were drawn otherwise are no pair.
                "partition": {"hash": (run["partition_hash"], drawn)},
                "drawn": drawn,
            },
            summary=run["summary"],
            partition={},
            landscape=run["landscape"] or {},
        )
        for run in cell["runs"]
    ]
    return Group(method, runs, "")
