"""The tuner against exhaustive runs: equal budgets, going on, no test data."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_lab import algorithms, data, models, simulate, tune, with_dp
from fedjax_lab.data import ClientTimes
from fedjax_lab.machine.keys import seeded
from fedjax_lab.models.nnx import from_nnx
from fedjax_lab.storage.lock import one_writer
from fedjax_lab.tuning import search_log
from fedjax_lab.tuning.score import evaluation_key
from fedjax_lab.tuning.space import Range, Values, read_space, spread
from fedjax_lab.tuning.tune import _counts, divided

N, D = 8, 4
SETTINGS = {"rounds": 18, "cohort_size": 3, "local_steps": 2, "batch_size": 4}
RNG = np.random.default_rng(0)
W = RNG.normal(size=D).astype(np.float32)


def loss_fn(params, examples, key):
    x, y = examples
    return (x @ params["w"] - y) ** 2


def make_clients(seed=1):
    rng = np.random.default_rng(seed)

    def one(shift):
        x = rng.normal(size=(12, D)).astype(np.float32)
        return x, (x @ (W + shift) + 0.1 * rng.normal(size=12)).astype(np.float32)

    return data.from_clients({str(i): one(np.float32(0.1 * i)) for i in range(N)})


PARAMS = {"w": jnp.zeros(D)}
FEDAVG = functools.partial(algorithms.fedavg, loss_fn)
SAM = functools.partial(algorithms.fedsam, loss_fn, perturbation_radius=0.01)


def validation_loss(params, held):
    x, y = (np.asarray(leaf)[np.asarray(held.indices)] for leaf in held.examples)
    return float(np.mean((x @ np.asarray(params["w"]) - y) ** 2))


def held_examples(held):
    return jax.tree.map(lambda leaf: leaf[held.indices], held.examples)


def search(methods, space, **more):
    return tune(methods, space, PARAMS, make_clients(), **{**SETTINGS, "budget": 6, **more})


@pytest.fixture(scope="module")
def found():
    return search({"fedavg": FEDAVG}, {"client_lr": (1e-3, 0.3)}, budget=9)


@pytest.mark.methods
def test_finalists_are_whole_runs_on_the_training_part(found):
    train, held = data.split_examples(make_clients(), 0.2, 0)
    finals = [trial for trial in found.trials if trial.rounds == SETTINGS["rounds"]]
    assert {trial.seed for trial in finals} == {0, 1}
    best = [trial for trial in finals if trial.point == found.best["fedavg"]]
    for trial in best:  # those of seed 0 went on twice from where they stood
        run = simulate(
            FEDAVG(**trial.point), PARAMS, train, seed=trial.seed, client_map="scan", **SETTINGS
        )
        assert trial.score == pytest.approx(validation_loss(run.params, held), rel=1e-4)


SLOW = ClientTimes(np.where(np.arange(N) < 5, 9.0, 1.0), deadline=5.0)  # five are always late


@pytest.mark.methods
def test_candidates_and_finalists_run_in_simulated_time():
    """Trials at each rung against a run with the same times."""
    train, held = data.split_examples(make_clients(), 0.2, 0)
    more = {"budget": 1, "finalists": 1, "seeds": (0,), "rounds": 9}
    found = search({"fedavg": FEDAVG}, {"client_lr": [0.1]}, times=SLOW, **more)
    assert [trial.rounds for trial in found.trials] == [1, 3, 9]
    run = simulate(
        FEDAVG(client_lr=0.1),
        PARAMS,
        train,
        **{**SETTINGS, "rounds": 9},
        times=SLOW,
        client_map="scan",
        eval_every=1,
        evaluate=lambda params: {"held": loss_fn(params, held_examples(held), None).mean()},
    )
    scores = [run.history[trial.rounds - 1]["held"] for trial in found.trials]
    np.testing.assert_allclose([trial.score for trial in found.trials], scores, rtol=1e-4)
    assert sum(row["dropped_clients"] for row in run.history) > 9


def test_times_of_held_out_clients_are_held_out():
    clients, seconds = make_clients(), np.arange(1.0, N + 1)
    there = np.tile(seconds / 10, (3, 1))
    times = ClientTimes(seconds, latency=0.5, availability=there, deadline=9.0)
    train, held, numbers = divided(clients, 0.25, "clients", 3)
    taken = times.take(numbers, N)
    seen = [int(name) for name in train.names]
    assert sorted(seen + [int(name) for name in held.names]) == list(range(N))
    np.testing.assert_array_equal(taken.step_seconds, seconds[seen])
    np.testing.assert_array_equal(taken.availability, np.float32(there[:, seen]))
    assert (taken.latency, taken.deadline) == (0.5, 9.0)
    with pytest.raises(ValueError, match="step_seconds has 3 clients; N is 8"):
        search({"fedavg": FEDAVG}, {"client_lr": [0.1]}, times=ClientTimes(np.ones(3)))
    with pytest.raises(TypeError, match=r"times is dict; it must be a data\.ClientTimes"):
        search({"fedavg": FEDAVG}, {"client_lr": [0.1]}, times={})


class StepsOfClients(data.Devices):
    """Devices of one's own, with a number of local steps for each client."""

    def local_steps(self, key, round, client_ids, planned):
        return jnp.asarray(STEPS)[client_ids]


