"""What the pages say of speed, and their figures, are made of what was measured."""

import json
import re
import statistics

import pytest

from experiments.benchmarks import page_figures, speed
from experiments.benchmarks.compare import measured

ROOT = speed.ROOT
# Milliseconds a round, in three repeats: the best opponent of W3 changes from one to the next.
TIMES = {
    "W3": {"fedjax_lab": (1.0, 2.0, 4.0), "torch": (4.0, 4.0, 4.0), "pfl": (3.0, 5.0, 5.0)},
    "W1s": {
        "fedjax_lab": (1.0, 1.0, 1.0),
        "fedjax_lab_own_cnn": (2.0, 2.0, 2.0),
        "torch": (5.0, 4.0, 6.0),
        "torch_vmap": (9.0, 9.0, 9.0),
    },
    "W4s": {"fedjax_lab": (10.0, 10.0, 10.0), "torch": (6.0, 5.0, 7.0)},
}


def answer(milliseconds):
    return {
        "milliseconds": [milliseconds, milliseconds],
        "compile_seconds": 1.0,
        "peak_bytes": 5_000_000,
        "device": "cpu",
        "threads": 2,
        "versions": {"jax": "9.9", "fedjax_lab": "8.8"},
    }


def stored():
    answers = {
        name: {system: [*map(answer, each)] for system, each in systems.items()}
        for name, systems in TIMES.items()
    }
    about = {"command": "python -m x", "date": "2026-01-02", "load": 0.1}
    found = measured(
        list(TIMES), dict.fromkeys(TIMES, "noise"), answers, gemm_gflops=[{"jax": 100.0}], **about
    )
    return json.loads(json.dumps(found))


def by_hand(name, system="fedjax_lab"):
    """Median, lowest and highest ratio to the fastest opponent of each repeat."""
    own = TIMES[name][system]
    rivals = [times for key, times in TIMES[name].items() if not key.startswith("fedjax_lab")]
    each = [min(times) / mine for *times, mine in zip(*rivals, own, strict=True)]
    return statistics.median(each), min(each), max(each)


def test_rows_are_ratios_to_the_best_opponent_of_each_repeat():
    rows = {(row.workload, row.is_own): row for row in speed.speedups(stored())}
    assert len(rows) == 4
    for (name, is_own), row in rows.items():
        system = "fedjax_lab_own_cnn" if is_own else "fedjax_lab"
        assert row.ratio == pytest.approx(by_hand(name, system))
    assert rows["W3", False].ratio == (2.0, 1.0, 3.0)
    ratios = [row.ratio[0] for row in speed.speedups(stored())]
    assert ratios == sorted(ratios, reverse=True)


def test_a_workload_counts_once_and_a_slower_one_is_said():
    text = speed.sentence(stored())
    others = "pfl-research, a PyTorch loop and `torch.func.vmap`"
    assert text.startswith(f"2.00 to 5.00 times as fast as the fastest of {others}")
    assert text.endswith("on two of three workloads, and 0.60 on ResNet-18 with GroupNorm")
    only = stored()
    del only["workloads"]["W4s"]
    assert speed.sentence(only).endswith("`torch.func.vmap`, over two workloads")


def test_the_table_has_every_measured_row():
    lines = speed.table(stored()).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0].split(":")[0] for row in cells] == ["W1s", "W1s", "W3", "W4s"]
    first, own, mlp, resnet = cells
    # Milliseconds of ours, of pfl, of the loop and of vmap.
    assert first[1:6] == ["5.00 (4.00 to 6.00)", "1", "-", "5", "9"]
    assert own[1].startswith("2.50 (")
    assert mlp[1:6] == ["2.00 (1.00 to 3.00)", "2", "5", "4", "-"]
    assert resnet[0].endswith("2 of 100 clients, 2 steps of batch 20")
    shares = [
        7.532e9 / (ms / 1e3) / 100e9 for ms in (2.0, 4.0)
    ]  # medians of ours and the best opponent's
    assert mlp[6] == ", ".join(f"{100 * share:.0f} %" for share in shares)


def test_what_is_stored_says_where_and_of_what():
    found = stored()
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["processor"]
    # None where the tests run outside a repository.
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{12}\+?", found["commit"])
    text = speed.about(found)
    assert f"commit {found['commit']}, on 2026-01-02" in text
    assert "jax 9.9; fedjax_lab 8.8" in text
    assert "**Threads.** fedjax_lab 2, torch 2, pfl 2, " in text


def test_pages_hold_what_is_stored():
    texts = speed.pages(stored())
    assert [path.name for path in texts] == ["README.md", "comparison.md", "speed.md"]
    for text in texts.values():
        assert f"<!-- speed -->{speed.sentence(stored())}<!-- /speed -->" in text
    assert speed.table(stored()) in texts[ROOT / "docs" / "speed.md"]
    assert speed.about(stored()) in texts[ROOT / "docs" / "speed.md"]
    found = speed.stored()
    if found is not None:
        for path, text in speed.pages(found).items():
            assert path.read_text(encoding="utf-8") == text, path.name


def test_every_page_says_the_speed_on_a_gpu():
    text = (page_figures.DOCS / "speed.md").read_text()
    table = text.partition("\n## On a GPU\n")[2].partition("\n\nMilliseconds")[0]
    gpu = [float(line.split("|")[5]) for line in table.splitlines() if line.startswith("| W")]
    assert len(gpu) == 4
    for page in ("README.md", "docs/comparison.md", "docs/speed.md"):
        text = " ".join((ROOT / page).read_text().partition("\n## On a CPU")[0].split())
        *_, on_a_gpu = re.findall(r"([\d.]+) to ([\d.]+) times as fast", text)
        assert tuple(map(float, on_a_gpu)) == (min(gpu), max(gpu)), page


def test_the_figure_shows_the_numbers():
    rows = speed.speedups(stored())
    (axes,) = page_figures.speedup_figure(rows).axes
    (points,) = (line for line in axes.lines if line.get_marker() == "o")
    assert points.get_xdata().tolist() == [row.ratio[0] for row in rows]
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.label for row in rows]
