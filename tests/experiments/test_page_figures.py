"""The figures of the pages on speed show the numbers of the page and of the rows."""

import json
import re

import pytest

from experiments.benchmarks import page_figures

PAGE = """
| workload | next to the better opponent | pfl |
|---|---|---|
| W3: MLP 784-10, 100 of 1,000 clients | 6.2 (6.0 to 6.4) | 7.7 |
| W1s with a flax CNN of the user's own | 2.3 (2.0 to 2.5) | 2.3 |
| median | 0.99 | 1.16 |
"""


def test_speedups_are_read_from_a_page():
    assert page_figures.read_speedups(PAGE) == [
        ("W3: MLP 784-10", 6.2, 6.0, 6.4),
        ("W1s, your own flax CNN", 2.3, 2.0, 2.5),
    ]
    with pytest.raises(ValueError, match="page has no table of workloads"):
        page_figures.read_speedups("# Speed\n")
    found = page_figures.read_speedups((page_figures.DOCS / "performance.md").read_text())
    assert len({speedup.workload for speedup in found}) == len(found) == 7


def test_every_page_says_the_speed_of_the_table():
    found = page_figures.read_speedups((page_figures.DOCS / "performance.md").read_text())
    ratios = [speedup.ratio for speedup in found]
    text = (page_figures.DOCS / "on_a_gpu.md").read_text()
    table = text.partition("## Compared with PyTorch")[2].partition("\n\n`python")[0]
    gpu = [float(line.split("|")[5]) for line in table.splitlines() if line.startswith("| W")]
    assert len(gpu) == 4
    for page in ("README.md", "docs/comparison.md"):
        text = " ".join((page_figures.DOCS.parent / page).read_text().split())
        (low, high), on_a_gpu = re.findall(r"([\d.]+) to ([\d.]+) times as fast", text)
        # Rounded down: other machines had less.
        for said, measured in ((low, min(ratios)), (high, max(ratios))):
            assert measured - 0.1 < float(said) <= measured, page
        assert tuple(map(float, on_a_gpu)) == (min(gpu), max(gpu)), page
    short = " ".join((page_figures.DOCS / "performance.md").read_text().split())
    assert f"{min(ratios):g} to {max(ratios):g} times as fast" in short
    assert f"over {NUMBERS[len(found)]} workloads" in short


NUMBERS = {6: "six", 7: "seven", 8: "eight"}


def test_both_figures_show_the_numbers():
    (axes,) = page_figures.speedup_figure(page_figures.read_speedups(PAGE)).axes
    (points,) = (line for line in axes.lines if line.get_marker() == "o")
    assert points.get_xdata().tolist() == [6.2, 2.3]
    rows = [json.loads(line) for line in page_figures.ROWS.read_text().splitlines()]
    models = page_figures.read_models(rows)
    assert {"mlp", "lenet5", "resnet18"} <= set(models)
    left, right = page_figures.accelerator_figure(models).axes
    largest = left.get_yticklabels()[-1].get_text()
    shown = {points.get_label(): points.get_offsets()[-1, 0] for points in right.collections}
    for chip, label in page_figures.CHIPS.items():
        assert shown[label] == models[largest][chip]["bytes_accessed"] / 1e9