STEPS = np.array([1, 4, 1, 4, 2, 2, 3, 1])
SLOW_DEVICES = data.Devices(step_time_spread=2.0, time_budget=4.0)
SPEEDS = SLOW_DEVICES.step_seconds(seeded(0), jnp.arange(N))  # those of seed 0
IN_TIME = np.minimum(4 // np.asarray(SPEEDS), 4).astype(int)


@pytest.mark.methods
@pytest.mark.parametrize(
    ("devices", "steps"), [(StepsOfClients(), STEPS), (SLOW_DEVICES, IN_TIME)], ids=["own", "slow"]
)
def test_devices_know_clients_by_their_own_numbers(devices, steps):
    """The same search with an array of local steps, of which each client keeps its entry."""
    more = {"budget": 1, "finalists": 1, "seeds": (0,), "hold_out": "clients", "rounds": 2}
    points = {"fedavg": FEDAVG}, {"client_lr": [0.1]}
    assert len(set(steps)) > 2
    found = search(*points, **more, local_steps=4, devices=devices)
    by_array = search(*points, **more, local_steps=steps)
    assert [x.score for x in found.trials] == pytest.approx([x.score for x in by_array.trials])


@pytest.mark.methods
def test_params_that_would_not_train_are_warned_of(tmp_path):
    params = PARAMS | {"batch_stats": {"mean": jnp.zeros(D)}}
    told = pytest.warns(UserWarning, match=r"\(batch_stats/mean\).*would not follow")
    settings = {**SETTINGS, "budget": 6, "run_dir": tmp_path}
    with one_writer(tmp_path), told, pytest.raises(BlockingIOError):
        tune({"fedavg": FEDAVG}, {"client_lr": [0.1, 0.2]}, params, make_clients(), **settings)


@pytest.mark.methods
def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="2 processes; tune runs in one"):
        search({"fedavg": FEDAVG}, {"client_lr": (0.01, 0.1)})


def test_it_finds_what_an_exhaustive_search_finds(found):
    train, held = data.split_examples(make_clients(), 0.2, 0)

    def score(client_lr):
        run = simulate(FEDAVG(client_lr=client_lr), PARAMS, train, client_map="scan", **SETTINGS)
        return validation_loss(run.params, held)

    tried = sorted({trial.point["client_lr"] for trial in found.trials})
    best = min(score(rate) for rate in (tried[-1], tried[-2], *found.best["fedavg"].values()))
    assert score(found.best["fedavg"]["client_lr"]) <= best * 1.05 + 0.01
    assert found.gradients["fedavg"] < 0.7 * 9 * SETTINGS["rounds"]


@pytest.mark.methods
def test_methods_spend_equal_gradients():
    found = search({"fedavg": FEDAVG, "fedsam": SAM}, {"client_lr": (1e-3, 0.3)}, rounds=9)
    spent = found.gradients
    assert spent["fedavg"] == pytest.approx(spent["fedsam"], rel=0.1)


