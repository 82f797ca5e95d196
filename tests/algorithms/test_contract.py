"""What every method of the catalogue promises, whatever it computes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, tree
from tests.algorithms.cases import MAIN, N
from tests.algorithms.problem import initial_params, loss_fn, stack_rounds, to_batch
from tests.reference import problem as reference

NAMES = [case.id for case in MAIN]


def methods(names):
    """A row of the table for each of ``names``; the others are left to the slow run."""
    assert set(names) <= set(NAMES)
    rows = [
        case if case.id in names else pytest.param(case, marks=pytest.mark.slow) for case in MAIN
    ]
    return pytest.mark.parametrize("case", rows, ids=NAMES)


every_method = methods(NAMES)
# Those that handle their examples or their state in a way of their own: for the rest these tests
# are about the round.
GATHERING = ("fedavg", "scaffold", "gradma", "fedspeed", "fedpd", "mime", "fafed", "moon")
STATEFUL = ("fedavg", "fedadam", "gradma_s", "fedpd", "fafed")
# One or two of each family: their relatives' hyper-parameters go through the same code.
SWEPT = (
    *("fedavg", "fednova", "fedadam", "fedproxm", "fedacg", "mime", "scaffold", "feddyn", "fedpd"),
    *("fedmoswa", "cfedavg", "fafed", "stem", "fedspeed", "fedsmoo", "fedgamma", "gradma", "mifa"),
    *("moon", "fedmlb"),
)


@functools.cache
def jitted(case_id):
    """One compiled program per method for all tests of this file."""
    case = next(case for case in MAIN if case.id == case_id)
    options = {"memory_size": N} if "memory_size" in case.options else {}
    algorithm = case.build(noisy_loss, **options)
    return algorithm, jax.jit(build_round(algorithm, "vmap"))


def noisy_loss(params, examples, key):
    """A loss with its own randomness, so that a wrong key shows."""
    noise = jax.random.uniform(key, examples["y"].shape, minval=0.5, maxval=1.5)
    return noise * loss_fn(params, examples, key)


def start(algorithm, seed=0, rounds=6):
    drawn = reference.make_rounds(seed, rounds, cohort_size=4, max_steps=3, batch_size=4)
    batches = [to_batch(padded, t) for t, (_, padded) in enumerate(drawn)]
    return algorithm.init(initial_params(), N), batches


def advance(round_fn, state, batches):
    for batch in batches:
        state, metrics = round_fn(state, batch)
    return state, metrics


def rows_of(tree, rows):
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def valid_examples(batch):
    """bool [S, K, B]: what the masks of a batch leave, in NumPy."""
    mask, num_steps = np.asarray(batch.example_mask), np.asarray(batch.num_steps)
    taken = np.arange(mask.shape[1]) < num_steps[:, None]
    return mask & taken[..., None] & np.asarray(batch.participates)[:, None, None]


def assert_same_bits(tree_a, tree_b):
    jax.tree.map(np.testing.assert_array_equal, tree_a, tree_b)


def test_the_table_has_every_factory():
    assert {case.id for case in MAIN} == set(algorithms.ALGORITHMS)
    for name, factory in algorithms.ALGORITHMS.items():
        assert getattr(algorithms, name) is factory
        assert name in algorithms.__all__


@every_method
def test_state_and_metrics_keep_structure_shapes_and_dtypes(case):
    algorithm, round_fn = jitted(case.id)
    state, batches = start(algorithm)
    after, metrics = round_fn(state, batches[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    _, later = round_fn(after, batches[1])
    chex.assert_trees_all_equal_shapes_and_dtypes(metrics, later)
    assert {"loss", "delta_norm", "bytes_up", "bytes_down"} <= set(metrics)
    assert all(value.shape == () and np.isfinite(value) for value in metrics.values())
    chex.assert_trees_all_equal_shapes_and_dtypes(algorithm.params(after), initial_params())
    assert algorithm.name == case.id


@pytest.mark.slow  # the twins judge the compiled round
@every_method
def test_jit_equals_no_jit(case):
    algorithm, round_fn = jitted(case.id)
    state, batches = start(algorithm)
    eager, _ = build_round(algorithm, "vmap")(state, batches[0])
    compiled, _ = round_fn(state, batches[0])
    chex.assert_trees_all_close(eager, compiled, atol=1e-5, rtol=1e-5)


@every_method
def test_a_second_round_is_not_compiled_again(case):
    algorithm, round_fn = jitted(case.id)
    state, batches = start(algorithm)
    state, _ = round_fn(state, batches[0])
    programs = round_fn._cache_size()
    round_fn(state, batches[1])
    assert round_fn._cache_size() == programs


@every_method
def test_rows_of_absent_clients_keep_their_bits(case):
    algorithm, round_fn = jitted(case.id)
    state, batches = start(algorithm)
    for batch in batches:
        after, _ = round_fn(state, batch)
        present = np.asarray(batch.client_ids)[valid_examples(batch).any((1, 2))]
        absent = np.setdiff1d(np.arange(N), present)
        assert absent.size > 0
        assert_same_bits(rows_of(state.clients, absent), rows_of(after.clients, absent))
        state = after


@every_method
def test_what_is_masked_does_not_matter(case):
    algorithm, round_fn = jitted(case.id)
    state, batches = start(algorithm)

    def other_junk(batch):
        mask = jnp.asarray(valid_examples(batch))
        junk = {"x": batch.examples["x"] + 7, "y": (batch.examples["y"] + 1) % 3}
        keep = {"x": mask[..., None], "y": mask}
        examples = jax.tree.map(jnp.where, keep, batch.examples, junk)
        weights = jnp.where(batch.participates, batch.weights, 5.0)
        return batch._replace(examples=examples, weights=weights)

    expected, _ = advance(round_fn, state, batches)
    actual, _ = advance(round_fn, state, [other_junk(batch) for batch in batches])
    assert_same_bits(expected, actual)


@every_method
def test_cohort_order_does_not_matter(case):
    algorithm, round_fn = jitted(case.id)
    state, batches = start(algorithm)
    fields = ("client_ids", "examples", "example_mask", "num_steps", "weights", "participates")

    def reorder(batch):
        moved = {name: jax.tree.map(lambda a: a[::-1], getattr(batch, name)) for name in fields}
        return batch._replace(**moved)

    expected, _ = advance(round_fn, state, batches)
    actual, _ = advance(round_fn, state, [reorder(batch) for batch in batches])
    for get in (algorithm.params, lambda state: state.clients):
        chex.assert_trees_all_close(get(expected), get(actual), atol=1e-5)


@every_method
def test_a_round_without_clients_changes_nothing(case):
    algorithm, round_fn = jitted(case.id)
    state, batches = start(algorithm)
    state, _ = advance(round_fn, state, batches[:2])
    nobody = batches[2]._replace(participates=jnp.zeros(4, bool))
    after, metrics = round_fn(state, nobody)
    assert_same_bits(state, after)
    assert metrics["participants"] == metrics["bytes_up"] == metrics["loss"] == 0


@methods(STATEFUL)
def test_scanning_on_from_the_middle_gives_the_same_bits(case):
    algorithm, _ = jitted(case.id)
    state, batches = start(algorithm)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    run = jax.jit(lambda state, b: jax.lax.scan(build_round(algorithm, "scan"), state, b)[0])
    first, second = rows_of(stacked, np.s_[:3]), rows_of(stacked, np.s_[3:])
    assert_same_bits(run(state, stacked), run(run(state, first), second))


@methods(GATHERING)
def test_late_gather_equals_examples_in_the_batch(case):
    algorithm, round_fn = jitted(case.id)
    state, batches = start(algorithm)

    def late(batch):
        slots, steps, size = batch.example_mask.shape
        source = jax.tree.map(lambda e: e.reshape(-1, *e.shape[3:]), batch.examples)
        indices = jnp.arange(slots * steps * size, dtype=jnp.int32).reshape(slots, steps, size)
        return batch._replace(examples=indices, source=source)

    expected, _ = advance(round_fn, state, batches[:2])
    actual, _ = advance(round_fn, state, [late(batch) for batch in batches[:2]])
    chex.assert_trees_all_close(expected, actual, atol=1e-6)


@every_method
def test_bytes_are_those_of_what_travels(case):
    algorithm, round_fn = jitted(case.id)
    state, batches = start(algorithm)
    params = algorithm.params(state)
    broadcast = 0
    for phase in algorithm.phases:
        received = jax.eval_shape(phase.broadcast, state.server, jnp.int32(0))
        if phase.once:  # once in a run, so no part of a round's traffic; one flag is not counted
            assert tree.nbytes(received) == phase.down * tree.nbytes(params) + 1
        else:
            broadcast += tree.nbytes(received)
    assert algorithm.downlink(params) == broadcast
    _, metrics = round_fn(state, batches[0])
    assert metrics["bytes_up"] == metrics["participants"] * algorithm.uplink(params)
    assert metrics["bytes_down"] == metrics["participants"] * broadcast
    sent = 18 * 4 * case.uplink
    if case.id == "cfedavg":  # top_k: 9 of 18 floats, and 9 indices of 5 bits in whole bytes
        sent = 9 * 4 + 6
    assert algorithm.uplink(params) == sent


@methods(SWEPT)
def test_hyper_parameters_can_be_traced_and_swept(case):
    """All of them as given, all at the end of their range, and a learning rate of 0."""
    drawn = reference.make_rounds(0, 3, cohort_size=4, max_steps=3, batch_size=4)
    batches = stack_rounds(drawn)
    problem = case.problem
    names = [n for n, v in case.options.items() if isinstance(v, float)]

    def final(values):
        algorithm = case.build(problem.loss, **dict(zip(names, values, strict=True)))
        state = algorithm.init(problem.initial_params(), N)
        state, metrics = jax.lax.scan(build_round(algorithm, "vmap"), state, batches)
        return algorithm.params(state), metrics

    given = np.array([case.options[name] for name in names], np.float32)
    floor = 0.1 if {"tau", "temperature"} & set(names) else 0.0
    standing = np.where(np.array(names) == "client_lr", 0, given).astype(np.float32)
    points = jnp.stack([given, np.full_like(given, floor), standing])
    swept, metrics = jax.jit(jax.vmap(final))(points)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((swept, metrics)))
    twin = case.build_twin(problem.flat(problem.initial_params()))
    for t, (clients, _) in enumerate(drawn):
        twin.round(clients, t)
    np.testing.assert_allclose(problem.flat(rows_of(swept, 0)), twin.x, atol=1e-3)
    if "client_lr" in names:
        assert_same_bits(rows_of(swept, 2), problem.initial_params())


def test_gradients_go_through_a_round():
    drawn = reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)
    batch = to_batch(drawn[0][1], 0)

    def after(lr):
        algorithm = algorithms.scaffold(loss_fn, client_lr=lr)
        state, _ = algorithm.round_fn(algorithm.init(initial_params(), N), batch)
        return tree.norm(algorithm.params(state), squared=True)

    slope = jax.grad(after)(0.2)
    step = 1e-2
    difference = (after(0.2 + step) - after(0.2 - step)) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=2e-2)
