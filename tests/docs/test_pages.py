"""The tutorial, the guides and the pages on moving here run as printed, with fewer rounds.

One of them does so in every run of the tests, the others with the documentation's examples.
"""

import operator
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from scipy import stats

from fedjax_lab import Algorithm, Phase, data, load_run, models, simulate, tree
from fedjax_lab.command import cli
from fedjax_lab.command.sweeping import sweep_points
from fedjax_lab.method import LocalTraining

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "tutorial.md", *sorted(DOCS.glob("guides/*.md")), *sorted(DOCS.glob("moving/*.md"))]
BLOCK = re.compile(r"^( *)```(python|sh)\n(.*?)^ *```$", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language, without the indentation of a list."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [
        re.sub(f"^{indent}", "", code, flags=re.M)
        for indent, kind, code in found
        if kind == language
    ]


def commands(page: Path) -> list[list[str]]:
    """The arguments of all calls of our command line on a page."""
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    calls = [line.partition("python -m fedjax_lab ")[2] for line in lines]
    return [shlex.split(call) for call in calls if call]


def execute(name: str, *, as_printed: bool = False) -> dict[str, Any]:
    """Run the Python of a page, two rounds a run, on one device; returns what it defines."""
    page = DOCS / name
    namespace: dict[str, Any] = {"__name__": "page"}
    for code in blocks(page, "python"):
        others = ("import fedjax\n", "import flwr", "from flwr", "import ray", "import torch")
        if any(other in code for other in others):
            compile(code, str(page), "exec")  # another library's
            continue
        # One device, of the tests' eight, is soonest compiled for.
        short = re.sub(r"\brounds=\d+", 'rounds=2, client_map="scan"', code)
        short = code if as_printed else short
        exec(compile(short, str(page), "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.example
def test_from_pytorch():
    """What the page's network computes is computed in NumPy, from the file that the page writes."""
    safetensors = pytest.importorskip("safetensors.numpy")
    from tests.models.test_weight_files import torch_forward

    rng = np.random.default_rng(0)
    sizes = {"conv1": (32, 1, 5, 5), "conv2": (64, 32, 5, 5), "fc1": (512, 1024), "fc2": (10, 512)}
    state = {}
    for name, size in sizes.items():
        state[f"{name}.weight"] = rng.normal(0, np.prod(size[1:]) ** -0.5, size).astype("f4")
        state[f"{name}.bias"] = rng.normal(0, 0.1, size[0]).astype("f4")
    safetensors.save_file(state, "cnn.safetensors")
    page = execute("guides/from_pytorch.md")
    after = safetensors.load_file("after.safetensors")
    assert {name: array.shape for name, array in after.items()} == {
        name: array.shape for name, array in state.items()
    }
    image = page["x"][0, :, :, 0]
    expected = torch_forward(after, image[None])
    np.testing.assert_allclose(page["logits"][0], expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.example
def test_the_tutorial(tmp_path, capsys):
    namespace = execute("tutorial.md")
    assert list(namespace["histories"]) == ["FedAvg", "SCAFFOLD", "FedMoSWA"]
    for history in namespace["histories"].values():
        assert 0 < history[-1]["accuracy"] < 1
    # The same method and seed, once for the first run and once for the comparison.
    assert namespace["histories"]["FedAvg"] == namespace["result"].history
    assert {"partition.png", "comparison.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "dirichlet:0.1" in capsys.readouterr().out
    calls = commands(DOCS / "tutorial.md")
    assert [call[0] for call in calls] == ["run", "run", "report"]
    first, _, last = [[word.replace("100", "2") for word in call] for call in calls]
    assert cli.main([*first, "--client-map", "scan"]) == 0
    assert cli.main(last) == 0
    (report,) = tmp_path.glob("runs/**/report.md")
    assert "fedavg" in report.read_text()


@pytest.mark.example
def test_an_algorithm():
    namespace = execute("guides/add_an_algorithm.md")
    state, result = namespace["result"].state, namespace["result"]
    assert namespace["algorithm"].hyperparameters["decay"] == 0.9
    for average, last in zip(
        *map(jax.tree.leaves, (result.params, state.server.params)), strict=True
    ):
        assert not np.array_equal(average, last)
    with pytest.raises(ValueError, match="decay is 2"):
        namespace["averaged"](namespace["loss_fn"], client_lr=0.1, decay=2)
    clients = namespace["clients"]
    drawn = data.draw_batch(
        clients,
        jax.random.key(0),
        0,
        cohort_size=5,
        local_steps=1,
        batch_size=4,
        full_examples=True,
    )
    everything, mask = drawn.full_examples, drawn.full_mask
    for slot, client in enumerate(np.asarray(drawn.client_ids)):
        one = drawn._replace(full_examples=everything[slot], full_mask=mask[slot])
        counts = namespace["class_counts"](one)
        np.testing.assert_array_equal(counts, clients.label_histogram()[client])
    check_mean_gradient(namespace)


def check_mean_gradient(namespace):
    """Of plain SGD, the mean of a client's gradients is its displacement / (K_i times the rate)."""
    params, loss_fn = namespace["params"], namespace["loss_fn"]
    training = LocalTraining(loss_fn, client_lr=0.1)

    def client_update(x, row, batch):
        mean, local = namespace["mean_gradient"](training, x, batch)
        delta = tree.subtract(x, local.params)
        of_steps = tree.scale(delta, 1 / (0.1 * batch.num_steps))
        return {"mean": mean, "of_steps": of_steps}, row, local.report

    def server_update(server, messages, cohort):
        apart = tree.norm(tree.subtract(messages["mean"], messages["of_steps"]))
        return server, {"apart": apart / tree.norm(messages["mean"])}

    means = {"mean": "mean", "of_steps": "mean"}
    phase = Phase(lambda x, round: x, client_update, server_update, reduce=means)
    method = Algorithm("own", lambda x, n, batch: (x, ()), (phase,), lambda state: state.server)
    work = {"cohort_size": 5, "local_steps": [1, 2] * 10, "batch_size": 4}
    row = simulate(method, params, namespace["clients"], rounds=1, **work).history[-1]
    assert row["apart"] < 1e-4
    assert 1 < row["local_steps"] < 2


@pytest.mark.example
def test_language_models(tmp_path, capsys):
    """The Python of the page, and its commands with a small text, small models and few rounds."""
    page = execute("guides/language_models.md")
    row = page["result"].history[-1]
    assert row["perplexity"] == pytest.approx(np.exp(row["test_loss"]), rel=1e-5)
    assert page["tokens"].shape == (1, 20)
    Path("book.txt").write_text("\n".join(page["speakers"].values()))
    small = ["--rounds", "2", "--client-map", "scan", "--sequence-length", "8"]
    for *words, last in commands(DOCS / "guides/language_models.md"):
        assert cli.main([*words, last, *(small if words[0] == "run" else [])]) == 0
    assert "perplexity" in (tmp_path / "runs/report/report.md").read_text()


@pytest.mark.example
def test_a_method_of_ones_own(tmp_path, capsys, monkeypatch):
    """Every command of the page, with few rounds, in an empty folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = DOCS / "guides/your_own_method.md"
    (tmp_path / "my_data.py").write_text(blocks(page, "python")[0])
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    for line in filter(str.strip, lines):
        words, _, file = line.partition(" > ")
        program, *arguments = shlex.split(words.replace("--rounds 60", "--rounds 2"))
        if program == "fedjax-lab":
            assert cli.main(arguments) == 0, line
            shown = capsys.readouterr().out
            if file:
                Path(file).write_text(shown)
        elif program == "python":  # what the recipes' own test runs
            compile(Path(arguments[0]).read_text(), arguments[0], "exec")
    assert len([line for line in lines if line.startswith("fedjax-lab")]) == 6
    names = {path.parent.name for path in tmp_path.glob("**/config.json")}
    assert names == {"seed0", "seed1", "seed2", "rings"}
    capsys.readouterr()
    assert cli.main(["report", "runs", "--format", "csv"]) == 0
    shown = capsys.readouterr().out
    assert "limited" in shown
    assert "fedavg" in shown
    file = tmp_path / "own_method.py"
    file.write_text(file.read_text() + "# changed\n")
    del sys.modules["own_method"]
    run = ["run", "--algorithm", "own_method:limited", "--option", "limit=0.5", "--rounds", "2"]
    assert cli.main([*run, "--seeds", "0", "--run-dir", "runs/limited"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    expected = page.read_text().split("    run_dir is")[1].split("\n\n")[0]
    assert " ".join(expected.split()) in error


@pytest.mark.example
def test_a_compressor():
    namespace = execute("guides/add_a_compressor.md")
    names = ("scaffold", "small", "algorithm")
    full, small, striped = (namespace[name].uplink(namespace["params"]) for name in names)
    assert small < 0.1 * full
    assert full / 4 < striped < full / 3.9
    stripes = namespace["stripes"](4)
    for d in (1, 4, 33):
        v = jax.random.normal(jax.random.key(d), (d,))
        for seed in range(6):
            message = stripes.compress(jax.random.key(seed), v)
            packed = stripes.pack(message)
            assert len(packed) == stripes.bytes(d)
            received = stripes.decompress(message)
            np.testing.assert_array_equal(stripes.decompress(stripes.unpack(packed, d)), received)
            first = int(message.first)
            expected = np.where(np.arange(d) % 4 == first, v, 0)
            np.testing.assert_array_equal(received, expected)


def test_a_partition():
    namespace = execute("guides/add_a_partition.md")
    clients, brightness = namespace["clients"], namespace["brightness"]
    owner = namespace["owner"]
    assert sorted(clients.sizes.tolist()) == sorted(np.bincount(owner).tolist())
    assert brightness[owner == 0].mean() < brightness[owner == 9].mean()


@pytest.mark.example
def test_a_data_set():
    namespace = execute("guides/add_a_data_set.md")
    np.testing.assert_array_equal(namespace["train"].x, namespace["x"][:400])
    ready = namespace["preprocess"](namespace["test"], jax.random.key(0)).x
    assert ready.shape == (100, 12, 12, 3)
    assert ready.dtype == jnp.float32


@pytest.mark.example
def test_clients_of_your_own():
    page = execute("guides/your_own_clients.md")
    assert page["clients"].names == ("alice", "bob", "carol", "dave", "erin", "frank")
    assert sorted(page["seen"].names + page["unseen"].names) == sorted(page["clients"].names)
    assert page["train"].names == page["test"].names == page["seen"].names
    assert page["by_owner"].names == ("al", "bob", "cy")
    assert page["by_column"].names == ("3", "7")
    history, each = page["result"].history, np.asarray(page["each"])
    assert history[-1]["mean_squared_error"] == history[-1]["test_loss"]
    sizes = np.asarray(page["unseen"].sizes)
    inputs = page["prepare"](page["patients"].examples, None).x
    ages = np.array([50, 140 / 3, 29, 61])
    wards = np.eye(3)[[1, 2, 1, 0]]  # "", er, icu
    expected = np.column_stack([(ages - ages.mean()) / ages.std(), wards])
    np.testing.assert_allclose(inputs, expected, atol=1e-5)
    together = float(page["on_unseen"]["mean_squared_error"])
    assert together == pytest.approx((each * sizes).sum() / sizes.sum(), rel=1e-5)


@pytest.mark.example
def test_several_devices():
    losses = execute("guides/several_devices.md")["losses"]
    np.testing.assert_allclose(losses["shard_map"], losses["scan"], rtol=1e-5)


@pytest.mark.example
def test_several_processes():
    result = execute("guides/several_processes.md")["result"]
    assert 0 < result.history[-1]["accuracy"] < 1


@pytest.mark.example
def test_a_resumed_run(tmp_path):
    namespace = execute("guides/resume_a_run.md")
    assert namespace["again"].history == namespace["result"].history
    assert (tmp_path / "runs" / "first" / "config.json").exists()
    longer, early, second = (namespace[name] for name in ("longer", "early", "second"))
    assert [row["round"] for row in longer.history] == list(range(10, 101, 10))
    assert longer.history[-1]["loss"] < namespace["result"].history[-1]["loss"]
    assert early.stopped is None  # it has two rounds here
    assert second.history[-1]["loss"] < namespace["result"].history[-1]["loss"]


@pytest.mark.example
def test_metrics_and_cohorts(capsys):
    page = execute("guides/metrics_and_cohorts.md")
    accuracy, norm, gradient, own, spread, worst, loss = map(float, capsys.readouterr().out.split())
    score = np.random.default_rng(0).integers(0, 5, 30) / 5  # with ties
    y = np.arange(30) % 3 == 0
    wins = stats.mannwhitneyu(score[y], score[~y]).statistic
    assert page["auc"](y, score) == pytest.approx(wins / (10 * 20))
    assert np.isnan(page["auc"](y & ~y, score))
    assert worst == np.nanmin(page["scored"].history[-1]["auc_each"])
    assert 0 < accuracy < 1
    assert 0 < loss < 2
    ids, of_all = np.asarray(page["batch"].client_ids), np.asarray(page["accuracy"])
    assert len(set(ids.tolist())) == 5
    assert of_all[ids].mean() < of_all.mean()
    assert 0 < own < 1
    assert spread > 0  # the clients' own heads differ
    first = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(page["params"])))
    assert norm == pytest.approx(first, rel=0.1)  # the weights have hardly moved
    assert gradient > 0


@pytest.mark.example
def test_freeze_weights(capsys):
    page = execute("guides/freeze_weights.md")
    up, head, whole, adapters = map(float, capsys.readouterr().out.split())
    assert head == 2 * 4 * 330  # SCAFFOLD sends two vectors
    assert up == 2 * 5 * head
    assert whole == 2 * 4 * models.count_params(page["pretrained"])
    sizes = [(64 + 64) * 4, (64 + 32) * 4]  # of adapters of rank 4
    assert adapters == 2 * 4 * (sum(sizes) + 330)
    before, after = (
        np.asarray(page[name]["blocks_0"]["dense"]["kernel"], np.float64)
        for name in ("pretrained", "model_to_keep")
    )
    assert 0 < np.linalg.matrix_rank(after - before, tol=1e-6) <= 4
    for name in ("whole", "model_to_keep"):
        assert models.count_params(page[name]) == models.count_params(page["pretrained"])


@pytest.mark.example
def test_a_model_for_each_client(capsys):
    page = execute("guides/a_model_for_each_client.md")
    accuracy = float(capsys.readouterr().out)
    scores = np.asarray(page["score_clients"](page["result"].state))
    assert accuracy == pytest.approx(np.nanmean(scores))
    assert page["scaffold"].uplink(page["params"]) == 2 * 4 * 64 * 32 + 2 * 4 * 32
    assert jax.tree.structure(page["first"]) == jax.tree.structure(page["params"])


@pytest.mark.example
@pytest.mark.parametrize("name", ["from_fedjax", "from_flower"])
def test_moving(name):
    page = execute(f"moving/{name}.md")
    assert np.isfinite(page["result"].history[-1]["loss"])
    if name == "from_flower":
        sent, weights = np.random.default_rng(0).normal(size=(7, 3, 2)), np.arange(7) / 21
        found = page["trimmed"]({"delta": jnp.asarray(sent)}, jnp.asarray(weights))["delta"]
        for place in np.ndindex(3, 2):  # client 0 has no weight, and does not count
            values = sorted(zip(sent[1:, *place], weights[1:], strict=True))[2:-2]
            expected = sum(v * w for v, w in values) / sum(w for _, w in values)
            np.testing.assert_allclose(found[place], expected, rtol=1e-5)


@pytest.mark.example
def test_a_loop_of_ones_own():
    """Its rounds are those of simulate, one by one and as one program."""
    page = execute("guides/own_loop.md")
    result = page["simulate"](
        page["algorithm"], page["params"], page["clients"], rounds=20, **page["schedule"]
    )
    own = page["algorithm"].params(page["state"])
    for a, b in zip(*map(jax.tree.leaves, (own, result.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.example
def test_learning_rates(capsys):
    page = execute("guides/learning_rates.md")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": loss ")[0] for line in lines] == list(page["schedules"])
    rates = {name: float(rate(12)) for name, rate in page["schedules"].items()}
    assert rates["halved every 5 rounds"] == pytest.approx(0.1 / 4)
    assert rates["a tenth from round 10, a hundredth from 15"] == pytest.approx(0.01)


@pytest.mark.example
def test_loggers(tmp_path):
    page = execute("guides/loggers.md")
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(lines) == 1 + len(page["losses"])


@pytest.mark.example
def test_clients_that_differ(capsys):
    with jax.numpy_rank_promotion("allow"):  # as users have it
        page = execute("guides/clients_that_differ.md")
    _, weighted, loss = map(float, capsys.readouterr().out.split())
    assert page["margin"].shape == (20, 10)
    assert np.isfinite([weighted, loss]).all()


@pytest.mark.example
def test_updates(capsys):
    page = execute("guides/look_at_updates.md")
    cosine, norm, diversity = map(float, capsys.readouterr().out.splitlines()[0].split())
    assert -1 <= cosine <= 1 < 5 * diversity + 1e-3
    assert norm > 0
    assert len(page["lines"]) == 2 * 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_understood(page):
    for call in commands(page):
        command = cli.parse(call)
        if call[0] == "run":
            command.settings.resolve()
        if call[0] == "sweep":
            sweep_points(command.point, command.settings)


def test_every_block_of_python_is_reached():
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES if blocks(page, "python")}
    source = Path(__file__).read_text(encoding="utf-8")
    named = set(re.findall(r"\w+/\w+\.md|tutorial\.md", source))
    assert pages <= named | {"moving/from_fedjax.md", "moving/from_flower.md"}


@pytest.mark.example
def test_train_clients_otherwise(capsys):
    page = execute("guides/train_clients_otherwise.md")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": loss ")[0] for line in lines[:4]] == list(page["methods"])
    losses = page["swept"].history["loss"][:, 0, -1]
    assert len(set(losses.tolist())) > 1  # the norms make a difference
    assert np.isfinite(losses).all()
    assert page["own_state"].state.clients.count.sum() == 2 * 5 * 5  # Adam's steps of both rounds


def test_on_a_cluster():
    page = DOCS / "guides" / "on_a_cluster.md"
    execute("guides/on_a_cluster.md")
    (slurm,) = commands(page)
    assert cli.parse(slurm).distributed
    for manifest in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        list(yaml.safe_load_all(manifest))


@pytest.mark.example
def test_how_do_i():
    answers = blocks(DOCS / "guides" / "how_do_i.md", "python")[1:]
    assert len(answers) >= 8
    assert max(answer.count("\n") for answer in answers) <= 10
    page = execute("guides/how_do_i.md")
    targets, x = page["y"] / 80, page["x"]
    foretold = np.asarray(page["line"].apply(page["fitted"].params, x))[:, 0]
    error = page["fitted"].history[-1]["mean_squared_error"]
    assert error == pytest.approx(np.square(foretold - targets).mean(), rel=1e-4)
    logits = page["model"].apply(page["by_f1"].params, page["prepare"](page["test"], None).x)
    real, chosen = page["test"].y, np.asarray(logits).argmax(-1)
    f1 = [
        2 * np.sum((real == c) & (chosen == c)) / max(1, np.sum(real == c) + np.sum(chosen == c))
        for c in range(10)
    ]
    assert page["by_f1"].history[-1]["f1"] == pytest.approx(np.mean(f1), rel=1e-5)
    some = page["data"].Examples(page["train"].x[:32], page["train"].y[:32])
    logits = np.asarray(page["model"].apply(page["params"], some.x / 16.0), np.float64)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    targets = np.full((32, 10), 0.01) + 0.9 * np.eye(10)[some.y]
    counts = np.bincount(page["train"].y)
    losses = page["weighted"](page["params"], jax.tree.map(jnp.asarray, some), None)
    expected = (counts.sum() / 10 / counts)[some.y] * -(targets * logs).sum(1)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    scores = page["settings"]["evaluate"](page["best"].params)
    assert page["best"].accuracy == pytest.approx(float(scores["accuracy"]))
    histogram = page["clients"].label_histogram()
    np.testing.assert_array_equal(page["confusion"].sum(1), histogram[3])
    (line,) = page["figure"].axes[0].get_lines()
    assert list(line.get_xdata()) == [2, 4]  # the last round of each run
    # 650 parameters of 4 bytes: c and x on the server, c_i of each client.
    assert page["tree"].nbytes(page["rows"]) == 10_000 * 650 * 4


@pytest.mark.example
def test_robustness():
    page = execute("guides/robustness.md")
    assert list(page["losses"]) == ["mean", "trimmed mean"]
    assert all(np.isfinite(loss) for loss in page["losses"].values())
    assert page["attacked"].name == "fedavg+trimmed_mean+sign_flip"
    for leaf, flipped in zip(
        *map(jax.tree.leaves, (page["own"].params, page["result"].params)), strict=True
    ):
        np.testing.assert_array_equal(leaf, flipped)  # the last run has the flips of the library


@pytest.mark.example
def test_time(capsys):
    page = execute("guides/time.md")
    seconds, there, dropped, waited, stale, own = map(float, capsys.readouterr().out.split())
    assert 0 < seconds <= 2 * 10.0  # two rounds of at most the deadline
    assert 5 < there < 45
    assert dropped >= 2  # seven are drawn for five
    assert waited == 0  # the first three rounds only start clients
    assert np.isnan(stale)
    assert page["fedbuff"].wrappers == ("buffered",)
    assert own == pytest.approx(seconds, rel=1e-6)  # a loop of one's own has the same clock


@pytest.mark.example
def test_privacy():
    page = execute("guides/privacy.md")
    rows = {name: result.history[-1] for name, result in page["results"].items()}
    assert list(rows) == ["fedavg", "fedavg+dp", "fedavg+dp+secure"]
    assert rows["fedavg+dp+secure"]["loss"] == pytest.approx(rows["fedavg+dp"]["loss"], rel=1e-4)
    assert rows["fedavg+dp"]["loss"] != rows["fedavg"]["loss"]


@pytest.mark.example
def test_results_out(tmp_path):
    page = execute("guides/get_results_out.md")
    assert page["logits"].shape == (len(page["test"].y), 10)
    assert page["run"].round == 2
    assert (tmp_path / "runs" / "first" / "checkpoints" / "2").is_dir()
    assert (tmp_path / "loss.pdf").read_bytes().startswith(b"%PDF")
    heads = [np.load(f"client_{i}.npz")["classifier/bias"] for i in range(20)]
    mean = load_run("runs/fedrep").params["classifier"]["bias"]
    np.testing.assert_allclose(np.mean(heads, axis=0), mean, rtol=1e-5, atol=1e-7)
    assert np.ptp(heads, axis=0).max() > 1e-3


@pytest.mark.example
def test_tuning():
    page = execute("guides/tune.md", as_printed=True)
    found = page["found"]
    assert set(found.best) == {"fedavg", "fedprox"}
    assert found.gradients["fedavg"] == pytest.approx(found.gradients["fedprox"], rel=0.05)
    assert 0 < page["by_accuracy"].scores["fedavg"][0] <= 1


def perplexities(model, params, clients):
    """Those of the scored tokens of each client, in NumPy."""
    for start, size in zip(clients.starts, clients.sizes, strict=True):
        rows = clients.indices[start : start + size]
        x, y = jax.tree.map(operator.itemgetter(rows), tuple(clients.examples))
        chances = np.asarray(jax.nn.softmax(model.apply(params, x)), float)
        right = np.take_along_axis(chances, np.maximum(y, 0)[..., None], 2)[..., 0]
        yield np.exp(-np.log(right[np.asarray(y) >= 0]).mean())


@pytest.mark.example
def test_fine_tuning_a_decoder(tmp_path):
    pytest.importorskip("tokenizers")
    namespace = execute("guides/fine_tune_a_decoder.md")
    assert namespace["clients"].names == ("ann", "bob", "eve")
    model, merged = namespace["model"], namespace["merged"]
    for client, perplexity in enumerate(perplexities(model, merged, namespace["clients"])):
        nats, tokens = (values[client] for values in namespace["of_clients"])
        np.testing.assert_allclose(np.exp(nats / tokens), perplexity, rtol=0.02)  # of bfloat16
    assert namespace["ffa"].uplink(namespace["up"]) < 0.6 * namespace["algorithm"].uplink(
        namespace["adapters"]
    )
    before = float(namespace["evaluate"](namespace["adapters"])["test_loss"])
    assert float(namespace["row"]["test_loss"]) < before
    jax.tree.map(np.testing.assert_array_equal, namespace["again"], namespace["result"].params)
    assert namespace["scale"] == 2.0
    assert {"small", "merged", "adapters"} <= {path.name for path in tmp_path.iterdir()}
