"""The leaderboard: its cells at their smallest, its page from stored cells, and going on."""

import csv
import dataclasses
import io
import itertools
import json
import re
import subprocess
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy import stats

from experiments.leaderboard import __main__ as command
from experiments.leaderboard import cells, claims, methods, page, scores, tasks
from experiments.leaderboard.figure import heat_map
from experiments.leaderboard.methods import LEFT_OUT, METHODS
from experiments.studies.fingerprint import fingerprint, is_same
from fedjax_lab import simulate
from fedjax_lab.algorithms import ALGORITHMS, fedavg
from fedjax_lab.tuning.halving import equal_budgets
from tests.report.test_html import BROWSER, BROWSERS

SEEDS = (11, 12, 13)
TASK = tasks.TASKS["convex"]


def own_method(loss_fn, client_lr, slowness: float = 2.0):
    """FedAvg with its rate divided."""
    return fedavg(loss_fn, client_lr=client_lr / slowness)


def cell(method, values, chosen=None):
    """A stored cell whose scores at the end are ``values``, one for each seed."""
    runs = [
        {"seed": seed, "scores": [0.5, 2.0, value, value], "bytes_up": 4_000_000, "gradients": 400}
        for seed, value in zip(SEEDS, values, strict=True)
    ]
    return {
        **{"method": method, "chosen": chosen or {"client_lr": 0.1}, "edges": ["client_lr"]},
        **{"rounds": [10, 20, 38, 40], "runs": runs},
        **{"points": 4, "diverged": 0.25, "tuning_gradients": 1200, "validation": [1.0, 2.0]},
        **{"versions": {"fedjax_lab": "0.4.0"}, "processor_seconds": 6.0},
        "declared": {"method": {"fixed": {"variant": "W"}}},
    }


STORED = {
    "fedavg": cell("fedavg", [1.0, 1.2, 1.1]),
    "scaffold": cell("scaffold", [1.5, 1.6, 1.7]),
    "mine": cell("mine", [1.1, 1.1, 1.3]),
    "fedsam": {**cell("fedsam", [0, 0, 0]), "chosen": None, "diverged": 1.0},
}


def test_every_method_of_the_catalogue_has_a_row_or_a_reason():
    named = {method.factory for method in METHODS.values()} | set(LEFT_OUT)
    assert named == set(ALGORITHMS)


def test_gaps_and_ranks_are_those_of_paired_t_intervals():
    rows = scores.rows_of(TASK, STORED)
    assert list(rows) == ["scaffold", "mine", "fedavg", "fedsam"]
    expected = stats.ttest_rel([1.5, 1.6, 1.7], [1.0, 1.2, 1.1]).confidence_interval(0.95)
    gap = rows["fedavg"].gap
    assert np.allclose([gap.mean - gap.half_width, gap.mean + gap.half_width], expected)
    low, high = stats.ttest_rel([1.1, 1.1, 1.3], [1.0, 1.2, 1.1]).confidence_interval(0.95)
    assert low < 0 < high  # so both may be second or third
    assert [row.rank for row in rows.values()] == ["1 (1)", "2 (2-3)", "3 (2-3)", "-"]
    assert rows["scaffold"].is_best
    assert rows["fedsam"].score is None


def test_the_cost_of_a_target_is_that_of_the_rounds_until_it_is_reached():
    row = scores.rows_of(dataclasses.replace(TASK, target=1.9), STORED)["fedavg"]
    assert (row.rounds, row.megabytes, row.gradients) == (20, 2.0, 200)
    assert np.isnan(scores.rows_of(dataclasses.replace(TASK, target=2.1), STORED)["fedavg"].rounds)
    exactly = 100 * float(np.float32(2800 / 4000))  # 70 %, as a run's float32 has it
    assert exactly < 70
    stored = {"fedavg": cell("fedavg", [exactly] * 3)}
    assert scores.rows_of(dataclasses.replace(TASK, target=70.0), stored)["fedavg"].rounds == 38


