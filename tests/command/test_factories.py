"""Methods, models and data sets of one's own on the command line: by path, and by entry points."""

import importlib
import json
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_lab import load_run
from fedjax_lab.command import cli, factories
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.config_file import format_settings
from fedjax_lab.command.loading import load_divided

QUICK = ["--rounds", "4", "--eval-every", "2", "--cohort-size", "3", "--client-map", "scan"]
FILES = {
    "methods.py": '''
        """Methods."""
        from typing import Literal

        import jax

        from fedjax_lab.method import Algorithm, Common, LocalTraining, Phase, factory
        from own_pkg.arithmetic import halve


        @factory
        def halved(loss_fn, *, share: float = 1.0, flag: bool = True, times: Literal[1, 2] = 1,
                   way: Literal["1", "back"] | None = None, **common) -> Algorithm:
            """FedAvg that takes a share of the mean change."""
            training = LocalTraining(loss_fn, **common)

            def server_update(x, messages, cohort):
                step = lambda p, d: p - halve(share) * d
                return jax.tree.map(step, x, messages["delta"]), {}

            return Algorithm(
                "halved",
                lambda params, num_clients, batch: (params, ()),
                (Phase(lambda x, round: x, training.client_update, server_update,
                       reduce={"delta": "mean"}),),
                lambda state: state.server,
            )


        number = 3


        def nothing(loss_fn, *, client_lr):
            return None
    ''',
    "arithmetic.py": """
        def halve(number):
            return 0.5 * number
    """,
    "models.py": '''
        import flax.linen as nn


        class Net(nn.Module):
            num_classes: int
            width: int = 4

            @nn.compact
            def __call__(self, x):
                x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
                return nn.Dense(self.num_classes)(x)


        def net(num_classes, width: int = 4):
            """A dense layer and another one."""
            return Net(num_classes, width)
    ''',
    "data.py": '''
        import numpy as np


        def load(count: int = 40, noise: float = 0.0):
            """Two blobs."""
            rng = np.random.default_rng(0)
            y = np.arange(count) % 2
            x = (rng.normal(size=(count, 3)) + 2 * y[:, None]).astype("float32")
            return (x[10:], y[10:]), (x[:10], y[:10])


        def named(name: str = "a", other: "str | None" = None, free=None):
            assert (name, other, free) == ("2020", "1e5,b", 2020), (name, other, free)
            return load()


        def of_clients():
            (x, y), test = load()
            return {"ann": (x[:9], y[:9]), "bob": (x[9:20], y[9:20]), "cy": (x[20:], y[20:])}, test


        def of_two_scales():
            parts, test = of_clients()
            x, y = parts["cy"]
            return parts | {"cy": ((200 + x).astype("uint8"), y)}, test


        def with_nobody():
            parts, test = of_clients()
            return parts | {"di": (np.array([]), np.array([]))}, test


        def of_uneven_arrays():
            parts, test = of_clients()
            x, y = parts["cy"]
            return parts | {"cy": (x[1:], y), "di": (x[:1], y[:0])}, test
    ''',
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the current folder, imported anew."""
    folder = tmp_path / "own_pkg"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name, text in FILES.items():
        (folder / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    forget()


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_pkg"]:
        del sys.modules[name]


def run(*words):
    return cli.main(["run", *QUICK, *words])


OWN = ["--algorithm", "own_pkg.methods:halved", "--model", "own_pkg.models:net"]
OWN += ["--dataset", "own_pkg.data:load", "--partition", "iid", "--num-clients", "4"]


@pytest.mark.methods
def test_a_method_a_model_and_data(package, capsys):
    options = ["--option", "share=2", "--model-option", "width=5", "--dataset-option", "count=50"]
    assert run(*OWN, *options, "--run-dir", "runs/own") == 0
    said = capsys.readouterr()
    assert "40 + 10 examples 3, 2 classes" in said.err
    # A share of 2, halved, is FedAvg of the package, on the same data and model.
    fedavg = ["--algorithm", "fedavg", *OWN[2:], *options[2:], "--run-dir", "runs/fedavg"]
    assert run(*fedavg) == 0
    one, other = (load_run(f"runs/{name}") for name in ("own", "fedavg"))
    for a, b in zip(*(jax.tree.leaves(r.params) for r in (one, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert one.config["algorithm"] == "halved"
    assert one.config["hyperparameters"]["share"] == 2
    assert cli.main(["rerun", "runs/own", "--quiet"]) == 0


def test_an_option_that_is_annotated_as_text_stays_text(package, tmp_path):
    given = ("name=2020", "other=1e5,b", "free=2020")
    config = RunConfig.of(
        dataset="own_pkg.data:named", dataset_option=given, num_clients=4, cohort_size=2
    ).resolve()
    assert config.data.dataset_option == given
    load_divided(config.data, 0)  # which asserts what it is given
    for form in ("yaml", "json"):
        file = tmp_path / f"config.{form}"
        file.write_text(format_settings(config.to_dict(), form))
        assert RunConfig.from_file(file) == config
    none = config.replace(dataset_option=("other=none",)).resolve()
    assert none.to_dict()["dataset_option"] == {"other": None}
    for text in ("free=infinity", "free=1,nan"):
        with pytest.raises(ValueError, match=r"free of the dataset own_pkg.data:named is .*finite"):
            config.replace(dataset_option=(text,)).resolve()


@pytest.mark.methods
def test_a_changed_source_is_refused(package, capsys):
    assert run(*OWN, "--run-dir", "runs/own") == 0
    config = json.loads(Path("runs/own/config.json").read_text())
    assert "own_pkg/arithmetic.py" in config["own_code"]
    assert run(*OWN, "--run-dir", "runs/own") == 0
    file = package / "arithmetic.py"
    before = file.read_text()
    file.write_text(before + "# another line\n")
    forget()
    capsys.readouterr()
    assert run(*OWN, "--run-dir", "runs/own") == 2
    error = capsys.readouterr().err
    assert "other versions of the files own_pkg/arithmetic.py. Choose another" in error
    file.write_text(before)
    forget()
    assert run(*OWN, "--run-dir", "runs/own") == 0


@pytest.mark.methods
def test_data_that_come_with_their_clients(package, capsys):
    words = ["--dataset", "own_pkg.data:of_clients", "--partition", "natural", "--model", "linear"]
    assert run(*words, "--run-dir", "runs/natural") == 0
    assert "names: ann, bob, cy" in capsys.readouterr().err


def test_clients_without_examples_are_taken_if_asked_for(package):
    """Their arrays decide no dtype of the others'."""
    config = RunConfig.of(dataset="own_pkg.data:with_nobody", partition="natural")
    found = load_divided(config.replace(min_client_size=0).resolve().data, 0)
    assert found.clients.names == ("ann", "bob", "cy", "di")
    assert found.clients.sizes.tolist() == [9, 11, 10, 0]
    assert (found.train.y.dtype.kind, found.classes) == ("i", 2)
    np.testing.assert_array_equal(found.train.y, np.arange(10, 40) % 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "own_pkg.none:f"], "the module own_pkg.none cannot be imported"),
        (
            ["--algorithm", "own_pkg.methods:halvd"],
            # not what the module imports from the library
            "has no halvd. Did you mean 'halved' or 'halve'? It has halve, halved, nothing.",
        ),
        (["--algorithm", "own_pkg.methods:number"], "which is a int; it must be a function"),
        (["--algorithm", "own_pkg.methods:nothing"], "returns is NoneType, not an Algorithm"),
        ([*OWN, "--option", "sare=1"], "sare is not an option of own_pkg.methods:halved. Did you"),
        ([*OWN, "--option", "share=much"], "it must be a number"),
        ([*OWN, "--option", "flag=3"], "it must be true or false"),
        ([*OWN, "--option", "way=bakc"], "is bakc; it must be one of 1, back, none. Did you"),
        ([*OWN, "--option", "times=3"], "times of own_pkg.methods:halved is 3; it must be one"),
        ([*OWN, "--option", "times=true"], "it must be an integer"),
        (
            [*OWN, "--model-option", "depth=3"],
            "depth is not an option of the model own_pkg.models:net",
        ),
        ([*OWN, "--dataset-option", "count=1.5"], "count of the dataset own_pkg.data:load is 1.5"),
        (["--dataset-option", "count=3"], "count is not an option of the dataset digits"),
        ([*OWN, "--partition", "natural"], "num_clients is 4; with natural"),
        (
            ["--dataset", "own_pkg.data:of_clients", "--partition", "iid"],
            "comes with its clients: give --partition natural",
        ),
        (
            ["--dataset", "own_pkg.data:of_two_scales", "--partition", "natural"],
            "clients['cy'].x has examples of shape (3,) and dtype uint8, clients['ann'].x of (3,) "
            "and float32; all must be alike",
        ),
        (
            ["--dataset", "own_pkg.data:with_nobody", "--partition", "natural"],
            "clients['di'] has 0 examples; there must be at least min_size, which is 1",
        ),
        (
            ["--dataset", "own_pkg.data:of_uneven_arrays", "--partition", "natural"],
            "clients['cy'] has leaves with leading axes [(9,), (10,)]; all must be equal",
        ),
        (["--dataset", "own_pkg.models:net"], "needs num_classes: give --dataset-option num_cl"),
        (["--algorithm", "fedavgg"], "algorithm is 'fedavgg'; it must be one of"),
    ],
)
def test_mistakes(words, message, package, capsys):
    assert run(*words, "--run-dir", "runs/wrong") == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def installed(package, monkeypatch):
    """The same package as an installed one that offers names."""
    found = Path("own_pkg-1.0.dist-info")
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: own-pkg\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text(
        "[fedjax_lab.algorithms]\nhalved = own_pkg.methods:halved\nbroken = own_pkg.none:f\n"
        "[fedjax_lab.models]\nmy_net = own_pkg.models:net\n"
        "[fedjax_lab.datasets]\nblobs = own_pkg.data:load\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    factories.offered.cache_clear()
    importlib.invalidate_caches()
    yield
    factories.offered.cache_clear()


@pytest.mark.methods
def test_entry_points_are_listed_and_run(installed, capsys):
    for words in (["algorithms"], ["models"], ["datasets"]):
        assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "halved\n    FedAvg that takes a share of the mean change." in shown
    assert "from: own_pkg.methods:halved, of own-pkg" in shown
    assert "options: share=1.0, flag=true" in shown
    assert "broken\n    own_pkg.none:f, of own-pkg: cannot be imported" in shown
    assert "my_net\n    A dense layer and another one." in shown
    assert "Two blobs. (own_pkg.data:load, of own-pkg)" in shown
    config = RunConfig.of(algorithm="halved", model="my_net", dataset="blobs", partition="iid")
    assert config.resolve().run_name() == "halved-blobs-iid-seed0"
    words = ["--algorithm", "halved", "--model", "my_net", "--dataset", "blobs"]
    assert run(*words, "--partition", "iid", "--num-clients", "4", "--run-dir", "runs/ep") == 0
