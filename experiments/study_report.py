"""The report of a study: Markdown tables, figures, RESULTS.md."""

import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_lab.estimates import Estimate, estimate, format_estimate, markdown_table

# Okabe and Ito's colours, which differ in lightness too, without the yellow; then dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")
MOST_CURVES = 14  # more cannot be told apart


def _curves(entry: Mapping[str, Any]) -> np.ndarray:
    """Accuracies in percent, [seeds, evaluations]; NaN for null."""
    return 100 * np.array([run["accuracy"] for run in entry["runs"]], float)


def _megabytes(entry: Mapping[str, Any], direction: str) -> float:
    """What the whole cohort sends or receives in a round."""
    return float(np.mean([run["metrics"][f"bytes_{direction}"] for run in entry["runs"]])) / 1e6


def _target(entries: Mapping[str, Any]) -> float:
    """95 % of the best method's mean top accuracy, cut to 0.1 %."""
    best = max(np.nanmax(_curves(entry), axis=1).mean() for entry in entries.values())
    return math.floor(9.5 * best) / 10


def _rounds_to(target: float, curves: np.ndarray, eval_every: int) -> Estimate | None:
    """Rounds until the first evaluation at the target; None unless all seeds reach it."""
    reached = curves >= target
    if not reached.any(1).all():
        return None
    return estimate([float(eval_every * (1 + row.argmax())) for row in reached])