def test_the_page_shows_cells_and_says_which_are_missing():
    stored = {"convex": STORED, "few-data": {}}
    shown = page.text(stored)
    row = r"\| scaffold +\| +1 \(1\) \| +1\.60 ± 0\.25 \| +best \|"
    assert re.search(row, shown)  # t(2 degrees of freedom) 4.303, s 0.1
    assert "(`convex`): 4 of " in shown
    assert "(`few-data`): 0 of" in shown
    assert "Not run: fedprox" in shown
    everything = dict.fromkeys(METHODS, STORED["fedavg"])
    assert "How much has been run" not in page.text({"convex": everything})
    assert "(leaderboard/convex.csv)" in shown
    assert "(leaderboard/few-data.csv)" not in shown
    figure = heat_map(page.rows_of_tasks(stored), list(STORED))
    assert figure.count("<rect") == len(STORED)
    assert ElementTree.fromstring(figure).tag.endswith("svg")


def test_rows_with_as_many_points_show_their_gain_and_the_ranks_that_it_gives():
    more = {"convex": {"fedsam": cell("fedsam", [1.9, 1.9, 2.1])}}
    stored = {"convex": {**STORED, "fedsam": cell("fedsam", [1.0, 1.4, 1.2])}}
    shown = page.text(stored, more).partition("## With as many points")[2]
    low, high = stats.ttest_rel([1.9, 1.9, 2.1], [1.0, 1.4, 1.2]).confidence_interval(0.95)
    gain = f"{(low + high) / 2:.2f} ± {(high - low) / 2:.2f}"
    assert re.search(rf"\| fedsam +\| +1\.97 \({gain}\), 1 \|", shown)
    assert "## With as many points" not in page.text(stored)


def test_a_method_is_compared_with_the_simpler_one_that_it_contains():
    again = {**cell("fedprox", [1.3, 1.4, 1.5]), "start": {"row": "fedavg"}}
    stored = {"convex": {**STORED, "fedprox": again}, "few-data": {"fedprox": again}}
    shown = page.text(stored).partition("## What a method adds")[2].partition("\n## ")[0]
    low, high = stats.ttest_rel([1.3, 1.4, 1.5], [1.0, 1.2, 1.1]).confidence_interval(0.95)
    gain = f"{(low + high) / 2:.2f} ± {(high - low) / 2:.2f}"
    assert re.search(rf"\| fedprox: fedavg +\| +{gain} \| +- \| +1 \| +0 \|", shown)
    assert "as a start point: 2 of them" in " ".join(shown.split())
    assert "## What a method adds" not in page.text({"convex": {"fedavg": STORED["fedavg"]}})
    row = list(csv.DictReader(io.StringIO(page.settings(stored["convex"]))))[-1]
    assert (row["method"], row["again from"]) == ("fedprox", "fedavg")


def test_settings_are_those_of_the_cells():
    mine, *_, broken = csv.DictReader(io.StringIO(page.settings(STORED)))
    assert (mine["method"], mine["chosen"]) == ("fedavg", "client_lr 0.1, variant W")
    assert (mine["at an end"], mine["rounds"]) == ("client_lr", "40")
    assert (mine["tuning gradients"], mine["tuning scores"]) == ("1200", "1.00, 2.00")
    assert (broken["method"], broken["chosen"]) == ("fedsam", "all points diverged")


@pytest.mark.methods
def test_the_committed_page_is_that_of_the_stored_cells(tmp_path):
    page.write(page=tmp_path / "leaderboard.md")
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 2 + len(tasks.TASKS)  # the page, the figure, settings
    for name in written:
        assert (tmp_path / name).read_text("utf-8") == (page.PAGE.parent / name).read_text("utf-8")


@pytest.mark.parametrize(
    ("folder", "scale"),
    [(cells.RESULTS, cells.Scale()), (cells.AS_MANY_POINTS, cells.POINTS)],
    ids=["results", "as many points"],
)
def test_stored_cells_are_whole_and_declared_as_today(folder, scale):
    for name, task in tasks.TASKS.items():
        for method, stored in cells.load(folder, name).items():
            place = f"{name}, {method}"
            assert stored["declared"] == cells.declared(task, METHODS[method], scale), place
            if stored["chosen"] is not None:
                assert [run["seed"] for run in stored["runs"]] == list(task.seeds), place
                assert {len(run["scores"]) for run in stored["runs"]} == {len(stored["rounds"])}


