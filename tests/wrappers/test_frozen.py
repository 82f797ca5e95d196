"""Frozen weights: against NumPy, as arguments of programs, and in what a run keeps and counts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    algorithms,
    build_round,
    data,
    simulate,
    sweep,
    with_compression,
    with_frozen,
    with_personal,
)
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.evaluate import build_client_evaluation, build_evaluation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.wrappers import client_params
from tests.algorithms import compiled
from tests.algorithms import problem as softmax
from tests.algorithms.cases import MAIN, N
from tests.federations import of_sizes
from tests.reference import problem as reference

MIXING = np.eye(reference.FEATURES) + 0.3 * np.eye(reference.FEATURES, k=1)
SLOW = pytest.mark.slow


@jax.custom_jvp
def refuse_gradients(x):
    """The identity, of which nobody may take a derivative."""
    return x


@refuse_gradients.defjvp
def _refuse(primals, tangents):
    raise AssertionError("a gradient was taken with respect to frozen weights")


def mixed_loss(params, examples, key, frozen):
    x = examples["x"] @ refuse_gradients(frozen["mixing"])
    return softmax.loss_fn(params, {**examples, "x": x}, key)


def mixed_oracle(y, minibatch):
    return reference.gradient(y, (minibatch[0] @ MIXING, minibatch[1]))


def check_against_its_twin(case, client_map, rounds=6):
    """The method with frozen weights, and NumPy on examples multiplied by them."""
    case = dataclasses.replace(case, problem=case.problem._replace(oracle=mixed_oracle))
    algorithm = with_frozen(case.build, mixed_loss, {"mixing": MIXING})
    drawn = compiled.draw(case, rounds)
    state = algorithm.init(softmax.initial_params(), N)
    state, _ = softmax.run_rounds(build_round(algorithm, client_map), state, drawn)
    np.testing.assert_array_equal(state.frozen["mixing"], MIXING)
    twin = compiled.twin_after(case, drawn)
    assert np.abs(twin.x - softmax.flat(softmax.initial_params())).max() > 0.05
    np.testing.assert_allclose(softmax.flat(algorithm.params(state)), twin.x, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "client_map",
    [pytest.param(name, marks=() if name == "shard_map" else SLOW) for name in softmax.CLIENT_MAPS],
)
def test_every_client_map_gives_the_loss_its_weights(client_map, x64):
    check_against_its_twin(compiled.case_of("fedavg"), client_map)


MARKS = {"mime": (), "scaffold": pytest.mark.methods}  # two exchanges; a table


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=MARKS.get(case.id, SLOW))
        for case in MAIN
        if case.problem.loss is softmax.loss_fn
    ],
)
def test_every_method_of_a_loss_gives_it_its_weights(case, x64):
    check_against_its_twin(case, "scan")


# --- whole runs


WIDTH, CLASSES, INPUTS = 512, 3, 128  # 256 KiB of frozen weights, 6 KiB of trained ones


@functools.cache
def toy():
    """(clients, test examples, frozen weights, first params)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, INPUTS)).astype(np.float32)
    y = rng.integers(CLASSES, size=80).astype(np.int32)
    clients = of_sizes([20] * 4, x, y)
    frozen = {"body": jnp.asarray(rng.normal(size=(INPUTS, WIDTH)).astype(np.float32) / 10)}
    return clients, data.Examples(x, y), frozen, {"head": jnp.zeros((WIDTH, CLASSES))}


def scores_of(params, examples, frozen):
    return jnp.tanh(examples.x @ refuse_gradients(frozen["body"])) @ params["head"]


def loss_fn(params, examples, key, frozen):
    scores = jax.nn.log_softmax(scores_of(params, examples, frozen))
    return -jnp.take_along_axis(scores, examples.y[:, None], axis=1)[:, 0]


def counts(params, examples, frozen):
    assert isinstance(frozen["body"], (jax.core.Tracer, jax.ShapeDtypeStruct))  # no constant
    losses = loss_fn(params, examples, None, frozen)
    right = scores_of(params, examples, frozen).argmax(-1) == examples.y
    return right.astype(jnp.float32), losses


def fedavg(client_lr=0.1, frozen=None):
    build = functools.partial(algorithms.fedavg, client_lr=client_lr)
    return with_frozen(build, loss_fn, toy()[2] if frozen is None else frozen)


def run(algorithm=None, **changes):
    clients, _, _, params = toy()
    arguments = {
        "rounds": 4,
        "cohort_size": 2,
        "local_steps": 2,
        "batch_size": 4,
        "replace": True,  # soonest compiled
        "eval_every": 2,
        "client_map": "scan",
    } | changes
    return simulate(algorithm or fedavg(), params, clients, **arguments)


