"""The study of accuracy against epsilon, at its smallest."""

import math

import pytest

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
    assert "At an end of its grid it is nowhere." in shown
    report.draw(KEPT, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000


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
