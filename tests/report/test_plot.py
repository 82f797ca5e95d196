"""Figures at the size of print: what is drawn, with which interval, and what the files hold."""

import itertools
import re

import numpy as np
import pytest
from scipy import stats

from fedjax_lab import report
from fedjax_lab.report.style import COLUMN, PAGE
from tests.report.by_hand import write_run
from tests.report.test_figures import overlaps


def rows(values, rounds=(10, 20, 30), **more):
    return [
        {"round": r, "accuracy": v, "bytes_up": 1000 * r, **more}
        for r, v in zip(rounds, values, strict=False)
    ]


def test_a_line_is_the_mean_of_the_seeds_and_a_shade_its_interval():
    seeds = [rows([0.1, 0.4, 0.7]), rows([0.2, 0.6, 0.8]), rows([0.3, 0.5, 0.6])]
    figure = report.plot({"FedAvg": seeds}, x="bytes_up", y="accuracy")
    (axes,) = figure.axes
    (line,) = axes.lines
    values = np.array([[row["accuracy"] for row in seed] for seed in seeds])
    np.testing.assert_allclose(line.get_xdata(), [1e4, 2e4, 3e4])
    np.testing.assert_allclose(line.get_ydata(), values.mean(0))
    (shade,) = axes.collections
    drawn = shade.get_paths()[0].vertices[:, 1]
    for column in values.T:
        low, high = stats.t.interval(0.95, 2, column.mean(), stats.sem(column))
        assert np.abs(drawn - low).min() < 1e-9
        assert np.abs(drawn - high).min() < 1e-9
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("bytes up (MB)", "accuracy")


@pytest.mark.parametrize(
    ("x", "values", "shown"),
    [
        ("round", range(1, 21), {"5", "10", "15", "20"}),
        ("bytes_up", range(10**7, 6 * 10**7, 10**7), {"10", "30", "50"}),
        ("gradients", range(10**7, 6 * 10**7, 10**7), {"20,000,000", "40,000,000"}),
    ],
)
def test_ticks_have_room_and_bytes_are_shown_in_megabytes(x, values, shown):
    figure = report.plot({"a": [{x: value, "accuracy": 0.5} for value in values]}, x=x)
    figure.canvas.draw()
    labels = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
    low, high = figure.axes[0].get_xlim()
    labels = [label for label in labels if low <= label.get_position()[0] <= high]
    assert shown <= {label.get_text() for label in labels}
    assert not any("." in label.get_text() for label in labels)
    ends = [label.get_window_extent() for label in labels]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(ends))


def test_names_with_dollars_are_no_formulas(tmp_path):
    name = r"$\frac$"
    figure = report.plot(
        {name: [{name: 1, "a $ b $": 0.5}]}, name, "a $ b $", path=tmp_path / "a.svg"
    )
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == (r"\$\frac\$", r"a \$ b \$")


def test_two_labels_with_one_text_are_refused():
    with pytest.raises(ValueError, match=r"histories has two labels with the text '1'"):
        report.plot({1: rows([0.1]), "1": rows([0.2])})


def test_only_rounds_that_all_seeds_have_are_drawn():
    seeds = [rows([0.1, 0.4, 0.7]), rows([0.2, 0.8], rounds=(10, 30))]
    (line,) = report.plot({"a": seeds}).axes[0].lines
    np.testing.assert_array_equal(line.get_xdata(), [10, 30])
    np.testing.assert_allclose(line.get_ydata(), [0.15, 0.75])


def test_a_single_history_has_no_shade():
    (axes,) = report.plot({"a": rows([0.1, 0.2, 0.3]), "b": rows([0.3])}).axes
    assert len(axes.lines) == 2
    assert not axes.collections


@pytest.mark.parametrize("form", ["pdf", "svg", "png"])
@pytest.mark.methods
def test_a_file_is_as_wide_as_a_column_and_equal_figures_have_equal_bytes(tmp_path, form):
    paths = [tmp_path / f"{name}.{form}" for name in "ab"]
    for path in paths:
        figure = report.plot({"a": rows([0.1, 0.2, 0.3])}, path=path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert figure.get_figwidth() == COLUMN
    assert not overlaps(figure)
    points = 72 * COLUMN
    if form == "pdf":
        assert first.startswith(b"%PDF")
        assert b"/FontFile2" in first  # a TrueType font stands in the file
        assert float(re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", first)[1]) == pytest.approx(points)
    if form == "svg":
        assert float(re.search(rb'width="([\d.]+)pt"', first)[1]) == pytest.approx(points)
        assert b"<text" not in first  # letters are outlines, so that no font is missing


@pytest.mark.parametrize(
    ("histories", "settings", "error", "message"),
    [
        ([rows([1])], {}, TypeError, "histories is a list; it must be a dict from labels"),
        ({}, {}, ValueError, "histories is empty"),
        ({"a": [{}]}, {}, ValueError, r"no row of histories\['a'\] has both 'round' and 'acc"),
        ({"a": "rows"}, {}, TypeError, r"histories\['a'\] must be result.history"),
        ({"a": [[]]}, {}, TypeError, r"histories\['a'\] must be result.history"),
        ({"a": rows([1])}, {"y": "acc"}, ValueError, "has both 'round' and 'acc'; it has accu"),
        ({"a": rows([1])}, {"width": 0}, ValueError, "width is 0"),
        ({"a": rows([1])}, {"path": "a.jpg"}, ValueError, r"it must end in one of \.png, \.pdf"),
        (
            {"a": [rows([1]), rows([1], rounds=(5,))]},
            {},
            ValueError,
            r"the seeds of histories\['a'\] have no round in common",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said(histories, settings, error, message):
    with pytest.raises(error, match=message):
        report.plot(histories, **settings)


def test_a_report_has_its_figures_as_vectors_too(tmp_path):
    write_run(tmp_path / "a")
    path = report.write_report([tmp_path / "a"], tmp_path / "out", figures="pdf")
    pictures = {file.stem for file in path.parent.glob("*.png")}
    vectors = {file.stem: file.read_bytes() for file in path.parent.glob("*.pdf")}
    assert pictures == vectors.keys() >= {"accuracy", "loss"}
    widths = {
        name: float(re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", text)[1]) / 72
        for name, text in vectors.items()
    }
    assert widths["loss"] == pytest.approx(COLUMN)
    assert widths["accuracy"] == pytest.approx(PAGE)
    with pytest.raises(ValueError, match="figures is 'eps'"):
        report.write_report([tmp_path / "a"], figures="eps")
