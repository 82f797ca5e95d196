"""What figures show, read back from matplotlib's objects; and that legends cover nothing."""

import numpy as np
import pytest
from PIL import Image

from experiments.studies.ablation import ablation_figure
from fedjax_lab.report.curves import (
    ROUNDS,
    Measure,
    Panel,
    accuracy_figure,
    common_curves,
    metric_figure,
    ranking_figure,
)
from fedjax_lab.report.figures import write_figures
from fedjax_lab.report.partition_figure import partition_figure
from fedjax_lab.report.style import save
from fedjax_lab.report.surfaces import surface_figure
from tests.report.by_hand import CURVE, groups_of, write_run


def overlaps(figure):
    """Whether a legend of the figure covers any of its axes, labels and titles included."""
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes if axes.axison]
    return any(box.overlaps(one.get_window_extent()) for one in figure.legends for box in boxes)


def thick(axes):
    return [line for line in axes.lines if line.get_linewidth() > 1]


def test_accuracy_against_each_cost(tmp_path):
    for seed, curve in ((0, [0.1, 0.5, 0.8]), (1, [0.2, 0.7, 0.6])):
        write_run(tmp_path / f"a{seed}", curve, seed=seed, up=2_000_000)
    figure = accuracy_figure(groups_of(tmp_path))
    rounds, uplink, gradients = figure.axes
    mean = [15, 60, 70]
    for axes, x in ((rounds, [5, 10, 15]), (uplink, [10, 20, 30]), (gradients, [0.5, 1, 1.5])):
        assert axes.get_xscale() == "linear"
        (line,) = thick(axes)
        np.testing.assert_allclose(line.get_xdata(), x)
        np.testing.assert_allclose(line.get_ydata(), mean)
        assert len(axes.lines) == 3
    assert not overlaps(figure)


@pytest.mark.parametrize(("ratio", "scale"), [(9, "linear"), (11, "log")])
def test_a_cost_is_logarithmic_where_totals_differ_tenfold(tmp_path, ratio, scale):
    write_run(tmp_path / "a", up=1_000_000)
    write_run(tmp_path / "b", up=ratio * 1_000_000, algorithm="scaffold")
    rounds, uplink, gradients = accuracy_figure(groups_of(tmp_path)).axes
    assert rounds.get_xscale() == gradients.get_xscale() == "linear"
    assert uplink.get_xscale() == scale


def test_groups_of_one_method_have_rows_and_colours_of_their_own(tmp_path):
    """Also where one of them lacks the setting that the others have."""
    for name, top, given in (("a", 0.5, {}), ("b", 0.6, {"clip_norm": 1}), ("c", 0.7, {"w": 2})):
        write_run(tmp_path / name, [0.1, top], **given)
    groups = groups_of(tmp_path)
    axes = ranking_figure(groups).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["fedavg", "fedavg (clip_norm=1)", "fedavg (w=2)"]
    lines = thick(accuracy_figure(groups).axes[0])
    assert len({line.get_color() for line in lines}) == 3


def test_more_runs_than_lines_become_a_shade(tmp_path):
    for name in "abcde":
        for seed in range(3):
            write_run(tmp_path / f"{name}{seed}", CURVE, seed=seed, algorithm=name)
    figure = accuracy_figure(groups_of(tmp_path))
    assert len(figure.axes[0].lines) == len(figure.axes[0].collections) == 5
    assert not overlaps(figure)


def test_means_are_over_common_rounds(tmp_path):
    write_run(tmp_path / "a", [0.2, 0.4, 0.9])
    write_run(tmp_path / "b", [0.4, 0.6], seed=1, rounds=15)
    x, y = common_curves(groups_of(tmp_path)[0], ROUNDS, Measure("accuracy", ""))
    assert x.tolist() == [5, 10]
    assert y.tolist() == [[0.2, 0.4], [0.4, 0.6]]


def test_metrics_of_updates_have_a_figure(tmp_path):
    write_run(tmp_path / "a", CURVE, more={"update_norm": 2.0, "update_cosine": 0.5})
    names = [name for name, _ in write_figures(groups_of(tmp_path), tmp_path)]
    assert "updates.png" in names
    write_run(tmp_path / "b/b", CURVE, more={"client_drift": 1.0})
    names = [name for name, _ in write_figures(groups_of(tmp_path / "b"), tmp_path / "b")]
    assert "updates.png" not in names


@pytest.mark.methods
def test_many_groups_of_unequal_length_and_one_that_diverged(tmp_path):
    # More groups than colours and than lines, one evaluation only, and nothing but null.
    for n in range(15):
        more = {"client_drift": 1.0, "error_sq": 2.0}
        write_run(tmp_path / f"a{n:02}", CURVE[: n % 9 + 1], algorithm=f"method{n}", more=more)
    write_run(tmp_path / "s", CURVE[:3], seed=1, algorithm="method8", rounds=45)
    write_run(tmp_path / "n", [None, None], algorithm="diverged")
    captions = dict(write_figures(groups_of(tmp_path), tmp_path))
    expected = ["ranking", "accuracy", "loss", "drift", "error_memory", "partition"]
    assert list(captions) == [f"{name}.png" for name in expected]
    assert "shades their range" in captions["loss.png"]


def test_panels_are_logarithmic_where_all_is_positive(tmp_path):
    write_run(tmp_path / "a", more={"error_sq": 4.0, "change_sq": 0.0})
    groups = groups_of(tmp_path)
    shown = [Panel(groups, Measure(name, name), "title") for name in ("error_sq", "change_sq")]
    first, second = metric_figure(shown).axes
    assert (first.get_yscale(), second.get_yscale()) == ("log", "linear")
    np.testing.assert_allclose(thick(first)[0].get_ydata(), 4.0 / np.arange(5, 61, 5))