def size_on_disk(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.methods
def test_a_run_neither_copies_nor_counts_nor_keeps_them(tmp_path):
    _, test, frozen, params = toy()
    evaluate = build_evaluation(counts, test, frozen=frozen)

    def diagnose(state):
        return {"same": state.frozen["body"] is frozen["body"]}

    arguments = {"evaluate": evaluate, "run_dir": tmp_path, "diagnose": diagnose}
    run(**arguments, rounds=2)
    result = run(**arguments)  # goes on
    assert result.history[-1]["same"]
    assert result.state.frozen["body"] is frozen["body"]
    assert not frozen["body"].is_deleted()
    assert jax.tree.structure(result.params) == jax.tree.structure(params)
    trained = params["head"].nbytes
    row = result.history[-1]
    assert row["bytes_up"] == row["bytes_down"] == 4 * 2 * trained
    assert size_on_disk(tmp_path) < frozen["body"].nbytes / 2
    # The same run without the wrapper, the weights closed over.
    closed = algorithms.fedavg(
        lambda params, examples, key: loss_fn(params, examples, key, frozen), client_lr=0.1
    )
    expected = run(closed)
    np.testing.assert_allclose(result.params["head"], expected.params["head"], atol=1e-6)
    logits = np.tanh(test.x @ np.asarray(frozen["body"])) @ np.asarray(result.params["head"])
    assert row["accuracy"] == pytest.approx((logits.argmax(1) == test.y).mean())
    other = jax.tree.map(lambda leaf: leaf.at[0, 0].add(1), frozen)
    with pytest.raises(FileExistsError, match="another config: the frozen weights"):
        run(fedavg(frozen=other), **arguments)


@pytest.mark.slow
def test_a_run_goes_on_from_a_state_with_the_same_weights_only():
    clients, _, frozen, _ = toy()
    halfway = run(rounds=2).state
    arguments = {"cohort_size": 2, "local_steps": 2, "batch_size": 4, "replace": True}
    arguments |= {"rounds": 2, "client_map": "scan", "eval_every": 2}
    again = simulate(fedavg(), None, clients, state=halfway, **arguments)
    assert again.state.frozen["body"] is frozen["body"]
    for wrong in ({"body": frozen["body"] + 1}, ()):
        with pytest.raises(ValueError, match=r"state\.frozen does not hold the frozen weights of"):
            simulate(fedavg(), None, clients, state=halfway._replace(frozen=wrong), **arguments)


@SLOW
@pytest.mark.parametrize("client_map", ["scan", "auto"])
def test_first_estimates_see_them(client_map):
    """Of a method that begins with round 0's examples; also where devices share the cohort."""
    frozen = toy()[2]
    build = functools.partial(
        algorithms.fafed, client_lr=0.1, momentum=0.5, second_moment_decay=0.9
    )
    closed = build(lambda params, examples, key: loss_fn(params, examples, key, frozen))
    result = run(with_frozen(build, loss_fn, frozen), client_map=client_map)
    expected = run(closed).params["head"]
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(result.params["head"], expected, atol=1e-5)
    assert not frozen["body"].is_deleted()


def test_a_program_has_them_as_an_argument():
    clients, _, frozen, params = toy()
    schedule = Schedule(2, 4, 2, replace=True)
    rest = (clients, jax.random.key(0), jnp.zeros((), jnp.int32))

    def text_of(algorithm, frozen):
        state = algorithm.init(params, 4)._replace(frozen=())
        chunk = build_chunk(Computation(algorithm, schedule), Placement(parse_client_map("scan")))
        return len(chunk.lower(state, *rest, length=2, frozen=frozen).as_text())

    closed = algorithms.fedavg(
        lambda params, examples, key: loss_fn(params, examples, key, frozen), client_lr=0.1
    )
    size = frozen["body"].nbytes
    text = text_of(fedavg(), frozen)
    assert abs(text_of(closed, ()) - text - 2 * size) < size / 10  # in hexadecimal digits


@pytest.mark.slow
def test_a_round_hands_them_on_as_they_are():
    """Also where its caller, and not ``simulate``, calls it."""
    clients, _, frozen, params = toy()
    algorithm = fedavg()
    batch = data.draw_batch(
        clients, jax.random.key(0), 0, cohort_size=2, local_steps=2, batch_size=4, replace=True
    )
    state = algorithm.init(params, 4)
    traced = jax.make_jaxpr(algorithm.round_fn)(state, batch)
    given, returned = (
        [variable for variable in variables if variable.aval.shape == frozen["body"].shape]
        for variables in (traced.jaxpr.invars, traced.jaxpr.outvars)
    )
    assert given == returned
    assert len(given) == 1
    with pytest.raises(RuntimeError, match=r"the field ``frozen`` of the state is \(\)"):
        algorithm.round_fn(state._replace(frozen=()), batch)


@pytest.mark.slow
def test_the_runs_of_a_sweep_share_them():
    clients, test, frozen, params = toy()
    few = data.Examples(test.x[:4], test.y[:4])  # whose activations need little memory
    arguments = {"rounds": 4, "cohort_size": 2, "local_steps": 2, "batch_size": 4}
    arguments |= {"replace": True, "eval_every": 4, "client_map": "scan"}
    result = sweep(
        fedavg,
        params,
        clients,
        points={"client_lr": [0.1, 0.3, 1.0]},
        seeds=[0, 1],
        run_map="vmap",
        evaluate=build_evaluation(counts, few, frozen=frozen),
        max_bytes=5 * frozen["body"].nbytes,
        **arguments,
    )
    assert result.runs_at_once == 6  # six copies would not fit
    single = run(fedavg(0.3), seed=1)
    np.testing.assert_allclose(result.params["head"][1, 1], single.params["head"], atol=1e-5)

    def other_weights(client_lr):
        return fedavg(client_lr, {"body": frozen["body"] * client_lr})

    with pytest.raises(ValueError, match="build returned different frozen weights for two points"):
        sweep(other_weights, params, clients, points={"client_lr": [0.1, 0.3]}, **arguments)


def test_evaluation_on_each_client():
    clients, test, frozen, _ = toy()
    params = {"head": jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, CLASSES)))}
    accuracy = build_client_evaluation(counts, clients, batch_size=7, frozen=frozen)(params)
    logits = np.tanh(test.x @ np.asarray(frozen["body"])) @ np.asarray(params["head"])
    right = (logits.argmax(1) == test.y).reshape(4, 20).mean(1)
    np.testing.assert_allclose(accuracy, right, atol=1e-6)


