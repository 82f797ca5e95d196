"""The study of rules under attacks, at its smallest."""

import pytest

from experiments.robustness import ATTACKS, RULES, build, main
from fedjax_lab.wrappers.attacks import ATTACKS as KNOWN
from tests.algorithms.problem import loss_fn


def test_it_has_all_rules_and_attacks():
    assert set(ATTACKS) == set(KNOWN)
    for rule in RULES:
        for attack in ATTACKS:
            assert build(rule, attack, 0.2, loss_fn).name.endswith(f"+{attack}")


@pytest.mark.slow
def test_one_corner_of_it(tmp_path, capsys):
    some = ["--rules", "mean", "krum:6", "--attacks", "sign_flip", "--shares", "0", "0.3"]
    words = ["--scale", "smoke", "--runs", str(tmp_path), *some]
    main(words)
    shown = capsys.readouterr().out
    assert shown.count("accuracy") == 4
    main([*words, "--report"])
    again = capsys.readouterr().out
    assert again == shown[shown.index("| rule") :]
    assert again.splitlines()[0] == "| rule | no attack | sign_flip 30 % |"
