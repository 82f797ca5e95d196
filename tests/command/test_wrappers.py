"""Robust rules, privacy, secure aggregation and attacks as settings of a run."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fedjax_lab import data
from fedjax_lab.command.build import build_algorithm
from fedjax_lab.command.commands import parse
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.settings import PrivacySettings
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.report.cells import measures
from fedjax_lab.report.runs import Run
from fedjax_lab.report.sections import Tail
from fedjax_lab.storage.run_dir import read_config
from fedjax_lab.wrappers import with_attack, with_dp, with_secure_aggregation
from fedjax_lab.wrappers.ledger import guarantees


def loss_fn(params, examples, key):
    return jnp.square(params["w"][None] - examples.x).sum(-1)


CLIPPED = {"dp_clip_norm": 1.0, "dp_noise_multiplier": 1.0}


def built(**settings):
    return build_algorithm(RunConfig.of(**settings).resolve(), loss_fn)


def test_settings_become_wrappers():
    """The same names and arguments as by hand, the attack around everything else."""
    plain = built()
    assert built(robust_rule="krum:1").name == "fedavg+krum"
    settings = {
        "dp_clip_norm": 0.5,
        "dp_noise_multiplier": 0.8,
        "secure_bits": 24,
        "secure_clip": 0.5,
    }
    given = built(**settings, attack="sign_flip:0.2:5", compressor="sign", seed=3)
    assert given.wrappers == ("compression", "dp", "secure", "attack")
    by_hand = with_secure_aggregation(with_dp(plain, 0.5, 0.8), 24, 0.5)
    by_hand = with_attack(by_hand, "sign_flip", share=0.2, strength=5.0, seed=3)
    assert by_hand.hyperparameters.items() <= given.hyperparameters.items()
    few = built(**settings, secure_neighbours=4).hyperparameters
    by_hand = with_secure_aggregation(with_dp(plain, 0.5, 0.8), 24, 0.5, neighbours=4)
    assert few == by_hand.hyperparameters
    banded = {
        "dp_clip_norm": 0.5,
        "dp_noise_multiplier": 0.8,
        "dp_noise_bands": 3,
        "sampling": "cyclic",
    }
    by_hand = with_dp(plain, 0.5, 0.8, noise_bands=3)
    assert by_hand.hyperparameters == built(**banded).hyperparameters
    flipped = built(attack="label_flip:0.2:10")
    assert flipped.hyperparameters["attack_share"] == 0.2


def test_the_noise_may_be_traced():
    """Then nothing counts epsilon."""
    config = RunConfig.of(dp_clip_norm=1.0, dp_noise_multiplier=1.0, dp_delta=1e-3).resolve()
    schedule = Schedule(cohort_size=2, local_steps=1, batch_size=2)
    x = jnp.zeros((8, 2))
    clients = data.from_clients({client: (x, x) for client in range(4)})
    seen = []

    def spent(noise):
        algorithm = build_algorithm(config, loss_fn, changed={"dp_noise_multiplier": noise})
        seen.append(guarantees(algorithm, schedule, clients)(5))
        return noise

    spent(1.0)
    jax.make_jaxpr(spent)(1.0)
    assert [sorted(entries) for entries in seen] == [["epsilon"], []]


def test_a_run_without_them_is_recorded_as_before():
    record = RunConfig().record()
    assert not {*vars(PrivacySettings()), "sampling"} & set(record)
    given = RunConfig.of(robust_rule="median", sampling="poisson")
    assert {"robust_rule": "median", "sampling": "poisson"}.items() <= given.record().items()
    assert RunConfig.from_dict(json.loads(json.dumps(given.record()))) == given
    assert "median" in given.run_name()
    assert given.schedule()["sampling"] == "poisson"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_clip_norm": 1.0}, "dp_clip_norm is 1.0; it requires dp_noise_multiplier"),
        ({"dp_noise_multiplier": 1.0}, "dp_noise_multiplier is 1.0; it requires dp_clip_norm"),
        ({"dp_delta": 0.1}, "dp_delta is 0.1; it requires dp_clip_norm"),
        (
            {"dp_clip_norm": 0.0, "dp_noise_multiplier": 1.0},
            "dp_clip_norm is 0.0; it must be",
        ),
        (
            CLIPPED | {"dp_delta": 1.0},
            "dp_delta is 1.0; .* less than 1",
        ),
        (
            CLIPPED | {"weights": "examples"},
            "weights must be 'uniform'",
        ),
        ({"dp_noise_bands": 3}, "dp_noise_bands is 3; it requires dp_clip_norm"),
        (
            CLIPPED | {"dp_noise_bands": 3},
            "noise_bands is 3 and sampling 'without_replacement'; .*known for sampling='cyclic'",
        ),
        ({"secure_bits": 16}, "secure_bits is 16; it requires secure_clip"),
        ({"secure_neighbours": 4}, "secure_neighbours is 4; it requires secure_bits"),
        (
            {"secure_bits": 16, "secure_clip": 1.0, "secure_neighbours": 3},
            "secure_neighbours is 3; it must be even",
        ),
        ({"secure_bits": 40, "secure_clip": 1.0}, "secure_bits is 40; it must be between 2"),
        ({"robust_rule": "means"}, "Did you mean"),
        ({"attack": "sign_flip"}, "attack is 'sign_flip'; it must be of the form NAME:SHARE"),
        ({"attack": "label_flip:0.1"}, "label_flip:SHARE:CLASSES"),
        ({"attack": "label_flip:0.1:inf"}, "label_flip:SHARE:CLASSES"),
        ({"attack": "signflip:0.1"}, "Did you mean 'sign_flip'"),
        ({"sampling": "uniform"}, "sampling is 'uniform'; it must be one of cyclic, poisson"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.of(**settings).resolve()


def test_what_has_no_meaning_together():
    with pytest.raises(ValueError, match="with_dp cannot wrap"):
        built(robust_rule="median", dp_clip_norm=1.0, dp_noise_multiplier=1.0)


def test_tables_show_epsilon():
    rows = [{"accuracy": 0.5, "epsilon": 3.25}]
    run = Run(Path("run"), "fedavg", 0, {}, rows, {}, {}, {}, {})
    found = measures([run], Tail("tail", frozenset(), 1))
    assert found["epsilon"](run) == 3.25


@pytest.mark.slow
def test_a_private_run_from_the_command_line(tmp_path, capsys, monkeypatch):
    pytest.importorskip("dp_accounting")
    from fedjax_lab.command.cli import main

    monkeypatch.chdir(tmp_path)
    words = "run --rounds 2 --eval-every 1 --num-clients 20 --dp-clip-norm 0.5 --run-dir r"
    words += " --dp-noise-multiplier 2"
    assert main([*words.split(), "--dp-delta", "1e-3", "--sampling", "poisson"]) == 0
    assert "epsilon" in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert 0 < rows[0]["epsilon"] < rows[1]["epsilon"]
    assert main(["report", "r", "--format", "csv", "--out", "table.csv"]) == 0
    assert "epsilon" in (tmp_path / "table.csv").read_text()


def test_the_names_of_before_are_understood(tmp_path):
    old = {"dp_clip": 0.5, "dp_noise": 2.0}
    config = RunConfig.from_dict(old)
    assert (config.privacy.dp_clip_norm, config.privacy.dp_noise_multiplier) == (0.5, 2.0)
    words = ["run", "--dp-clip", "0.5", "--dp-noise", "2"]
    assert parse(words).settings == config
    assert parse(["run", "--dp-clip-norm", "0.5", "--dp-noise-multiplier", "2"]).settings == config
    (tmp_path / "config.json").write_text(json.dumps({"run_config": old}))
    assert read_config(tmp_path)["run_config"] == {"dp_clip_norm": 0.5, "dp_noise_multiplier": 2.0}
