"""Scores of the clients beside the rows: a file that nothing else of a run depends on."""

import json

import jax.numpy as jnp
import pytest

from tests.simulation.test_run import FEDAVG, assert_same_bits, run


def norm(params):
    return {"client_test_norm": jnp.abs(params["w"]).sum()}


def lines(folder):
    return list(map(json.loads, (folder / "clients.jsonl").read_text().splitlines()))


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "scored"
    return folder, run(FEDAVG, rounds=6, run_dir=folder, score_clients=norm)


def test_a_line_follows_each_row_and_changes_none(scored, tmp_path):
    folder, result = scored
    plain = run(FEDAVG, rounds=6, run_dir=tmp_path)
    assert_same_bits(result.state, plain.state)
    rows = [(path / "metrics.jsonl").read_bytes() for path in (folder, tmp_path)]
    assert rows[0] == rows[1]
    configs = [(path / "config.json").read_bytes() for path in (folder, tmp_path)]
    assert configs[0] == configs[1]
    assert [line["round"] for line in lines(folder)] == [2, 4, 6]
    assert lines(folder)[-1]["client_test_norm"] == float(norm(result.params)["client_test_norm"])
    assert not (tmp_path / "clients.jsonl").exists()


def test_a_resumed_run_has_all_lines(scored, tmp_path):
    folder, _ = scored
    settings = {"run_dir": tmp_path, "score_clients": norm}
    run(FEDAVG, rounds=4, **settings)
    kept = (tmp_path / "clients.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "clients.jsonl").write_text(kept[0])  # as if it was killed before the second one
    run(FEDAVG, rounds=6, **settings)
    assert lines(tmp_path) == lines(folder)
    run(FEDAVG, rounds=6, **settings)
    assert lines(tmp_path) == lines(folder)


def test_a_directory_without_them_gets_those_that_follow(scored, tmp_path):
    run(FEDAVG, rounds=2, run_dir=tmp_path)
    run(FEDAVG, rounds=6, run_dir=tmp_path, score_clients=norm)
    assert lines(tmp_path) == lines(scored[0])


def test_wrong_calls(tmp_path):
    with pytest.raises(ValueError, match=r"score_clients is .* and run_dir None; its results go"):
        run(FEDAVG, rounds=2, score_clients=norm)
    with pytest.raises(TypeError, match="score_clients is 3; it must be a function of the params"):
        run(FEDAVG, rounds=2, run_dir=tmp_path, score_clients=3)
    with pytest.raises(TypeError, match="score_clients returned float; it must be a dict"):
        run(FEDAVG, rounds=2, run_dir=tmp_path / "a", score_clients=lambda params: 1.0)
    with pytest.raises(ValueError, match="score_clients returned 'round', a name that rows"):
        run(FEDAVG, rounds=2, run_dir=tmp_path / "b", score_clients=lambda params: {"round": 1})
