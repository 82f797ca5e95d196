"""A study's results, as they are kept, as groups of runs: what tables and claims are made of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_lab.report.runs import Group, Run


def groups_of(study: Any, result: Mapping[str, Any]) -> dict[str, list[Group]]:
    """Column -> the groups of the methods that it has, in the study's order of both."""
    scale = study.scales.get(result["scale"])
    order = list(scale.columns) if scale else []
    names = [name for name in order if name in result["columns"]]
    names += [name for name in result["columns"] if name not in names]
    groups = {
        name: [
            _group(method, cell, result["columns"][name]["settings"].get("rounds"))
            for method in study.methods
            if (cell := result["columns"][name]["methods"].get(method))
        ]
        for name in names
    }
    return {name: found for name, found in groups.items() if found}


def _group(method: str, cell: Mapping[str, Any], rounds: int | None) -> Group:
    runs = [
        Run(
            path=Path(method) / f"seed{run['seed']}",
            algorithm=method,
            seed=run["seed"],
            settings={},
            rows=_rows(run["curves"]),
            config={
                "rounds": rounds or run["curves"]["round"][-1],
                "partition": {"hash": run.get("partition_hash")},
            },
            summary=run.get("summary") or {},
            partition={},
            landscape=run.get("landscape") or {},
        )
        for run in cell["runs"]
    ]
    return Group(method, runs, "")


def _rows(curves: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A row per evaluation, as a run directory has them."""
    return [dict(zip(curves, row, strict=True)) for row in zip(*curves.values(), strict=True)]
