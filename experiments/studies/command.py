"""The command line of a paper's studies.

    python -m experiments.PAPER [STUDY ...] [--scale machine] [--columns C ...] [--methods M ...]
        [--dataset D --model M] [--seeds 1 2 3] [--keep-tuning]
    python -m experiments.PAPER [STUDY ...] --report

``--report`` gathers the run directories into PAPER/results/STUDY.json and writes RESULTS.md,
RESULTS.html and the figures from that; what has no finished run directories stays in the file as
it is.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from experiments.studies.claims import Claim, judge
from experiments.studies.report import write_results
from experiments.studies.runs import gather, keep_tuning, run_study, slug, with_kept, write_compact
from experiments.studies.study import Scale, Study
from fedjax_lab.machine.program_cache import keep_by_default


def main(
    studies: Sequence[Study],
    arguments: Sequence[str] | None = None,
    claims: Sequence[Claim] = (),
) -> None:
    """The command line of a paper's studies.

    Args:
      studies: all of the paper's.
      arguments: the command line; None: the process's.
      claims: of the paper.
    """
    paper = studies[0].paper
    by_name = {study.short: study for study in studies}
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{paper}",
        description="Studies: " + "; ".join(f"{s.short} ({s.title})" for s in studies),
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="all by default")
    parser.add_argument("--scale", default="machine", choices=["paper", "machine", "smoke"])
    parser.add_argument("--columns", nargs="+", metavar="C", help="of the table; all by default")
    parser.add_argument("--methods", nargs="+", metavar="M", help="rows of the table")
    parser.add_argument("--dataset", help="in place of the study's")
    parser.add_argument("--model", help="in place of the study's, where the data set needs another")
    parser.add_argument("--seeds", nargs="+", type=int, help="of the final runs")
    parser.add_argument(
        "--keep-tuning", action="store_true", help="take the points that the stored results chose"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--report", action="store_true", help="write RESULTS.md; run nothing")
    parser.add_argument("--list", action="store_true", help="say what there is; run nothing")
    parser.add_argument("--out", type=Path, help="folder of the report; the paper's by default")
    given = parser.parse_args(arguments)
    for name in given.studies:
        if name not in by_name:
            parser.error(f"there is no study {name!r}; there are: {', '.join(by_name)}")
    chosen = [by_name[name] for name in given.studies or by_name]
    if given.list:
        print("\n".join(line for study in chosen for line in _listed(study)))
        return
    own = Path(__file__).parent.parent / paper
    out = given.out or own
    if given.report:
        _gather(chosen, given, out)
        print(write_results(studies, out, judge(claims, studies, out)))
        return
    keep_by_default()
    for study in chosen:
        if given.scale not in study.scales:
            print(f"{study.short} has no scale {given.scale}; it is left out", flush=True)
            continue
        scale = _with_changes(study.scales[given.scale], given)
        for kind, names, known in (
            ("column", given.columns, scale.columns),
            ("method", given.methods, study.methods),
        ):
            for name in names or ():
                if name not in known:
                    parser.error(f"{study.short} has no {kind} {name!r}; it has {', '.join(known)}")
        stored = study.result_path(own) if given.keep_tuning else None
        if stored is not None:
            keep_tuning(study, given.scale, scale, _folder(study, given), stored)
        run_study(study, scale, _folder(study, given), given.columns, given.methods)


def _listed(study: Study) -> list[str]:
    lines = [f"{study.name}: {study.title}", f"  methods: {', '.join(study.methods)}"]
    for name, scale in study.scales.items():
        lines.append(
            f"  --scale {name}: {', '.join(scale.columns)}; {len(scale.seeds)} seeds; "
            f"{scale.minutes:g} minutes on {scale.hardware}"
        )
    return lines


def _with_changes(scale: Scale, given: argparse.Namespace) -> Scale:
    """The scale with another data set, model or seeds."""
    changes = {name: getattr(given, name) for name in ("dataset", "model") if getattr(given, name)}
    if "model" in changes:
        changes["model_option"] = {}
    changed = {
        name: dataclasses.replace(column, settings={**column.settings, **changes})
        for name, column in scale.columns.items()
    }
    return dataclasses.replace(
        scale, columns=changed, seeds=tuple(given.seeds) if given.seeds else scale.seeds
    )


def _folder(study: Study, given: argparse.Namespace) -> Path:
    changed = [value for value in (given.dataset, given.model) if value]
    return given.runs / study.name / slug("-".join([given.scale, *changed]))


def _gather(studies: Sequence[Study], given: argparse.Namespace, out: Path) -> None:
    """Write the results of what has finished run directories."""
    for study in studies:
        folder = _folder(study, given)
        if folder.exists() and given.scale in study.scales:
            scale = _with_changes(study.scales[given.scale], given)
            found, path = gather(study, given.scale, scale, folder), study.result_path(out)
            if path.exists():
                kept = json.loads(path.read_text(encoding="utf-8"))
                found = with_kept(found, kept, scale.seeds)
            write_compact(path, found)
