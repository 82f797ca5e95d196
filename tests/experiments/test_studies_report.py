"""The report of a paper's studies, made of results written by hand."""

import json
import types

import numpy as np
import pytest
from scipy import stats

from experiments.studies.report import study_section, write_results


def method(algorithm="fedavg", at=None, style=None):
    return types.SimpleNamespace(algorithm=algorithm, at=at, style=style)


def make_study(methods, axis=None, columns=("second", "first")):
    return types.SimpleNamespace(
        name="paper/table_1",
        paper="paper",
        short="table_1",
        title="Table 1: digits",
        notes="Six clients.\n",
        methods=methods,
        scales={"machine": types.SimpleNamespace(columns=dict.fromkeys(columns))},
        paper_head="paper %",
        axis=axis,
        result_path=lambda folder: folder / "results" / "table_1.json",
    )


def run(seed, accuracies, up=1e6, old=False, landscape=None, **more):
    rows = [
        {"round": 2 * i, "accuracy": accuracy, "bytes_up": 2 * i * up, "bytes_down": 3e6 * i}
        for i, accuracy in enumerate(accuracies, start=1)
    ]
    if not old:
        rows = [{**r, **more, "gradients": 10 * r["round"], "seconds": 0.5} for r in rows]
    summary = {} if old else {"worst_10_percent_accuracy": 0.25}
    curves = {name: [row[name] for row in rows] for name in rows[0]}
    about = {"summary": summary, "landscape": landscape, "partition_hash": "0"}
    return {"seed": seed, "curves": curves, **about}


def cell(*runs, tried=2):
    points = [{"client_lr": 0.3 / (i + 1), "server_lr": 1.0} for i in range(tried)]
    return {
        "chosen": {"server_lr": 1.0, "client_lr": 0.3},
        "tuning": {"tried": {json.dumps(point): None for point in points}, "finalists": {}},
        "seconds": 90.0,
        "code": {"fedjax_lab": "0.4.0", "fingerprint": None},
        "runs": list(runs),
    }


def last_round(methods):
    runs = [run for each in methods.values() for run in each["runs"]]
    return max((run["curves"]["round"][-1] for run in runs), default=0)


def make_result(columns, paper=None):
    return {
        "study": "paper/table_1",
        "scale": "machine",
        "declared": {"hardware": "2 CPU cores", "held_out": 100, "finalists": 1},
        "versions": [{"jax": "1"}, {"jax": "2"}],
        "columns": {
            name: {
                "settings": {"rounds": last_round(methods)},
                "tuning_rounds": 40,
                "published": "",
                "paper": paper or {},
                "label_histogram": [[3, 1], [0, 4]],
                "methods": methods,
            }
            for name, methods in columns.items()
        },
    }


def cells(text):
    """Tables as lists of rows of cells, the head first."""
    tables = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        if rows:
            tables.append([rows[0], *rows[2:]])
    return tables


FAST = [[0.5, 0.9, 0.8], [0.5, 0.7, 0.94], [0.9, 0.89, 0.8]]
SLOW = [[0.1, 0.2, None], [0.1, 0.3, 0.2], [0.1, 0.1, 0.1]]
PAPER = {
    "source": "MNIST, Table 1",
    "accuracy": {"fast": 91.0},
    "rounds_to": {"fast": {"78": 574}},
}


