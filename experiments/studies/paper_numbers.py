"""The numbers that the papers print: experiments/PAPER/paper.csv, a line for each.

Columns: table, algorithm, dataset, model, num_clients, cohort, partition, local_work, rounds,
metric, value, std. ``partition`` is a spec of ``data.partition`` where the paper says enough.
"""

import csv
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_ACCURACIES = ("test_accuracy_percent", "top_test_accuracy_percent")
_ROUNDS = "rounds_to_accuracy:"


def paper_accuracies(paper: str, chosen: Mapping[str, str], methods: Iterable[str]) -> Any:
    """The paper's numbers for a column of its table.

    Args:
      paper: the paper's package.
      chosen: column of the file -> value, such as {"table": "1", "dataset": "MNIST"}; {}: none.
      methods: names of methods, as the paper's table has them up to case and punctuation.

    Returns:
      {} or {"source": what was looked up, "accuracy": {method: percent}, "rounds_to": {method:
      {accuracy in percent, as text: rounds}}}.

    Raises:
      ValueError: no line of the file fits.
    """
    if not chosen:
        return {}
    lines = [
        line
        for line in _lines(paper)
        if all(line[name] in value.split("|") for name, value in chosen.items())
    ]
    names = {_plain(method): method for method in methods}
    accuracy: dict[str, float] = {}
    rounds: dict[str, dict[str, int]] = {}
    for line in lines:
        method = names.get(_plain(line["algorithm"]))
        if method is None:
            continue
        if line["metric"] in _ACCURACIES:
            accuracy[method] = float(line["value"])
        elif line["metric"].startswith(_ROUNDS):
            target = line["metric"].removeprefix(_ROUNDS)
            rounds.setdefault(method, {})[target] = int(float(line["value"]))
    if not accuracy and not rounds:
        raise ValueError(f"experiments/{paper}/paper.csv has no numbers of {dict(chosen)}.")
    source = ", ".join(
        f"Table {value.replace('|', ' and ')}" if name == "table" else value
        for name, value in chosen.items()
    )
    return {"source": source, "accuracy": accuracy, "rounds_to": rounds}


@functools.cache
def _lines(paper: str) -> list[dict[str, str]]:
    file = Path(__file__).parent.parent / paper / "paper.csv"
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
