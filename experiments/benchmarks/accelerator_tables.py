"""The rows of ``experiments.benchmarks.accelerators`` as the tables of docs/accelerators.md."""

import collections
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MARK = "<!-- What follows is written by `make accelerator-check`. -->\n"
TITLES = {
    "methods": "Methods under client maps",
    "runs": "Whole runs",
    "planner": 'What "auto" plans',
    "convolutions": "Convolutions",
    "models": "Models",
    "compressors": "Compressors",
}

Row = Mapping[str, Any]


def write(rows: Mapping[str, Row], planned: Iterable[tuple[str, str]], page: Path, file: Path):
    """Write the tables below the page's mark, and all rows as JSON.

    Args:
      rows: by their programs' keys.
      planned: (group, key) of all programs.
      page: a Markdown file that has the mark.
      file: for the rows.
    """
    file.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
    text, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{page} has no line {MARK.strip()}")
    parts = [text + mark]
    all_keys = list(planned)
    for group, title in TITLES.items():
        found = [row for row in rows.values() if row["group"] == group]
        parts.append(f"\n## {title}\n\n{_table(found, rows)}")
        missing = [key for of, key in all_keys if of == group and key not in rows]
        if missing:
            targets = collections.Counter(key.split(" | ")[0] for key in missing)
            counts = ", ".join(f"{count} for {target}" for target, count in targets.items())
            parts.append(f"\nNot run: {len(missing)} of these programs ({counts}).\n")
    page.write_text("".join(parts), encoding="utf-8")


def _table(found: list[Row], rows: Mapping[str, Row]) -> str:
    if not found:
        return "None was run.\n"
    lines = [
        "| program | target | map | compile CPU s (times FedAvg's) | code | arguments "
        "| temporaries | estimate / compiler | bytes accessed | collectives |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        start = f"| {row['name']} | {row['target']} |"
        if "error" in row:
            lines.append(f"{start} does not compile: {row['error'][:120]} |{' |' * 7}")
            continue
        base = rows.get(f"{row['target']} | methods | fedavg {row['name'].split()[-1]}", {})
        seconds, first = row["seconds"], base.get("seconds")
        ratio = f" ({seconds / first:.1f})" if seconds and first else ""
        cells = [
            row.get("client_map", ""),
            "" if seconds is None else f"{seconds:.0f}{ratio}",
            *(_mib(row[name]) for name in ("code", "arguments", "temporaries")),
            f"{row['estimated'] / row['memory']:.2f}" if row.get("estimated") else "",
            "" if row["bytes_accessed"] is None else f"{row['bytes_accessed'] / 1e9:.2f} GB",
            _collectives(row),
        ]
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _collectives(row: Row) -> str:
    size = row.get("model_bytes")
    parts = []
    for kind, (times, count) in row["collectives"].items():
        amount = f"{count / 1e6:.2f} MB" if size is None else f"{count / size:.2f} d"
        parts.append(f"{times} {kind}: {amount}")
    return ", ".join(parts) or "none"


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"
