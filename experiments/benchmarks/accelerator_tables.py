"""The rows of ``experiments.benchmarks.accelerators`` as the tables of docs/accelerators.md.

Methods have a line for each target, with a column for each client map; all else a line for each
program.
"""

import collections
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

MARK = "<!-- What follows is written by `make accelerator-check`. -->\n"
TITLES = {
    "methods": "Methods under client maps",
    "runs": "Whole runs",
    "notebooks": "The notebooks' programs",
    "planner": 'What "auto" plans',
    "convolutions": "Convolutions",
    "models": "Models",
    "compressors": "Compressors",
}
TARGETS = ("v5e", "v5e:2x2", "v5e:2x4", "v5e:16x16", "h200", "h200:4", "h200:8")
MAPS = ("vmap", "scan", "chunk:5", "shard_map", "pmap")

Row = Mapping[str, Any]


def write(rows: Mapping[str, Row], planned: Iterable[tuple[str, str]], page: Path, file: Path):
    """Write the tables below the page's mark, and all rows as JSON.

    Args:
      rows: by their programs' keys.
      planned: (group, key) of all programs.
      page: a Markdown file that has the mark.
      file: for the rows.
    """
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    text, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{page} has no line {MARK.strip()}")
    parts = [text + mark]
    all_keys = list(planned)
    order = {key: place for place, (_, key) in enumerate(all_keys)}
    known = sorted(rows, key=lambda key: (_place(key), order.get(key, len(order))))
    for group, title in TITLES.items():
        found = [rows[key] for key in known if rows[key]["group"] == group]
        table = _methods(found) if group == "methods" else _table(found, rows)
        parts.append(f"\n## {title}\n\n{table}")
        missing = [key for of, key in all_keys if of == group and key not in rows]
        if missing:
            targets = collections.Counter(key.split(" | ")[0] for key in missing)
            counts = ", ".join(f"{count} for {target}" for target, count in targets.items())
            parts.append(f"\nNot run: {len(missing)} of these programs ({counts}).\n")
    page.write_text("".join(parts), encoding="utf-8")


def _place(key: str) -> int:
    """Machines one after the other, the smallest first."""
    machine = key.split(" | ")[0]
    return TARGETS.index(machine) if machine in TARGETS else len(TARGETS)


def _table(found: list[Row], rows: Mapping[str, Row]) -> str:
    if not found:
        return "None was run.\n"
    lines = [
        "| program | target | map | compile CPU s (times FedAvg's) | code MiB | arguments MiB "
        "| temporaries MiB | estimate / compiler | GB accessed | collectives |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        start = f"| {row['name']} | {row['target']} |"
        if "error" in row:
            lines.append(f"{start} does not compile: {row['error'][:120]} |{' |' * 7}")
            continue
        base = rows.get(f"{row['target']} | methods | fedavg vmap", {})
        seconds, first = row["seconds"], base.get("seconds")
        ratio = f" ({seconds / first:.1f})" if seconds and first else ""
        cells = [
            row.get("client_map", ""),
            "" if seconds is None else f"{seconds:.0f}{ratio}",
            *(_mib(row[name]) for name in ("code", "arguments", "temporaries")),
            _ratio(row.get("estimated"), row["memory"], 2),
            _ratio(row["bytes_accessed"], 1e9, 2),
            _collectives(row),
        ]
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _methods(found: list[Row]) -> str:
    """A table for each target: a line for each method, and in it what each map has."""
    tables: dict[str, dict[str, dict[str, Row]]] = {}
    for row in found:
        client_map = next(m for m in MAPS if f" {m}" in row["name"])
        name = row["name"].replace(f" {client_map}", "")
        tables.setdefault(row["target"], {}).setdefault(name, {})[client_map] = row
    return "\n\n".join(_of_target(target, methods) for target, methods in tables.items()) + "\n"


def _of_target(target: str, methods: Mapping[str, Mapping[str, Row]]) -> str:
    rows = [row for by_map in methods.values() for row in by_map.values()]
    maps = [m for m in MAPS if any(m in by_map for by_map in methods.values())]
    first = {m: methods.get("fedavg", {}).get(m, {}).get("seconds") for m in maps}
    columns: dict[str, Callable[[Row, str], str]] = {
        "times FedAvg's compile s": lambda row, m: _ratio(row["seconds"], first[m]),
        "code MiB": lambda row, _: _mib(row["code"]),
        "temporaries MiB": lambda row, _: _mib(row["temporaries"]),
        "estimate / compiler": lambda row, _: _ratio(row["estimated"], row["memory"], 2),
        "GB accessed": lambda row, _: _ratio(row["bytes_accessed"], 1e9, 2),
        "collectives": lambda row, _: _collectives(row),
    }
    if not any(row.get("code") for row in rows):
        del columns["code MiB"]  # the CUDA compiler does not say
    if not any(row.get("collectives") for row in rows):
        del columns["collectives"]
    lines = [f"| method | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name, by_map in methods.items():
        cells = [[_cell(by_map, m, of) for m in maps] for of in columns.values()]
        lines.append(f"| {name} | {' | '.join(' · '.join(cell) for cell in cells)} |")
    seconds = ", ".join(f"{m} {first[m]:.0f} s" for m in maps if first[m])
    head = f"### {target}: {' · '.join(maps)}\n\n"
    head += f"FedAvg's compile: {seconds}.\n\n" if seconds else ""
    return head + "\n".join(lines)


def _cell(by_map: Mapping[str, Row], client_map: str, of: Callable[[Row, str], str]) -> str:
    row = by_map.get(client_map)
    if row is None:
        return "-"
    return "does not compile" if "error" in row else of(row, client_map)


def _ratio(part: float | None, whole: float | None, digits: int = 1) -> str:
    return f"{part / whole:,.{digits}f}" if part and whole else "-"


def _collectives(row: Row) -> str:
    size = row.get("model_bytes")
    parts = []
    for kind, (times, count) in row["collectives"].items():
        amount = f"{count / 1e6:.2f} MB" if size is None else f"{count / size:.2f} d"
        parts.append(f"{times} {kind}: {amount}")
    return ", ".join(parts) or "none"


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f}"