@pytest.mark.methods
def test_stored_methods_compute_what_they_computed():
    for name in tasks.TASKS:
        for method, stored in cells.load(cells.RESULTS, name).items():
            specified = cells.specification(METHODS[method])
            assert (stored["fingerprint"] is None) == (specified is None), f"{name}, {method}"
            if specified is not None:
                now = fingerprint(specified)
                assert is_same(stored["fingerprint"], now), f"{name}, {method}"


@pytest.mark.methods
def test_a_cell_is_run_once_and_a_row_of_ones_own_is_the_only_one(tmp_path, monkeypatch, capsys):
    arguments = ["--scale", "smoke", "--out", str(tmp_path), "--tasks", "convex"]
    command.main([*arguments, "--methods", "fedavg"])
    before = cells.load(tmp_path, "convex")
    monkeypatch.setattr(cells, "tune", None)  # a second search would fail
    command.main([*arguments, "--methods", "fedavg"])
    assert cells.load(tmp_path, "convex") == before
    monkeypatch.undo()
    own = [f"--method=mine={__name__}:own_method", "--space", "mine.slowness=2,4"]
    command.main([*arguments, *own])
    after = cells.load(tmp_path, "convex")
    assert set(after) == {"fedavg", "mine"}
    assert set(after["mine"]["chosen"]) == {"client_lr", "slowness"}
    assert "| fedavg " in (tmp_path / "leaderboard.md").read_text("utf-8")
    monkeypatch.setattr(command, "smoke", lambda task: dataclasses.replace(task, rounds=10))
    with pytest.raises(SystemExit, match="other conditions"):
        command.main([*arguments, "--methods", "fedavg"])


def test_final_runs_of_a_kept_tuning_are_those_of_a_whole_cell():
    task, method = tasks.smoke(TASK), METHODS["fedavg"]
    once = tasks.problem(task)
    whole = cells.run_cell(task, once, "fedavg", method, cells.SMOKE, {})
    old = {**whole, "runs": whole["runs"][:1]}
    old["declared"] = {**whole["declared"], "task": {**whole["declared"]["task"], "seeds": [11]}}
    assert cells.has_tuning(old, task, method, cells.SMOKE)
    assert not cells.has_tuning(old, task, method, cells.Scale())
    again = cells.run_again(old, task, once, method, cells.SMOKE)
    for name in whole.keys() - {"processor_seconds"}:
        assert again[name] == whole[name], name
    assert [run["seed"] for run in again["runs"]] == list(task.seeds)


@pytest.mark.methods
def test_a_search_that_ends_below_a_simpler_form_is_repeated_from_there(monkeypatch):
    def diverges(*arguments, **named):
        raise RuntimeError("all points diverged")

    task, method = tasks.smoke(TASK), METHODS["fedavgm"]
    once = tasks.problem(task)
    above = {"fedavg": {"chosen": {"client_lr": 0.02, "server_lr": 1.0}, "validation": [9.0, 9.5]}}
    first = cells.run_cell(task, once, "fedavgm", method, cells.SMOKE, {})
    assert "start" not in first
    both = cells.run_cell(task, once, "fedavgm", method, cells.SMOKE, above)
    point = {"client_lr": 0.02, "server_lr": 1.0, "momentum": 0.0}
    assert both["start"] == {"row": "fedavg", "score": 9.25, "point": point}
    assert both["first_search"] == {n: first[n] for n in ("chosen", "validation")}
    assert np.mean(both["validation"]) >= np.mean(first["validation"])
    assert both["tuning_gradients"] >= 1.9 * first["tuning_gradients"]
    assert cells.start_of(both, method, above) is None  # once
    below = {"fedavg": {**above["fedavg"], "validation": [-9.0, -9.0]}}
    assert cells.start_of(first, method, below) is None
    lost = {**first, "chosen": None}
    assert cells.start_of(lost, method, below).point == point
    monkeypatch.setattr(cells, "tune", diverges)
    kept = cells.complete(first, task, once, method, cells.SMOKE, above)
    assert kept["start"]["point"] == point
    assert kept["chosen"] == first["chosen"]
    assert kept["runs"] == first["runs"]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.simpler])
