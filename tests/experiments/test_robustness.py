"""The study of rules under attacks, at its smallest."""

import json
import types

import pytest

from experiments.robustness import __main__ as command
from experiments.robustness import study
from experiments.robustness.__main__ import main
from experiments.robustness.report import draw, page
from experiments.robustness.study import ATTACKS, NONE, RULES, SHARES, build, place
from fedjax_lab.wrappers.attacks import ATTACKS as KNOWN
from tests.algorithms.problem import loss_fn

KEPT = {
    **{place("mean", NONE): {"0": {"0": 80.0, "1": 82.0}}},
    **{place("mean", "alie"): {f"{share:g}": {"0": 50.0, "1": None} for share in SHARES}},
}


def test_it_has_all_rules_and_attacks():
    assert set(ATTACKS) == set(KNOWN)
    for rule in RULES:
        for attack in ATTACKS:
            assert build(rule, attack, loss_fn, 0.2).name.endswith(f"+{attack}")
    assert build("mean", NONE, loss_fn).name == "fedavg"


def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    shown = page(KEPT)
    assert "| mean | 81.0 ± 12.7 |    - |    - |    - |" in shown  # t(1) = 12.706
    assert "## alie" in shown
    assert "## gaussian" not in shown
    draw(KEPT, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000


def test_an_interrupted_sweep_is_not_kept(monkeypatch, tmp_path):
    """Its accuracies would be of the rounds that it has."""
    monkeypatch.setattr(command, "KEPT", tmp_path / "results" / "robustness.json")
    monkeypatch.setattr(command, "problem", lambda scale: (None,) * 4)
    monkeypatch.setattr(study, "sweep", lambda *a, **k: types.SimpleNamespace(interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        main(["--rules", "mean", "--attacks", "sign_flip"])
    assert not (tmp_path / "results").exists()


def test_kept_results_have_all_shares_and_seeds():
    kept = json.loads(command.KEPT.read_text())
    assert set(kept) == {place(rule, attack) for rule in RULES for attack in (NONE, *ATTACKS)}
    for name, shares in kept.items():
        assert set(shares) == ({"0"} if name.endswith(NONE) else {f"{s:g}" for s in SHARES}), name
        assert all(set(seeds) == set("01234") for seeds in shares.values()), name


@pytest.mark.slow
def test_one_corner_of_it(capsys):
    some = ["--rules", "mean", "krum:6", "--attacks", "sign_flip", "--seeds", "0"]
    main(["--smoke", *some])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == [
        *("mean none", "krum", "mean sign_flip", "krum"),
    ]
    head, _, mean, krum = lines[5:]
    assert [cell.strip() for cell in head.split("|")[1:-1]] == [
        "rule",
        "0 %",
        "10 %",
        "20 %",
        "30 %",
    ]
    plain, *attacked = (float(cell) for cell in mean.split("|")[2:-1])
    assert plain > 85
    assert max(attacked[1:]) < 40
    assert min(float(cell) for cell in krum.split("|")[2:-1]) > 70