@pytest.mark.methods
def test_a_best_value_at_an_end_is_followed_beyond_it():
    found = search({"fedavg": FEDAVG}, {"client_lr": (1e-4, 3e-3)}, budget=8)
    rates = [trial.point["client_lr"] for trial in found.trials]
    assert max(rates) > 1.4 * 3e-3
    assert found.edges == {"fedavg": ["client_lr"]}
    fixed = search({"fedavg": FEDAVG}, {"client_lr": [1e-4, 3e-3]})
    assert {trial.point["client_lr"] for trial in fixed.trials} == {1e-4, 3e-3}
    assert fixed.edges == {"fedavg": ["client_lr"]}


@pytest.mark.methods
def test_a_start_point_is_found_outside_the_space():
    begun = {"fedavg": [{"client_lr": 0.1}]}
    found = search({"fedavg": FEDAVG}, {"client_lr": (1e-5, 1e-4)}, start_points=begun)
    assert found.best == {"fedavg": {"client_lr": 0.1}}
    whole = search({"fedavg": FEDAVG}, {"client_lr": [0.1]}, budget=1, finalists=1)
    np.testing.assert_allclose(found.scores["fedavg"], whole.scores["fedavg"], rtol=1e-6)


def test_what_diverges_has_no_score_and_goes_no_further():
    found = search({"fedavg": FEDAVG}, {"client_lr": [0.01, 1e12]})
    assert [t.rounds for t in found.trials if t.point["client_lr"] == 1e12] == [2]
    assert found.best["fedavg"] == {"client_lr": 0.01}
    assert found.diverged["fedavg"] == 0.5
    with pytest.raises(RuntimeError, match="all points of 'fedavg' diverged within 2 rounds"):
        search({"fedavg": FEDAVG}, {"client_lr": [1e12, 1e13]})