def test_a_simpler_form_has_a_value_for_each_hyperparameter(name):
    for row, at in METHODS[name].simpler.items():
        assert list(METHODS).index(row) < list(METHODS).index(name)  # it runs before
        assert METHODS[name].axes().keys() <= {*METHODS[row].axes(), *at}
        for hyperparameter, value in at.items():
            axis = METHODS[name].axes()[hyperparameter]
            assert value in (axis[0], axis[-1]) or (hyperparameter, value) == ("server_lr", 1.0)


FORMS = [(name, row) for name, method in METHODS.items() for row in method.simpler]


@pytest.mark.methods
@pytest.mark.parametrize(("name", "row"), FORMS)
def test_a_simpler_form_goes_where_its_row_goes(name, row):
    """After three rounds; without a hyperparameter at its limit, they are the same."""
    task = tasks.smoke(tasks.TASKS["convex"])
    if METHODS[name].looks_inside:
        task = tasks.smoke(tasks.TASKS["skew-0.1"])
    problem = tasks.problem(task)
    middle = {"client_lr": 0.02, "prox_weight": 0.2, "mixing": 0.2}
    middle["server_lr"] = 1.0 if name == "fedacg" else 0.9  # FedACG takes none
    middle |= {"momentum": 0.5, "perturbation_radius": 0.05, "contrastive_weight": 1.0}
    middle |= {"final_lr_ratio": 0.3}
    at = METHODS[name].simpler[row]
    start = problem.params(jax.random.key(0))
    ends = []
    for each, more in ((name, at), (row, {})):
        method = METHODS[each]
        point = {n: {**middle, **more}[n] for n in method.axes()}
        algorithm = method.build(task, problem, **point)
        run = simulate(algorithm, start, problem.clients, rounds=3, seed=1, **task.options())
        ends.append(run.params)
    (mine, _), (theirs, _), (first, _) = (ravel_pytree(tree) for tree in (*ends, start))
    apart = float(jnp.linalg.norm(mine - theirs) / jnp.linalg.norm(theirs - first))
    is_limit = at.keys() & {"prox_weight", "perturbation_radius", "contrastive_weight"}
    if name == "stem":  # its first local step is along the direction of the last round
        assert apart <= 0.3
    else:
        assert apart <= (0.05 if is_limit else 1e-5)


def test_no_stored_search_ended_below_a_simpler_form():
    for name, folder in itertools.product(tasks.TASKS, (cells.RESULTS, cells.AS_MANY_POINTS)):
        stored = cells.load(folder, name)
        others = {**cells.load(cells.RESULTS, name), **stored}
        for method, found in stored.items():
            assert cells.start_of(found, METHODS[method], others) is None, f"{name}, {method}"
            if "start" in found:
                first = found["first_search"]
                assert first["chosen"] is None or sum(found["validation"]) >= sum(
                    first["validation"]
                ), f"{name}, {method}"


def test_each_seed_divides_the_images_anew_and_all_methods_see_the_same():
    task = tasks.smoke(tasks.TASKS["skew-0.1"])
    one, other = tasks.problem(task), tasks.problem(task)

    first, second = (one.redrawn(seed).clients.label_histogram() for seed in task.seeds)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, other.redrawn(task.seeds[0]).clients.label_histogram())


def test_the_convex_score_counts_digits_of_the_distance_to_the_optimum():
    small = tasks.problem(tasks.smoke(TASK))
    x = np.asarray(small.clients.examples.x, np.float64)
    a, b = x[:, 0], x[:, 1]
    optimum = (a * b).sum(0) / a.sum(0)  # where the gradient of the mean of all examples is 0
    point = optimum + 1e-2 * np.linalg.norm(optimum) * np.eye(30)[3]
    assert float(small.evaluate(np.zeros(30, np.float32))["score"]) == pytest.approx(0, abs=1e-5)
    score = float(small.evaluate(np.asarray(point, np.float32))["score"])
    assert score == pytest.approx(2, abs=1e-3)


