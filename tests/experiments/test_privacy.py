"""The study of accuracy against epsilon, at its smallest."""

import json
import math
import types

import pytest

from experiments.privacy import __main__ as command
from experiments.privacy import report, study
from experiments.privacy.__main__ import main
from tests.algorithms.problem import loss_fn

KEPT = {
    "FedAvg": {
        f"{epsilon:g}": {
            "server_lr": 1.0,
            "noise_multiplier": 0.5,
            "accuracy": {"0": 80.0, "1": 82.0},
        }
        for epsilon in study.EPSILONS
    }
}


def test_all_methods_are_private():
    for method in study.METHODS.values():
        assert study.build(method, loss_fn, 1.0, 0.5).wrappers[-1] == "dp"
        assert study.noise_for(method.sampling, method.bands, study.SMOKE, math.inf) == 0


def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    shown = report.page(KEPT)
    assert "| 2 | 81.00 ± 12.71 |" in shown  # t(1 degree of freedom) = 12.706
    assert "| FedAvg | 2 | 0.50 | 1 |" in shown
    assert "| no noise |" in shown
    assert "at an end of its grid: none." in shown
    report.draw(KEPT, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000


def test_one_seed_is_drawn_without_an_interval(tmp_path):
    pytest.importorskip("matplotlib")
    cells = {e: {**cell, "accuracy": {"0": 80.0}} for e, cell in KEPT["FedAvg"].items()}
    report.draw({"FedAvg": cells}, tmp_path / "figure.svg")
    assert "| 2 | 80.00 |" in report.page({"FedAvg": cells})


def test_an_interrupted_sweep_is_not_kept(monkeypatch, tmp_path):
    """Its accuracies would be of the rounds that it has."""
    monkeypatch.setattr(command, "KEPT", tmp_path / "results" / "privacy.json")
    monkeypatch.setattr(command, "MACHINE", study.SMOKE)
    monkeypatch.setattr(study, "noise_for", lambda sampling, bands, scale, epsilon: 1.0)
    monkeypatch.setattr(study, "sweep", lambda *a, **k: types.SimpleNamespace(interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        main(["--methods", "FedAvg"])
    assert not (tmp_path / "results").exists()


def test_kept_results_have_all_epsilons_and_seeds():
    kept = json.loads(command.KEPT.read_text())
    assert set(kept) == set(study.METHODS)
    for name, cells in kept.items():
        assert set(cells) == {f"{epsilon:g}" for epsilon in study.EPSILONS}, name
        assert all(set(cell["accuracy"]) == set("01234") for cell in cells.values()), name


@pytest.mark.slow
def test_the_smallest_one(monkeypatch, capsys):
    monkeypatch.setattr(study, "EPSILONS", (4.0, math.inf))
    monkeypatch.setattr(
        study, "noise_for", lambda sampling, bands, scale, e: 0.0 if math.isinf(e) else 1.0
    )
    main(["--smoke", "--methods", "CFedAvg", "FedAvg, cyclic", "--seeds", "0", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| epsilon | CFedAvg | FedAvg, cyclic |"
    assert lines[2].startswith("| 4 |")
    assert lines[3].startswith("| no noise |")