@pytest.mark.methods
def test_a_score_is_the_mean_of_the_last_evaluations():
    train, held = data.split_examples(make_clients(), 0.2, 0)
    found = search(
        {"fedavg": FEDAVG},
        {"client_lr": [0.05]},
        **{"budget": 1, "finalists": 1, "seeds": (0,), "rounds": 9, "average": 3},
    )

    def evaluate(params):
        return {"score": jnp.mean(loss_fn(params, held.examples, None)[held.indices])}

    run = simulate(
        FEDAVG(client_lr=0.05),
        PARAMS,
        train,
        evaluate=evaluate,
        eval_every=1,
        client_map="scan",
        **{**SETTINGS, "rounds": 9},
    )
    scores = [row["score"] for row in run.history]
    rungs = [scores[0], np.mean(scores[:3]), np.mean(scores[6:])]
    np.testing.assert_allclose([t.score for t in found.trials], rungs, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:in round 0 of a run the loss is nan")
def test_a_point_ends_by_its_gradients_and_not_by_its_training_loss_whatever_its_score():
    def build(spoilt):
        def loss(params, examples, key):
            value = jax.lax.stop_gradient(jnp.where(spoilt == 1, jnp.nan, 0.0))
            slope = jnp.where(spoilt == 2, jnp.nan, 1.0)
            return slope * loss_fn(params, examples, key) + value

        return algorithms.fedavg(loss, client_lr=0.05)

    score = lambda params, examples: jnp.ones(examples[1].shape)  # noqa: E731
    more = {"budget": 3, "finalists": 1, "rounds": 2, "seeds": (0,), "score": score}
    found = search({"mine": build}, {"spoilt": [0.0, 1.0, 2.0]}, **more)
    finite = {trial.point["spoilt"]: np.isfinite(trial.score) for trial in found.trials}
    assert finite == {0.0: True, 1.0: True, 2.0: False}


@pytest.mark.methods
def test_an_interrupted_search_goes_on(tmp_path, monkeypatch, found):
    again = functools.partial(
        search, {"fedavg": FEDAVG}, {"client_lr": (1e-3, 0.3)}, budget=9, run_dir=tmp_path
    )
    save, saved = search_log.SearchLog.save, []

    def save_once(self, *arguments):
        save(self, *arguments)
        saved.append(None)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(search_log.SearchLog, "save", save_once)
    with pytest.raises(KeyboardInterrupt):
        again()
    monkeypatch.undo()
    assert again().trials == found.trials
    assert again().table() == found.table()
    with pytest.raises(FileExistsError, match="holds another search"):
        again(seeds=(0, 2))


@pytest.mark.methods
def test_a_sampler_belongs_to_the_search(tmp_path):
    pytest.importorskip("optuna")
    space, more = {"client_lr": (1e-3, 0.3)}, {"budget": 4, "rounds": 4, "run_dir": tmp_path}
    first = search({"fedavg": FEDAVG}, space, sampler="tpe", **more)
    assert len({trial.point["client_lr"] for trial in first.trials}) == 4
    assert search({"fedavg": FEDAVG}, space, sampler="tpe", **more).trials == first.trials
    with pytest.raises(FileExistsError, match="holds another search"):
        search({"fedavg": FEDAVG}, space, sampler="random", **more)


@pytest.mark.methods
def test_held_out_examples_do_not_train():
    clients = make_clients()
    _, held = data.split_examples(clients, 0.2, 0)
    x, y = (np.array(leaf) for leaf in clients.examples)
    y[np.asarray(held.indices)] += 1000
    other = dataclasses.replace(clients, examples=(jnp.asarray(x), jnp.asarray(y)))
    score = lambda params, examples: jnp.broadcast_to(params["w"].sum(), examples[1].shape)  # noqa: E731
    arguments = {**SETTINGS, "budget": 2, "rounds": 2, "seeds": (0,), "score": score}
    both = [
        tune({"fedavg": FEDAVG}, {"client_lr": [0.01, 0.1]}, PARAMS, c, **arguments)
        for c in (clients, other)
    ]
    assert both[0].trials == both[1].trials


@pytest.mark.methods
def test_the_command_reads_nothing_of_the_test_set(monkeypatch):
    """Other test examples change no trial."""
    from fedjax_lab.command import setup, tuning
    from fedjax_lab.command.commands import TuneCommand
    from fedjax_lab.command.config import RunConfig

    settings = RunConfig.of(
        model="linear", num_clients=4, cohort_size=2, local_steps=1, batch_size=4, rounds=2
    )
    command = TuneCommand(settings, budget=2, seeds=(0,), quiet=True)
    given = setup.load_divided(settings.data, settings.partition_seed)
    trials = []
    for factor in (1, 0):
        other = data.Examples(given.test.x * factor, given.test.y * factor)
        changed = given._replace(test=other)
        monkeypatch.setattr(setup, "load_divided", lambda *_, changed=changed: changed)
        trials.append(tuning.run_search(command, {"fedavg": {"client_lr": [0.01, 0.1]}}).trials)
    assert trials[0] == trials[1]


def test_trials_are_listed_and_drawn(tmp_path):
    from fedjax_lab.report.search_figure import search_figure
    from fedjax_lab.tuning.search_result import SearchResult, Trial

    nan = float("nan")
    trials = [
        Trial("a", {"client_lr": 0.1}, 0, 1, 0.5),
        Trial("a", {"client_lr": 9.0}, 0, 1, nan),
        Trial("a", {"client_lr": 0.1}, 0, 9, 0.25),
    ]
    found = SearchResult(trials, 9, "min", {"a": {"client_lr": Range(0.1, 9.0)}})
    assert found.csv().splitlines()[1:] == ["a,0.1,0,1,0.5", "a,9.0,0,1,", "a,0.1,0,9,0.25"]
    lines = found.markdown().splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["a", "9", "0", "1", ""]
    [axes] = search_figure(found).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn["9 rounds"] == [[0.1, 0.25]]
    assert [9.0, 0.02] in [point for line in axes.lines for point in line.get_xydata().tolist()]


def test_a_hyperparameter_with_dollars_is_no_formula():
    from fedjax_lab.report.search_figure import search_figure
    from fedjax_lab.tuning.search_result import SearchResult, Trial

    name = r"$\frac$"
    found = SearchResult(
        [Trial("a", {name: 0.1}, 0, 9, 0.5)], 9, "min", {"a": {name: Range(0.1, 9)}}
    )
    figure = search_figure(found)
    figure.canvas.draw()
    assert figure.axes[0].get_xlabel() == r"\$\frac\$"


def test_a_space_is_filled_evenly():
    points = spread({"a": Range(1e-3, 1e1), "b": Values((1.0, 2.0, 3.0))}, 24, seed=0)
    logs = np.log10([point["a"] for point in points])
    assert np.histogram(logs, bins=4, range=(-3, 1))[0].min() >= 4
    counts = [sum(point["b"] == value for point in points) for value in (1.0, 2.0, 3.0)]
    assert min(counts) >= 6
    assert spread({"a": Range(1.0, 100.0)}, 3, 0) == [{"a": 1.0}, {"a": 10.0}, {"a": 100.0}]
    assert spread({"a": Values((1.0, 2.0))}, 9, 0) == [{"a": 1.0}, {"a": 2.0}]


def star_discrepancy(values):
    """Of numbers in [0, 1], by its definition: the largest error of a share below a bound."""
    values, count = np.sort(values), len(values)
    return max(
        np.max(np.arange(1, count + 1) / count - values), np.max(values - np.arange(count) / count)
    )


@pytest.mark.parametrize("dimensions", range(1, 7))
def test_every_hyperparameter_is_spaced_evenly_for_any_number_of_points(dimensions):
    from scipy.stats import qmc

    rng = np.random.default_rng(0)
    space = {f"h{i}": Range(1.0, np.e) for i in range(dimensions)}
    for count in (5, 6, 18, 23, 36):
        joint = {"ours": [], "random": []}
        for seed in range(8):
            points = spread(space, count, seed)
            assert points == spread(space, count, seed)
            shares = np.log([list(point.values()) for point in points])
            for axis in shares.T:
                gaps = np.diff([0, *np.sort(axis), 1])
                assert (
                    gaps.max() < 1 / (count - 1) + 1e-6
                )  # evenly spaced ones have 1 / (count - 1)
                assert star_discrepancy(axis) < 1 / count + 1e-6  # with both ends; without half
            joint["ours"].append(qmc.discrepancy(np.clip(shares, 0, 1)))
            joint["random"].append(qmc.discrepancy(rng.random((count, dimensions))))
        assert np.mean(joint["ours"]) < 0.75 * np.mean(joint["random"])
    assert dimensions == 1 or spread(space, 6, 0) != spread(space, 6, 1)


def test_further_points_lie_between_the_first_ones():
    space = {"a": Range(1.0, np.e), "b": Range(1.0, np.e)}
    first = spread(space, 18, 0)
    more = spread(space, 6, 0, first)
    assert len({tuple(point.values()) for point in (*first, *more)}) == 24
    for name in space:
        positions = np.log([point[name] for point in more])
        assert star_discrepancy(positions) < 0.2  # of random ones 0.336 on average, as simulated


def test_lists_are_tried_in_equal_numbers_and_each_combination_once():
    lists = {"a": Values((1.0, 2.0)), "b": Range(1.0, 9.0), "c": Values((1.0, 2.0, 3.0))}
    points = spread(lists, 12, 0)
    for name, count in (("a", 6), ("c", 4)):
        tried = [point[name] for point in points]
        assert {tried.count(value) for value in lists[name]} == {count}
    lists = {"a": Values((1.0, 2.0, 3.0)), "b": Values((1.0, 2.0, 3.0, 4.0))}
    for count in (1, 7, 11, 12, 40):
        points = spread(lists, count, 0)
        assert len({tuple(point.values()) for point in points}) == len(points) == min(count, 12)
    twice = read_space({"a": [1.0, 1], "b": [2.0, 2.0]}, {"own": lambda a, b: None})["own"]
    assert spread(twice, 3, 0) == [{"a": 1.0, "b": 2.0}]  # there is no second one to wait for
    some = spread(lists, 7, 0)
    rest = spread(lists, 9, 0, some)
    assert len({tuple(point.values()) for point in (*some, *rest)}) == 12


# --- the score


def noisy(params, x, key=None):
    """A linear model with noise in training."""
    predictions = x @ params["w"]
    return predictions if key is None else predictions + jax.random.normal(key, predictions.shape)


def shifted(examples, key):
    """An augmentation."""
    return examples if key is None else examples._replace(x=examples.x + jax.random.normal(key))


def own(params, examples, key):
    """A loss function that needs a key, for its noise."""
    noise = jax.random.normal(jax.random.fold_in(key, 0), examples.y.shape)
    return (examples.x @ params["w"] - examples.y + noise) ** 2


def masked(params, examples, key, mask):
    """One that passes its key on, has metrics, and gets the mask."""
    losses = models.regression_loss(noisy, shifted)(params, examples, key)
    return jnp.where(mask, losses, jnp.nan), {"error": losses}


def test_a_score_is_the_loss_of_evaluation():
    """Against NumPy: without dropout and augmentation, and of real examples alone."""
    clients = make_clients()
    clients = dataclasses.replace(clients, examples=data.Examples(*clients.examples))
    found = tune(
        {"fedavg": functools.partial(algorithms.fedavg, masked)},
        {"client_lr": [1e-30]},  # so that the params stay as they are
        {"w": jnp.asarray(W)},
        clients,
        **{**SETTINGS, "rounds": 2, "budget": 1, "finalists": 1, "seeds": (0,)},
    )
    _, held = data.split_examples(clients, 0.2, 0)
    assert found.scores["fedavg"] == pytest.approx([validation_loss({"w": W}, held)], rel=1e-5)


class Dropped(nnx.Module):
    """A linear model with dropout, whose initializers draw numbers whenever it is built."""

    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(D, 1, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.drop(x))[:, 0]


def test_a_model_of_nnx_is_scored_as_in_evaluation():
    """Against NumPy, without dropout and without a warning."""
    model = from_nnx(lambda rngs: Dropped(rngs))
    params = model.init(jax.random.key(0), jnp.zeros((1, D)))
    clients = make_clients()
    clients = dataclasses.replace(clients, examples=data.Examples(*clients.examples))
    _, held = data.split_examples(clients, 0.2, 0)
    loss = models.regression_loss(model.apply, shifted)
    examples = held_examples(held)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = {"fedavg": fedavg_of(loss)}
        counts = _counts(first, None, params, examples)["fedavg"]
    scores, _ = jax.jit(counts)(params, examples, jnp.ones(len(examples.y), bool))
    w = np.asarray(params["linear"]["kernel"][...])[:, 0]
    assert scores.mean() == pytest.approx(validation_loss({"w": w}, held), rel=1e-5)


def test_the_key_with_which_a_loss_is_evaluated():
    examples = data.Examples(np.ones((3, D), np.float32), np.ones(3, np.float32))

    def of(loss):
        key, is_evaluation = evaluation_key(fedavg_of(loss), PARAMS, examples)
        return ("None" if key is None else "fixed"), is_evaluation

    def always_draws(params, examples, key):
        return own(params, examples, jax.random.key(0) if key is None else key)

    def splits_only(params, examples, key):
        jax.random.split(key)
        return (examples.x @ params["w"] - examples.y) ** 2

    def ignores(params, examples, key):
        return (examples.x @ params["w"] - examples.y) ** 2

    def with_statistics(params, examples, key):  # as batch normalisation has them in training
        x = examples.x if key is None else examples.x - examples.x.mean(0)
        return (x @ params["w"] - examples.y) ** 2

    assert of(models.regression_loss(noisy, shifted)) == ("None", True)
    assert of(ignores) == of(with_statistics) == of(masked) == ("None", True)
    assert of(splits_only) == ("fixed", True)
    assert of(own) == of(always_draws) == ("fixed", False)
    logits = lambda params, x, key=None: jnp.stack([noisy(params, x, key)] * 2, -1)  # noqa: E731
    classes = examples._replace(y=np.ones(3, np.int32))
    for loss in (models.classification_loss(logits, shifted), models.classification_loss(logits)):
        assert evaluation_key(fedavg_of(loss), PARAMS, classes) == (None, True)
    words = data.Examples(np.ones((3, 2, D), np.float32), np.ones((3, 2), np.int32))
    for loss in (models.language_model_loss(logits), models.answer_loss(logits)):
        assert evaluation_key(fedavg_of(loss), PARAMS, words) == (None, True)


def fedavg_of(loss):
    return algorithms.fedavg(loss, client_lr=0.1)


def test_a_search_has_one_writer(tmp_path):
    """Two would each store the trials of all methods as they know them."""
    (tmp_path / search_log.TRIALS).write_text('{"search": "another"}')  # which ends it soon
    arguments = {"fedavg": FEDAVG}, {"client_lr": [0.1]}
    with one_writer(tmp_path), pytest.raises(BlockingIOError, match="is writing"):
        search(*arguments, budget=2, run_dir=tmp_path)
    with pytest.raises(FileExistsError, match="another search"):
        search(*arguments, budget=2, run_dir=tmp_path)
    with one_writer(tmp_path):
        pass  # a search that ended with an error left it


def test_one_warning_of_losses_that_are_scored_as_in_training(tmp_path):
    (tmp_path / search_log.TRIALS).write_text('{"search": "another"}')  # which ends it soon
    clients = make_clients()
    clients = dataclasses.replace(clients, examples=data.Examples(*clients.examples))
    methods = {name: functools.partial(algorithms.fedavg, own) for name in ("mine", "yours")}
    arguments = (methods, {"client_lr": [0.1]}, PARAMS, clients)
    settings = {**SETTINGS, "budget": 2, "run_dir": tmp_path}
    with (
        pytest.warns(UserWarning, match="loss function of mine, yours draws") as caught,
        pytest.raises(FileExistsError, match="holds another search"),
    ):
        tune(*arguments, **settings)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.raises(FileExistsError):  # no warning, which would be an error
        tune(*arguments, **settings, score=lambda params, examples: examples.y)


@pytest.mark.parametrize(
    ("space", "error", "message"),
    [
        ({"client_lr": (0.0, 1.0)}, ValueError, r"space\['client_lr'\] is .*0 < low < high"),
        ({"client_lr": "log"}, TypeError, "it must be a pair"),
        ({"lr": (0.1, 1.0)}, ValueError, "space has 'lr', which none of fedavg takes"),
        ({"fedavg": {"server_rl": [1.0]}}, TypeError, "did you mean 'server_lr'"),
        ({"fedavg": [1.0]}, TypeError, "must be a dict of ranges"),
        ({"client_lr": ["a"]}, TypeError, "its values must be numbers"),
    ],
)
def test_a_space_that_means_nothing_is_refused(space, error, message):
    with pytest.raises(error, match=message):
        read_space(space, {"fedavg": FEDAVG})


def test_points_beyond_what_a_method_allows_are_not_tried():
    build = functools.partial(algorithms.fedcm, loss_fn, client_lr=0.01)
    found = search({"fedcm": build}, {"mixing": (0.3, 1.0)}, budget=8, rounds=4, seeds=[0])
    tried = {trial.point["mixing"] for trial in found.trials}
    assert max(tried) == 1.0 == found.best["fedcm"]["mixing"]
    assert min(tried) == 0.3
    assert found.edges == {"fedcm": ["mixing"]}


@pytest.mark.parametrize(
    ("space", "error", "message"),
    [
        ({"client_lr": [0.05, 0.1, -0.1]}, ValueError, "client_lr is -0.1"),
        ({"fedavg": {"server_lr": [0.1, 0.2], "client_lr": [-0.1, 0.1]}}, ValueError, "is -0.1"),
    ],
)
def test_all_limits_of_a_space_are_checked(space, error, message):
    with pytest.raises(error, match=message):
        search({"fedavg": FEDAVG}, space)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"params": None}, TypeError, "params is None"),
        ({"params": lambda key: PARAMS}, TypeError, "params is function, not an array"),
        ({"clients": PARAMS}, TypeError, "clients is dict, not FederatedArrays"),
        ({"methods": {}}, ValueError, "methods is empty"),
        ({"space": [("client_lr", (0.1, 0.2))]}, TypeError, "space is .* it must map a hyperp"),
        ({"score": "accuracy"}, TypeError, "score is 'accuracy'; it must be None"),
        (
            {"methods": {"mine": lambda client_lr: FEDAVG(client_lr=float(client_lr))}},
            TypeError,
            r"methods\['mine'\] needs to know a value",
        ),
        ({"start_points": [{"client_lr": 0.1}]}, TypeError, "it must map a method to a list of po"),
        ({"start_points": {"fedavg": {"client_lr": 0.1}}}, TypeError, "it must map a method to a "),
        ({"start_points": {"fedavg": [{"client_lr": "1"}]}}, TypeError, "it must map a method to"),
        ({"start_points": {"sam": [{"client_lr": 0.1}]}}, ValueError, "has 'sam'; there are fedav"),
        ({"start_points": {"fedavg": [{}]}}, ValueError, "a value for each of client_lr"),
        ({"start_points": {"fedavg": [{"client_lr": -1.0}]}}, ValueError, "client_lr is -1"),
        ({"start_points": {"fedavg": [{"client_lr": 1}] * 2}}, ValueError, "has a point twice"),
        (
            {"start_points": {"fedavg": [{"client_lr": 1}, {"client_lr": 2}]}},
            ValueError,
            "must be more finalists than start points: finalists is 2",
        ),
    ],
)
def test_wrong_arguments_are_named(changes, error, message):
    arguments = {
        **{"methods": {"fedavg": FEDAVG}, "space": {"client_lr": (0.1, 0.2)}},
        **{"params": PARAMS, "clients": make_clients()},
    } | SETTINGS
    with pytest.raises(error, match=message):
        tune(**{**arguments, **changes})