def test_tables_by_hand(tmp_path):
    study = make_study({"fast": method(), "slow": method("scaffold"), "never run": method()})
    fast = cell(*(run(i, row) for i, row in enumerate(FAST)))
    slow = cell(*(run(i, row, up=1e5, old=True) for i, row in enumerate(SLOW)), tried=0)
    result = make_result({"first": {"slow": slow, "fast": fast}}, PAPER)
    text = study_section(study, result, tmp_path, "")
    accuracy, cost, chosen = cells(text)

    def shown(values):
        half = stats.t.interval(0.95, len(values) - 1, scale=stats.sem(values))[1]
        return f"{np.mean(values):.2f} ± {half:.2f}"

    tops, slow_tops = np.array([90, 94, 90.0]), np.array([20, 30, 10.0])
    behind = stats.ttest_rel(tops, slow_tops)
    assert len(accuracy[0]) <= 10
    assert accuracy[1] == [
        *("fast", "3", shown(tops), shown([80, 94, 80])),
        *(shown([80, 94, 80]), "25.00 ± 0.00", "best", "-"),  # a tenth of 6 rounds is one
        "91.00",
    ]
    assert accuracy[2] == [
        *("slow", "3", shown(slow_tops), "-", "-", "-"),
        *(shown(tops - slow_tops), f"{behind.pvalue:.3f}", "-"),
    ]
    # 95 % of 91.33 is 86.7: reached at rounds 4, 6 and 2.
    assert "Up to 86.7 %" in text
    assert len(cost[0]) <= 10
    half = stats.t.interval(0.95, 2, scale=stats.sem([4, 6, 2]))[1]
    assert cost[1][:3] == ["fast", "3 of 3", f"4 ± {half:.0f}"]
    assert cost[1][-3:] == ["6.00", "9.00", "574 to 78 %"]
    assert cost[2] == ["slow", "0 of 3", "-", "-", "-", "-", "0.600", "9.00", "-"]
    assert chosen[1:] == [
        ["fast", "2", "1.5", "client_lr 0.3, server_lr 1"],
        ["slow", "-", "1.5", "client_lr 0.3, server_lr 1"],
    ]


@pytest.mark.slow
def test_a_papers_page(tmp_path):
    study = make_study(
        {"a": method(at=0.1), "b": method(at=1.0), "c": method("scaffold")}, "radius"
    )
    surface = {"offsets": [-1, 0, 1], "losses": [[3, 2, 3], [2, 1, 2], [3, 2, 3]]}
    methods = {
        name: cell(run(1, [0.5, accuracy], client_drift=2.0, error_sq=1.0, landscape=surface))
        for name, accuracy in (("a", 0.6), ("b", 0.9), ("c", 0.7))
    }
    short = {"a": cell(run(1, [0.5, 0.6], error_sq=1.0))}
    result = make_result({"first": methods, "second": short})
    source = study.result_path(tmp_path)
    source.parent.mkdir()
    source.write_text(json.dumps(result))
    (tmp_path / "discussion.md").write_text("## What showed\n\nNothing.\n")
    other = types.SimpleNamespace(result_path=lambda folder: folder / "none.json")
    assert write_results([study, other], tmp_path) == tmp_path / "RESULTS.md"

    text = (tmp_path / "RESULTS.md").read_text()
    assert text.startswith("# Results: paper\n\n## How to read the tables\n")
    assert text.endswith("## What showed\n\nNothing.\n")
    # The study's order of columns, not the file's.
    assert 0 < text.index("\n### second\n") < text.index("\n### first\n")
    assert "`python -m experiments.paper table_1 --scale machine`" in text
    assert "Time: 6 minutes" in text
    assert "8 points in all, with another seed, on 100 held-out training images" in text
    assert "Versions: jax 2." in text
    names = {"second", "first", "first_landscape"}
    names |= {"ablation", "drift", "error_memory", "partition"}
    figures = sorted((tmp_path / "figures").iterdir())
    assert {file.name for file in figures} == {f"table_1_{name}.png" for name in names}
    assert all(f"](figures/{file.name})" in text for file in figures)

    files = [tmp_path / "RESULTS.md", tmp_path / "RESULTS.html", *figures]
    before = [file.read_bytes() for file in files]
    assert before[1].count(b"data:image/png;base64,") == len(figures)
    for file in files:
        file.unlink()
    write_results([study], tmp_path)
    assert [file.read_bytes() for file in files] == before


def test_many_methods_are_ranked_and_old_results_shown(tmp_path):
    names = [f"method {n}" for n in range(15)]
    study = make_study(dict.fromkeys(names, method()))
    old = {name: cell(run(1, [0.1, n / 20], old=True)) for n, name in enumerate(names)}
    result = make_result({"any": old})
    result["columns"]["any"]["label_histogram"] = None
    text = study_section(study, result, tmp_path, "")
    assert "any: top accuracy" in text
    assert [file.name for file in tmp_path.iterdir()] == ["any.png"]
    assert not [head for head in cells(text)[0][0] if "worst" in head]


def test_nothing_to_report_is_said(tmp_path):
    study = make_study({"a": method()})
    source = study.result_path(tmp_path)
    source.parent.mkdir()
    source.write_text(json.dumps(make_result({"first": {"of another study": cell()}})))
    with pytest.raises(FileNotFoundError, match=r"no results to report.*table_1\.json"):
        write_results([study], tmp_path)
