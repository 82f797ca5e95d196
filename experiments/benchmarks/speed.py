"""What docs/speed.md and README say of speed, from what ``make bench`` stored.

    python -m experiments.benchmarks.page_figures

writes table and sentences between the marks of the pages, with the figures.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks import zoo
from experiments.benchmarks.compare import OPPONENTS, OURS, peak_of, ratios, spread, times_of
from experiments.benchmarks.workloads import WORKLOADS
from fedjax_lab.machine.atomic_files import write_text

STORED = Path(__file__).parent / "cpu.json"
ZOO = Path(__file__).parent / "zoo.json"
ROOT = Path(__file__).parents[2]
_LIBRARY, _OWN = OURS
_VERSIONS = ("jax", "torch", "fedjax", "flwr", "ray", "fedlab", "pfl", "python")
# Names in sentences; of a pair of systems, one of them is enough.
_SAID = {
    "fedjax": "FedJAX",
    "flower": "Flower",
    "fedlab": "FedLab",
    "pfl": "pfl-research",
    "torch": "a PyTorch loop",
    "torch_vmap": "`torch.func.vmap`",
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Speedup(NamedTuple):
    """A row of the first table of docs/speed.md.

    Attributes:
      label: workload, and whose model.
      workload: its name.
      is_own: whether the model is one of the user's own, a second row of its workload.
      ratio: (median, lowest, highest) over the repeats, to the best opponent of each.
    """

    label: str
    workload: str
    is_own: bool
    ratio: tuple[float, float, float]


def speedups(found: Mapping[str, Any]) -> list[Speedup]:
    """Return the rows, the fastest first.

    Args:
      found: what ``experiments.benchmarks`` stored.
    """
    rows = []
    for name, of in found["workloads"].items():
        compared = ratios(times_of(of["systems"]))
        for system in OURS:
            if compared.get(system):
                is_own = system == _OWN
                title = "your own flax CNN" if is_own else WORKLOADS[name].title.split(",")[0]
                rows.append(Speedup(f"{name}: {title}", name, is_own, compared[system]))
    return sorted(rows, key=lambda row: -row.ratio[0])


def sizes(name: str) -> str:
    """Return a workload with its clients, steps and mini-batches.

    Args:
      name: of the workload.
    """
    workload = WORKLOADS[name]
    return (
        f"{workload.title}, {workload.cohort_size} of {workload.num_clients:,} clients, "
        f"{workload.local_steps} steps of batch {workload.batch_size}"
    )


def opponents(found: Mapping[str, Any]) -> list[str]:
    """Return the opponents with a measurement.

    Args:
      found: what ``experiments.benchmarks`` stored.
    """
    measured = [times_of(of["systems"]) for of in found["workloads"].values()]
    return [name for name in OPPONENTS if any(name in times for times in measured)]


def table(found: Mapping[str, Any]) -> str:
    """Return the first table of docs/speed.md as Markdown: milliseconds a round of every system.

    Args:
      found: what ``experiments.benchmarks`` stored.
    """
    peak, others = peak_of(found), opponents(found)
    head = ["workload", "times the best opponent", "fedjax_lab"]
    head += [OPPONENTS[name][0] for name in others]
    head.append("share of the GEMM peak: ours, the best opponent's")
    lines = [_row(head), "|---|---|" + "---:|" * (len(others) + 1) + "---|"]
    for row in speedups(found):
        of = found["workloads"][row.workload]
        times = times_of(of["systems"])
        medians = {name: float(np.median([*seconds.values()])) for name, seconds in times.items()}
        own = medians[_OWN if row.is_own else _LIBRARY]
        best = min(medians[name] for name in others if name in medians)
        shares = [
            f"{100 * of['flop_per_round'] / each / peak:.0f} %" for each in (own, best) if peak
        ]
        title = "the same with a flax CNN of the user's own (`nn.Conv`, `nn.max_pool`)"
        label = title if row.is_own else sizes(row.workload)
        cells = [f"{1e3 * medians[name]:,.0f}" if name in medians else "-" for name in others]
        milliseconds = f"{1e3 * own:,.0f}"
        cells = [f"{row.workload}: {label}", spread(row.ratio), milliseconds, *cells]
        lines.append(_row([*cells, ", ".join(shares) or "-"]))
    return "\n".join(lines)


def first_rows(found: Mapping[str, Any]) -> str:
    """Return seconds to the first row and peak memory of every system as Markdown.

    Args:
      found: what ``experiments.benchmarks`` stored.
    """
    others = opponents(found)
    titles = ["fedjax_lab", *(OPPONENTS[name][0] for name in others)]
    lines = [_row(["workload", *titles]), "|---|" + "---:|" * len(titles)]
    for name, of in found["workloads"].items():
        cells = [name]
        for system in (_LIBRARY, *others):
            good = [each for each in of["systems"].get(system, []) if "status" not in each]
            memory = max((each["peak_bytes"] or 0 for each in good), default=0)
            first = [each["first_row_seconds"] for each in good if "first_row_seconds" in each]
            seconds = f"{np.median(first):.1f} s, " if first else ""
            cells.append(f"{seconds}{memory / 1e6:,.0f} MB" if good else "-")
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def sentence(found: Mapping[str, Any]) -> str:
    """Return how many times as fast as the best opponent it is, each workload counted once.

    Args:
      found: what ``experiments.benchmarks`` stored.
    """
    rows = [row for row in speedups(found) if not row.is_own]
    ahead = [row.ratio[0] for row in rows if row.ratio[0] >= 1]
    behind = [row for row in rows if row.ratio[0] < 1]
    *names, last = [_SAID[name] for name in opponents(found) if name in _SAID]
    fastest = f"the fastest of {', '.join(names)} and {last}" if names else last
    text = f"{min(ahead):.2f} to {max(ahead):.2f} times as fast as {fastest}"
    count = _NUMBERS[len(rows)]
    if not behind:
        return f"{text}, over {count} workloads"
    slower = ", ".join(f"{row.ratio[0]:.2f} on {row.label.split(': ')[1]}" for row in behind)
    return f"{text} on {_NUMBERS[len(ahead)]} of {count} workloads, and {slower}"


def about(found: Mapping[str, Any]) -> str:
    """Return where, when and with what it was measured, as a list in Markdown.

    Args:
      found: what ``experiments.benchmarks`` stored.
    """
    answers = {
        system: answer
        for of in found["workloads"].values()
        for system, given in of["systems"].items()
        for answer in given
        if "status" not in answer
    }
    versions: dict[str, str] = {}
    for answer in answers.values():
        versions |= answer["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if name in versions)
    threads = ", ".join(f"{system} {answer['threads']}" for system, answer in answers.items())
    repeats = {
        name: max(map(len, times_of(of["systems"]).values()), default=0)
        for name, of in found["workloads"].items()
    }
    failures = {
        f"{system} on {name}: {answer['status']}"
        for name, of in found["workloads"].items()
        for system, given in of["systems"].items()
        for answer in given
        if "status" in answer and answer["status"] != "no time was left"
    }
    machine, peak = found["machine"], peak_of(found)
    place = f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']:.0f} GiB"
    gemm = f"; float32 products of 2048 x 2048 ran at {peak / 1e9:,.0f} GFLOP/s" if peak else ""
    made = f"fedjax_lab {versions.get('fedjax_lab', '-')}, commit {found['commit']}"
    lines = {
        "Machine": f"{place} of memory, no GPU; load {found['load']:.1f} before the run{gemm}",
        "Versions": f"{shown}; {made}, on {found['date']}",
        "Threads": threads,
        "Repeats": ", ".join(f"{name} {number}" for name, number in repeats.items()),
        "Not measured": "; ".join(sorted(failures)),
        "Command": f"`{found['command']}`",
    }
    return "\n".join(f"- **{name}.** {text}." for name, text in lines.items() if text)


def pages(found: Mapping[str, Any]) -> dict[Path, str]:
    """Return the pages with what was measured between their marks.

    Args:
      found: what ``experiments.benchmarks`` stored.
    """
    said = {"speed": sentence(found), "speed table": f"\n{table(found)}\n"}
    said["speed first rows"] = f"\n{first_rows(found)}\n"
    said["speed machine"] = f"\n{about(found)}\n"
    if ZOO.exists():
        said["zoo table"] = f"\n{zoo.table(json.loads(ZOO.read_text(encoding='utf-8')))}\n"
    texts = {}
    for name in ("README.md", "docs/comparison.md", "docs/speed.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for mark, content in said.items():
            before, begin, rest = text.partition(f"<!-- {mark} -->")
            if begin:
                _, end, after = rest.partition(f"<!-- /{mark} -->")
                text = f"{before}{begin}{content}{end}{after}"
        texts[ROOT / name] = text
    return texts


def stored() -> Mapping[str, Any] | None:
    """Return what ``make bench`` stored; None if it has not yet."""
    if not STORED.exists():
        return None
    found: Mapping[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def write() -> list[Path]:
    """Write the pages; returns them."""
    found = stored()
    texts = {} if found is None else pages(found)
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)