def test_a_method_with_a_model_for_each_client_is_scored_with_a_warning(tmp_path):
    (tmp_path / search_log.TRIALS).write_text('{"search": "another"}')  # which ends it soon
    ditto = functools.partial(algorithms.ditto, loss_fn)
    with (
        pytest.warns(UserWarning, match="'mine' has a model for each client; tune scores"),
        pytest.raises(FileExistsError, match="holds another search"),
    ):
        search({"mine": ditto}, {"client_lr": [0.1]}, budget=2, run_dir=tmp_path)


def test_a_method_without_a_loss_needs_a_score():
    build = lambda client_lr: dataclasses.replace(FEDAVG(client_lr=client_lr), loss_fn=None)  # noqa: E731
    with pytest.raises(ValueError, match="takes a model and no loss; set score"):
        search({"mine": build}, {"client_lr": [0.1]})
    assert jax.tree.leaves(PARAMS)[0].shape == (D,)


def same_cohort(*ids):
    return lambda key, round: jnp.array(ids)


def noised(loss):
    return lambda client_lr, **more: with_dp(algorithms.fedavg(loss, client_lr=client_lr), **more)


@pytest.mark.parametrize(
    ("more", "private", "message"),
    [
        ({"sample_cohort": same_cohort(1, 2, 2)}, {}, "ids .* must be distinct"),
        ({"sample_cohort": same_cohort(1, 2, N)}, {}, r"ids \[1, 2, 8\] in round 0"),
        (
            {"sample_cohort": same_cohort(1, 2, 3), "hold_out": "clients"},
            {},
            "hold_out is 'clients', which numbers the training clients anew",
        ),
        ({}, {"noise_bands": 3}, "noise_bands is 3"),
        ({"sample_cohort": same_cohort(1, 2, 3)}, {"delta": 1e-2}, "sample_cohort"),
    ],
)
def test_what_simulate_refuses_is_not_searched(more, private, message):
    build = FEDAVG
    if private:
        build = functools.partial(noised(loss_fn), clip_norm=1.0, noise_multiplier=1.0, **private)
    with pytest.raises(ValueError, match=message):
        search({"one": build}, {"client_lr": (1e-3, 0.3)}, **more)


def test_a_method_that_cannot_start_is_told_before_another_is_searched(tmp_path):
    private = functools.partial(with_dp, clip_norm=1.0, noise_multiplier=1.0)
    methods = {
        name: lambda client_lr, make=make: private(make(loss_fn, client_lr=client_lr))
        for name, make in (("one", algorithms.fedavg), ("two", algorithms.fednova))
    }
    with pytest.raises(ValueError, match="fednova, whose server uses the number of local steps"):
        search(methods, {"client_lr": (1e-3, 0.3)}, run_dir=tmp_path / "search")
    assert not (tmp_path / "search").exists()