def _mb(value: float) -> str:
    """Three significant digits at least, no exponent."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _chosen(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(entry["chosen"].items()))


def _partition_table(study: Any, result: Mapping[str, Any], partition: str) -> str:
    entries, eval_every = result["entries"][partition], result["scale"]["eval_every"]
    names = [name for name in study.methods if name in entries]
    target = _target(entries)
    with_paper = any(partition in study.methods[name].paper for name in names)
    head = ["method", "top %", "last %", f"rounds to {target:.1f} %", "MB up to it"]
    head += ["MB up", "MB down", *([study.paper_head] if with_paper else []), "chosen", "minutes"]
    rows = [head]
    for name in names:
        entry = entries[name]
        curves, up = _curves(entry), _megabytes(entry, "up")
        rounds = _rounds_to(target, curves, eval_every)
        reached = ["-", "-"]
        if rounds is not None:
            reached = [format_estimate(rounds, 0), _mb(rounds.mean * up)]
        paper = study.methods[name].paper.get(partition)
        shown = ["-" if paper is None else f"{paper:.2f}"] if with_paper else []
        total = curves.shape[1] * eval_every
        rows.append(
            [
                name,
                format_estimate(estimate(np.nanmax(curves, axis=1).tolist()), 2),
                format_estimate(estimate(curves[:, -1].tolist()), 2),
                *reached,
                _mb(total * up),
                _mb(total * _megabytes(entry, "down")),
                *shown,
                _chosen(entry),
                f"{(entry['tuning_seconds'] + entry['final_seconds']) / 60:.1f}",
            ]
        )
    return markdown_table(rows)


def table(study: Any, result: Mapping[str, Any]) -> str:
    """Markdown: a table for each partition."""
    parts = []
    for partition in _finished(study, result):
        parts += [f"### {partition}", _partition_table(study, result, partition)]
    return "\n\n".join(parts) + "\n"


def _finished(study: Any, result: Mapping[str, Any]) -> list[str]:
    return [name for name in study.partitions if result["entries"].get(name)]


def figure(study: Any, result: Mapping[str, Any], partition: str, path: Path) -> None:
    """Accuracy against rounds, with the seeds' range, and against megabytes sent.

    Of more methods than can be told apart, only the accuracy at the end.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    entries, eval_every = result["entries"][partition], result["scale"]["eval_every"]
    places = list(study.methods)
    names = [name for name in places if name in entries]
    if len(study.methods) > MOST_CURVES:
        _save(_ranking(Figure, entries), path)
        return
    columns = max(1, min(len(names), 100 // (8 + max(map(len, names)))))
    height = 3.8 + 0.22 * -(-len(names) // columns)
    drawing = Figure(figsize=(9, height), layout="constrained")
    left, right = drawing.subplots(1, 2, sharey=True)
    settled = []
    for name in names:
        curves, place = _curves(entries[name]), places.index(name)
        colour, dash = study.methods[name].style or (place % len(COLOURS), place // len(COLOURS))
        style = {"color": COLOURS[colour], "linestyle": DASHES[dash], "linewidth": 1.6}
        rounds, mean = eval_every * np.arange(1, curves.shape[1] + 1), curves.mean(0)
        left.plot(rounds, mean, label=name, **style)
        left.fill_between(rounds, curves.min(0), curves.max(0), color=style["color"], alpha=0.1)
        right.plot(rounds * _megabytes(entries[name], "up"), mean, **style)
        settled.append(mean[len(mean) // 5 :])
    left.set(xlabel="round", ylabel="test accuracy (%)", xlim=(0, None))
    left.set_ylim(max(0, np.nanmin(settled) - 5), np.nanmax(settled) + 2)
    right.set(xlabel="uplink of all clients together (MB)", xscale="log")
    right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.xaxis.set_major_formatter("{x:g}")
    right.xaxis.set_minor_formatter("")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, linewidth=0.6)
    drawing.legend(loc="outside lower center", ncols=columns, frameon=False, handlelength=3)
    _save(drawing, path)


def _ranking(new_figure: Any, entries: Mapping[str, Any]) -> Any:
    """Top accuracy of every method, best above: mean, 95 % interval, the seeds."""
    tops = {name: np.nanmax(_curves(entry), axis=1) for name, entry in entries.items()}
    names = sorted(tops, key=lambda name: tops[name].mean())
    drawing = new_figure(figsize=(7, 1 + 0.2 * len(names)), layout="constrained")
    axes = drawing.subplots()
    for height, name in enumerate(names):
        found = estimate(tops[name].tolist())
        axes.errorbar(found.mean, height, xerr=found.half_width, fmt="o", color=COLOURS[0], ms=4)
        axes.plot(tops[name], [height] * len(tops[name]), "|", color=COLOURS[1], ms=6)
    best = max(top.max() for top in tops.values())
    worst = min(top.mean() for top in tops.values())
    axes.set(xlabel="top test accuracy (%)", xlim=(max(worst - 3, best - 60), best + 2))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-1, len(names))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)
    return drawing


def _save(drawing: Any, path: Path) -> None:
    """As a PNG with a palette, which is half the size."""
    from PIL import Image

    buffer = io.BytesIO()
    drawing.savefig(buffer, dpi=90, format="png")
    scratch = path.with_name(f".{path.name}.tmp")
    Image.open(buffer).convert("RGB").quantize(256).save(scratch, format="png", optimize=True)
    os.replace(scratch, path)


def write_report(study: Any, source: Path, folder: Path) -> Path:
    """Write results.json, RESULTS.md and the figures; returns the path of RESULTS.md.

    discussion.md of the folder, where it is, becomes the end of RESULTS.md.
    """
    result = json.loads(source.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "results.json", _compact(result))
    figures = []
    for partition in _finished(study, result):
        name = f"{partition.replace(':', '_')}.png"
        figure(study, result, partition, folder / name)
        figures.append(f"![Accuracy on {partition}]({name})")
    discussion = folder / "discussion.md"
    text = [
        f"# {study.title}",
        study.notes.strip(),
        _setting(study, result),
        "## Accuracy and traffic",
        _explained(result),
        table(study, result).strip(),
        "## Figures",
        "Lines are means over the seeds, shades on the left their range."
        if len(study.methods) <= MOST_CURVES
        else "Points are means over the seeds, lines 95 % intervals, ticks the seeds.",
        *figures,
    ]
    if discussion.exists():
        text.append(discussion.read_text(encoding="utf-8").strip())
    _write(folder / "RESULTS.md", "\n\n".join(text) + "\n")
    return folder / "RESULTS.md"


def _setting(study: Any, result: Mapping[str, Any]) -> str:
    entries = [entry for group in result["entries"].values() for entry in group.values()]
    minutes = sum(entry["tuning_seconds"] + entry["final_seconds"] for entry in entries) / 60
    scale = result["scale"]
    tuned = "nothing was tuned"
    if any(entry["validation"] for entry in entries):
        tuned = (
            f"chosen on {scale['held_out']:,} held-out training images with another seed: the best "
            f"after {scale['tuning_rounds']} rounds"
        )
        if scale["finalists"] > 1:
            tuned += f", of whose {scale['finalists']} best the best after {scale['rounds']} rounds"
    versions = ", ".join(f"{k} {v}" for k, v in result.get("versions", {}).items())
    return (
        f"Command: `python -m {study.module}`, {minutes:.0f} minutes on 2 CPU cores beside other "
        f"work. {scale['rounds']} rounds, {len(scale['seeds'])} seeds, each with its own "
        f"partition, first model, cohorts and mini-batches; {tuned}."
        + (f" Versions: {versions}." if versions else "")
    )


def _explained(result: Mapping[str, Any]) -> str:
    return (
        "Test accuracy: mean ± 95 % interval over the seeds (Student's t). The target is 95 % of "
        "the best method's top accuracy, given only where all seeds reach it, to within "
        f"{result['scale']['eval_every']} rounds. MB count the whole cohort over the whole run "
        "(1 MB = 10^6 bytes)."
    )


def _compact(result: Mapping[str, Any]) -> str:
    """JSON with a line for each (partition, method)."""
    head = {key: value for key, value in result.items() if key != "entries"}
    lines = []
    for partition, entries in result["entries"].items():
        inner = [f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in entries.items()]
        lines.append(f"{json.dumps(partition)}: {{\n" + ",\n".join(inner) + "\n}")
    top = [f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(head.items())]
    return "{\n" + ",\n".join([*top, '"entries": {\n' + ",\n".join(lines) + "\n}"]) + "\n}\n"


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