HISTOGRAM = np.array([[30, 0, 10], [0, 5, 15], [0, 0, 0]])


def test_bubbles_have_the_area_of_the_examples_and_the_heat_map_their_shares():
    bubbles, shares, _bar = partition_figure(HISTOGRAM).axes
    (circles,) = bubbles.collections
    places = [tuple(map(int, place)) for place in circles.get_offsets()]
    areas = dict(zip(places, circles.get_sizes(), strict=True))
    assert set(areas) == {(0, 0), (0, 2), (1, 1), (1, 2)}
    for (client, label), area in areas.items():
        assert area / areas[0, 0] == pytest.approx(HISTOGRAM[client, label] / 30)
    (image,) = shares.images
    assert image.get_clim() == (0, 0.75)
    np.testing.assert_allclose(
        image.get_array(), [[0.75, 0, 0], [0, 0.25, 0], [0.25, 0.75, 0]], atol=1e-12
    )


def test_of_many_clients_a_hundred_are_shown():
    sizes = np.random.default_rng(0).integers(1, 1000, (250, 1))
    bubbles, shares, _bar = partition_figure(sizes).axes
    (circles,) = bubbles.collections
    areas = circles.get_sizes()
    assert len(areas) == shares.images[0].get_array().shape[1] == 100
    assert (np.diff(areas) >= 0).all()
    assert areas[0] / areas[-1] == pytest.approx(sizes.min() / sizes.max())
    assert "100 of 250" in bubbles.get_xlabel()
    with pytest.raises(ValueError, match=r"histogram has shape \(0,\)"):
        partition_figure([])


def test_surfaces_share_their_colours_and_the_first_direction_is_across():
    offsets = np.linspace(-1, 1, 5)
    slope = np.tile(offsets[:, None] + 2, (1, 5))  # depends on the first direction alone
    found = {
        "a": {"offsets": offsets, "losses": slope, "eigenvalues": [12.345, None]},
        "b": {"offsets": offsets, "losses": 3 * slope.T},
        "c": {"offsets": offsets, "losses": np.where(slope > 2, np.nan, slope)},
    }
    figure = surface_figure(found)
    first, second, third, bar = figure.axes
    drawn = [axes.collections[0] for axes in (first, second, third)]
    assert {(one.get_clim(), tuple(one.levels)) for one in drawn} == {
        (drawn[0].get_clim(), tuple(drawn[0].levels))
    }
    assert (drawn[0].levels[0], drawn[0].levels[-1]) == (1.0, 9.0)
    for collection, along in ((drawn[0], 0), (drawn[1], 1)):
        band = next(path for path in collection.get_paths() if len(path.vertices))
        spans = np.ptp(band.vertices, axis=0)
        assert spans[along] < 1 < spans[1 - along] == 2
    assert first.get_title() == "a\nλ = 12.3"
    assert second.get_title() == "b"
    assert bar.get_ylabel() == "training loss"


def test_wide_surfaces_are_logarithmic_and_damaged_ones_named():
    offsets = [-1.0, 0.0, 1.0]
    wide = np.geomspace(0.01, 10, 9).reshape(3, 3)
    figure = surface_figure({"a": {"offsets": offsets, "losses": wide}})
    levels = figure.axes[0].collections[0].levels
    np.testing.assert_allclose(levels, np.geomspace(0.01, 10, len(levels)))
    with pytest.raises(ValueError, match=r"losses of a have shape \(3, 3\); 2 offsets"):
        surface_figure({"a": {"offsets": offsets[:2], "losses": wide}})
    with pytest.raises(ValueError, match="no finite loss"):
        surface_figure({"a": {"offsets": [0.0], "losses": [[None]]}})


def test_ranking_has_the_best_above(tmp_path):
    write_run(tmp_path / "a", [0.3], algorithm="low")
    write_run(tmp_path / "b", [0.9], algorithm="high")
    write_run(tmp_path / "c", [None], algorithm="diverged")
    (axes,) = ranking_figure(groups_of(tmp_path)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["low", "high"]


def test_an_ablation_is_a_line_over_the_values(tmp_path):
    values = {"0.1": 0.5, "1": 0.9, "10": 0.7}
    for at, accuracy in values.items():
        for seed, more in ((1, 0.02), (2, -0.02)):
            write_run(tmp_path / f"{at}-{seed}", [accuracy + more], seed=seed, algorithm=at)
    write_run(tmp_path / "without", [0.6], algorithm="without")
    groups = groups_of(tmp_path)
    figure = ablation_figure(
        {"one": groups},
        lambda label: float(label) if label in values else None,
        lambda label: "with" if label in values else label,
        "radius",
    )
    (axes,) = figure.axes
    (line,) = (line for line in axes.lines if line.get_marker() == "o")
    np.testing.assert_allclose(line.get_xdata(), [0.1, 1, 10])
    np.testing.assert_allclose(line.get_ydata(), [50, 90, 70])
    assert axes.get_xscale() == "log"
    assert any(np.allclose(one.get_ydata(), 60) for one in axes.lines)
    assert not overlaps(figure)


def test_equal_figures_have_equal_bytes(tmp_path):
    for name in ("a.png", "b.png"):
        save(partition_figure(HISTOGRAM), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "P"
        assert not image.info.keys() - {"gamma", "transparency"}