def test_claims_are_decided_by_paired_intervals_of_top_tail_and_gap():
    """Differences of the tails are -0.7, -0.8 and -0.8; the tops are all 2."""
    few = {
        "fedavg": cell("fedavg", [1.8, 1.9, 1.9]),
        "fedswa": cell("fedswa", [1.1, 1.1, 1.1]),
        "fedsam": cell("fedsam", [1.0, 1.5, 1.2]),
    }
    for name, train in (("fedavg", 11.0), ("fedswa", 4.0), ("fedsam", 9.0)):
        few[name]["runs"] = [{**run, "train": train} for run in few[name]["runs"]]
    found = {claim.text: said for claim, *said in claims.decided(few)}
    assert len(found) == 4  # others lack a method
    low, high = stats.ttest_rel([1.1] * 3, [1.8, 1.9, 1.9]).confidence_interval(0.95)
    assert high < 0 < -low
    said = found["FedSWA is ahead of FedAvg (FedSWA, Tables 2, 3)"]
    assert said == [
        "-",
        f"contradicted: {(low + high) / 2:.1f} ± {(high - low) / 2:.1f}",
        "contradicted",
    ]
    assert found["FedSWA is ahead of FedSAM (FedSWA, Tables 2, 3)"][2] == "undecided"
    assert found["FedSWA generalizes better than FedSAM (FedSWA, Table 1)"][2] == "shows"
    assert claims.lead(few["fedavg"]).mean == pytest.approx(11 - 5.6 / 3)
    few["fedswa"] = {**few["fedavg"], "method": "fedswa"}  # at its simpler form
    found = {claim.text: said for claim, *said in claims.decided(few)}
    said = found["FedSWA is ahead of FedAvg (FedSWA, Tables 2, 3)"]
    assert said == ["the same runs", "the same runs", "undecided"]


def test_a_task_with_a_falling_rate_has_it_at_each_round():
    task = dataclasses.replace(tasks.smoke(TASK), decay=0.2)
    rates = []

    def factory(loss_fn, client_lr):
        rates.append([float(client_lr(np.float32(number))) for number in (0, 9)])
        return fedavg(loss_fn, client_lr=0.1)

    METHODS["fedavg"].build(task, tasks.problem(task), client_lr=0.5)  # takes a schedule
    own = methods.Method("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "find", lambda kind, name: factory)
        own.build(task, tasks.problem(task), client_lr=0.5)
    assert rates == [pytest.approx([0.5, 0.1])]


def test_searches_of_a_task_spend_the_same_number_of_gradients():
    plans = [
        equal_budgets([gradients, 3], 90, cells.Scale().points, 2, 2)[0] for gradients in (1, 2, 3)
    ]
    spent = [plan.run_rounds * gradients for gradients, plan in enumerate(plans, start=1)]
    assert min(spent) > 0.95 * max(spent)


@pytest.mark.methods
@pytest.mark.skipif(not BROWSER, reason=f"needs one of {', '.join(BROWSERS)}")
def test_a_click_sorts_a_table(tmp_path):
    """By numbers, dashes last; a second click reverses."""
    script = (page.PAGE.parent / "static" / "sort.js").read_text("utf-8")
    cells_shown = ["9.5 ± 1.00", "1,200", "-", "best", "10"]
    rows = "".join(f"<tr><td>{text}</td></tr>" for text in cells_shown)
    probe = """addEventListener("load", () => {
        const order = () => [...document.querySelectorAll("td")].map(cell => cell.textContent);
        const orders = [1, 2].map(() => (document.querySelector("th").click(), order()));
        document.querySelector("pre").textContent = JSON.stringify(orders);
    });"""
    (tmp_path / "page.html").write_text(
        '<meta charset="utf-8"><section id="leaderboard"><table>'
        f"<thead><tr><th>gap</th></tr></thead><tbody>{rows}</tbody></table></section><pre></pre><script>{script}{probe}</script>",
        encoding="utf-8",
    )
    command_line = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--virtual-time-budget=2000", "--dump-dom", f"file://{tmp_path / 'page.html'}"),
    ]
    shown = subprocess.run(command_line, capture_output=True, text=True, timeout=100, check=True)
    (text,) = re.findall("<pre>(.*?)</pre>", shown.stdout)
    up = ["best", "9.5 ± 1.00", "10", "1,200", "-"]
    assert json.loads(text) == [up, [*up[3::-1], "-"]]
