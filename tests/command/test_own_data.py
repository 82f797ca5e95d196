"""The command line on an .npz file of one's own: clients' ids in an array, and a regression."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_lab import load_run
from fedjax_lab.command import cli
from fedjax_lab.command.config import RunConfig

QUICK = ["--rounds", "4", "--eval-every", "2", "--cohort-size", "3", "--batch-size", "4"]
QUICK += ["--replace", "--client-map", "scan", "--model", "linear"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A line with noise; 5 owners, known by name, one of them with one example."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=60)).astype(np.float32)
    owners = np.array(["ann", "bob", "cy", "dee"])[rng.integers(0, 4, 40)]
    owners[7] = "eve"
    test = {"x_test": x[40:], "y_test": y[40:]}
    np.savez("line.npz", x_train=x[:40], y_train=y[:40], hospital=owners, short=owners[:9], **test)
    np.savez(
        "cube.npz", x_train=x, y_train=np.ones((60, 2, 2)), x_test=x, y_test=np.ones((60, 2, 2))
    )
    np.savez(
        "classes.npz", x_train=x, y_train=np.arange(60) % 3, x_test=x, y_test=np.arange(60) % 3
    )
    return "npz:line.npz"


def run(*words):
    return cli.main(["run", *QUICK, *words])


def test_a_regression_by_owner(file, capsys):
    where = ["--run-dir", "runs/one", "--dataset", file, "--partition", "natural:hospital"]
    assert run(*where) == 0
    said = capsys.readouterr()
    assert "5 clients" in said.err
    assert "names: ann, bob, cy, dee, eve" in said.err
    assert "1 outputs" in said.err
    assert "last mean squared error" in said.out
    assert "accuracy" not in said.out
    saved = load_run("runs/one")
    with np.load("line.npz") as arrays:
        data = dict(arrays)
    mean, std = data["x_train"].mean(0), data["x_train"].std(0)
    kernel, bias = (
        np.asarray(leaf) for leaf in sorted(jax.tree.leaves(saved.params), key=np.ndim)[::-1]
    )

    def errors(x, y):
        return np.square(((x - mean) / std @ kernel + bias)[:, 0] - y)

    found = saved.history[-1]
    expected = errors(data["x_test"], data["y_test"]).mean()
    assert found["mean_squared_error"] == pytest.approx(expected, rel=1e-4)
    assert found["test_loss"] == pytest.approx(expected, rel=1e-4)
    summary = json.loads(Path("runs/one/summary.json").read_text())
    own = errors(data["x_train"], data["y_train"])
    each = [own[data["hospital"] == name].mean() for name in np.unique(data["hospital"])]
    np.testing.assert_allclose(summary["client_mean_squared_error"], each, rtol=1e-4)
    assert summary["worst_10_percent_mean_squared_error"] == pytest.approx(max(each), rel=1e-4)
    partition = json.loads(Path("runs/one/partition.json").read_text())
    assert partition["names"] == ["ann", "bob", "cy", "dee", "eve"]
    assert partition["label_histogram"] is None
    # The run goes on, is repeated and reported on like any other.
    assert run(*where) == 0
    assert cli.main(["rerun", "runs/one", "--quiet"]) == 0
    capsys.readouterr()
    assert cli.main(["report", "runs/one", "--format", "csv"]) == 0
    assert "lowest mean squared error" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_and_seeds_of_a_regression(file, capsys):
    words = ["--dataset", file, "--partition", "natural:hospital", "--seeds", "0", "1"]
    assert run(*words) == 0
    assert "lowest mean squared error" in capsys.readouterr().out
    assert cli.main(["sweep", *QUICK, *words, "--point", "client_lr=0.1,0.01"]) == 0
    assert "mean squared error" in capsys.readouterr().out
    assert cli.main(["report", "runs"]) == 0


@pytest.mark.slow
def test_owners_are_of_any_kind_of_data(file, capsys):
    np.savez("ids.npz", **np.load("classes.npz"), owner=np.arange(60) % 4 + 1000)
    words = ["--dataset", "npz:ids.npz", "--partition", "natural:owner", "--run-dir", "ids"]
    assert run(*words, "--rounds", "1") == 0
    assert "names: 1000, 1001, 1002, 1003" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "npz:line.npz"], "dirichlet:0.1', which divides examples by their label"),
        (["--partition", "natural:user"], "dataset 'digits'; clients' ids are read from npz:FILE"),
        (["--dataset", "npz:line.npz", "--partition", "natural"], "must be natural:ARRAY"),
        (["--dataset", "npz:line.npz", "--partition", "natural:age"], "no array age; it has x_tr"),
        (["--dataset", "npz:line.npz", "--partition", "natural:short"], "shape (9,); it must have"),
        (
            ["--dataset", "npz:line.npz", "--partition", "natural:hospital", "--num-clients", "5"],
            "num_clients is 5; with natural:hospital the ids determine",
        ),
        (
            [
                *["--dataset", "npz:line.npz", "--partition", "natural:hospital"],
                *["--min-client-size", "2"],
            ],
            "min_size, which is 2: min_size=1 takes it",
        ),
        (
            ["--dataset", "npz:line.npz", "--partition", "iid", "--algorithm", "moon"],
            "algorithm is 'moon', which compares class probabilities",
        ),
        (["--dataset", "npz:cube.npz", "--partition", "iid"], "predict targets [n] or [n, outputs"),
        (
            [
                *["--dataset", "npz:line.npz", "--partition", "natural:hospital"],
                *["--algorithm", "gradma"],
            ],
            "gradma needs memory_size",
        ),
        (
            [
                *["--dataset", "npz:line.npz", "--partition", "natural:hospital"],
                *["--cohort-size", "9"],
            ],
            "cohort_size",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(words, message, file, capsys):
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_what_is_not_said_of_clients_is_filled_in():
    config = RunConfig().resolve()
    assert (config.data.num_clients, config.data.min_client_size) == (20, 2)
    config = RunConfig.of(dataset="npz:a", partition="natural:who", cohort_size=50).resolve()
    assert (config.data.num_clients, config.data.min_client_size) == (None, 1)
    assert config.resolve() == config