# --- with other wrappers


def drawn_rounds(count=4):
    return reference.make_rounds(5, count, cohort_size=4, max_steps=3, batch_size=4)


@pytest.mark.parametrize("inside", [pytest.param(True, marks=SLOW), False])
@pytest.mark.slow
def test_personal_leaves_and_compression_go_inside_and_around(inside, x64):
    """The frozen weights look like the params here, and are neither compressed nor personal."""

    def loss(params, examples, key, frozen):
        together = jax.tree.map(jnp.add, params, frozen)
        return softmax.loss_fn(together, examples, key)

    params = softmax.initial_params()
    frozen = jax.tree.map(lambda leaf: 0.1 * jnp.cos(leaf), params)
    fedavg = functools.partial(algorithms.fedavg, client_lr=0.2)

    def wrap(algorithm):
        personal = with_personal(algorithm, lambda path: path == "b")
        return with_compression(personal, "top_k:0.5", downlink="top_k:0.5")

    def closed_over(params, examples, key):
        return loss(params, examples, key, frozen)

    if inside:
        algorithm = with_frozen(lambda loss_fn: wrap(fedavg(loss_fn)), loss, frozen)
    else:
        algorithm = wrap(with_frozen(fedavg, loss, frozen))
    plain = wrap(fedavg(closed_over))
    assert algorithm.uplink(params) == plain.uplink(params)
    assert algorithm.downlink(params) == plain.downlink(params)
    states = []
    for method in (algorithm, plain):
        state = method.init(params, N)
        states.append(softmax.run_rounds(build_round(method, "scan"), state, drawn_rounds())[0])
    for client in range(N):
        ours, expected = (
            softmax.flat(client_params(method, state, client))
            for method, state in zip((algorithm, plain), states, strict=True)
        )
        np.testing.assert_allclose(ours, expected, atol=1e-12)


# --- mistakes


def test_mistakes_are_named():
    build, frozen = functools.partial(algorithms.fedavg, client_lr=0.1), {"w": np.ones(2)}
    for wrong, message in (
        ((fedavg(), loss_fn, frozen), "build is of the type Algorithm; it must be a"),
        ((build, None, frozen), "loss_fn is of the type NoneType"),
        ((lambda loss: None, loss_fn, frozen), "build returned a NoneType"),
        ((build, loss_fn, {"w": 1.0}), r"frozen\['w'\] is of the type float, not an array"),
        ((functools.partial(algorithms.moon, client_lr=0.1), loss_fn, frozen), "takes a model"),
    ):
        with pytest.raises(TypeError, match=message):
            with_frozen(*wrong)
    with pytest.raises(ValueError, match="frozen has no leaves"):
        with_frozen(build, loss_fn, {})
    with pytest.raises(ValueError, match="has frozen weights already"):
        with_frozen(lambda loss: fedavg(), loss_fn, frozen)
    assert "array" not in repr(fedavg())  # a megabyte of numbers in an error helps nobody
