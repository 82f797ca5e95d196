"""What every method of the catalogue promises, and that it computes what its twin computes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, tree
from fedjax_lab.clients.metrics import OWN_METRICS
from tests.algorithms.cases import CASES, MAIN, Case, N
from tests.algorithms.compiled import (
    EMPTY_ROUND,
    assert_same_bits,
    on_its_problem,
    on_softmax,
    rows_of,
)
from tests.algorithms.limits import TABLE
from tests.algorithms.problem import initial_params, loss_fn, to_batch
from tests.reference import problem as reference

OF_THE_LOSS = {"mean_label", "highest_label", "again"}
NAMES = [case.id for case in MAIN]
# In every run, the five systems and one method of each kind; `make test-methods` has the rest.
AT_ONCE = {
    *("fedavg", "fedadam", "scaffold", "mime", "feddyn", "fedsam", "cfedavg", "fafed"),
    *("fedspeed", "fedspeed_ing", "fedswa", "fedmoswa", "gradma", "gradma_w", "gradma_s", "fedper"),
}


def each_method():
    """The methods, marked."""
    for name in NAMES:
        yield pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.methods)


@pytest.fixture(autouse=True, scope="module")
def _float64():
    with jax.enable_x64(True):
        yield
        on_its_problem.cache_clear()
        on_softmax.cache_clear()


@pytest.fixture(scope="module", params=each_method())
def name(request):
    """Tests of one method stand together, so that a worker compiles it once."""
    return request.param


@pytest.fixture
def method(name):
    return on_softmax(name)


@pytest.fixture
def noisy(method):
    """Six rounds with a loss that has its own randomness."""
    drawn = reference.make_rounds(0, 6, cohort_size=4, max_steps=3, batch_size=4)
    return [method.batch(padded, t, amplitude=1.0) for t, (_, padded) in enumerate(drawn)]


def valid_examples(batch):
    """bool [S, K, B]: what the masks of a batch leave, in NumPy."""
    mask, num_steps = np.asarray(batch.example_mask), np.asarray(batch.num_steps)
    taken = np.arange(mask.shape[1]) < num_steps[:, None]
    return mask & taken[..., None] & np.asarray(batch.participates)[:, None, None]


def test_the_table_has_every_factory():
    assert set(NAMES) == set(algorithms.ALGORITHMS)
    for name, factory in algorithms.ALGORITHMS.items():
        assert getattr(algorithms, name) is factory
        assert name in algorithms.__all__


def test_every_factory_also_runs_with_plain_numbers():
    """The tests below trace them, so that a number that is compiled in needs a test elsewhere."""
    options = {case.factory.__name__ for case in CASES if not case.main}
    limits = {limit.left.name for limit in TABLE} | {limit.right.name for limit in TABLE}
    assert set(NAMES) <= options | limits


def test_it_agrees_with_its_twin_after_every_round(name):
    method = on_its_problem(name)
    drawn, _, states = method.run
    flat = method.problem.flat
    twin = method.case.build_twin(flat(method.initial_params))
    for t, (clients, _) in enumerate(drawn):
        twin.round(clients, t)
        ours = flat(method.algorithm.params(states[t + 1]))
        np.testing.assert_allclose(ours, twin.x, rtol=0, atol=1e-6, err_msg=f"round {t}")
    assert np.abs(twin.x - flat(method.initial_params)).max() > 0.05  # it went somewhere


def test_state_and_metrics_keep_structure_shapes_and_dtypes(method):
    _, batches, states = method.run
    chex.assert_trees_all_equal_shapes_and_dtypes(*states)
    found = [method.round(states[t], batches[t])[1] for t in (0, 1, EMPTY_ROUND)]
    chex.assert_trees_all_equal_shapes_and_dtypes(*found)
    for metrics in found:
        assert {"loss", "delta_norm", "bytes_up", "bytes_down"} <= set(metrics)
        assert all(value.shape == () and np.isfinite(value) for value in metrics.values())
        assert set(metrics) - OF_THE_LOSS <= OWN_METRICS  # which a loss may not use
    params = method.algorithm.params(states[-1])
    chex.assert_trees_all_equal_shapes_and_dtypes(params, method.initial_params)
    assert method.algorithm.name == method.case.id
    assert method.program._cache_size() == 1  # no round was compiled again


def test_metrics_of_the_loss_are_means_over_examples_and_steps(method):
    """They are NumPy's over what the masks leave, under a full mini-batch as under a ragged one."""
    _, batches, states = method.run
    if method.case.subject is not Case.subject:
        pytest.skip("takes a model, whose loss is its own")
    for t in (0, 1, 2):
        _, metrics = method.round(states[t], batches[t])
        real, labels = valid_examples(batches[t]), np.asarray(batches[t].examples["y"])
        steps = [
            labels[step][real[step]].max()
            for step in np.ndindex(real.shape[:2])
            if real[step].any()
        ]
        assert metrics["mean_label"] == pytest.approx(labels[real].mean(), rel=1e-6)
        assert metrics["highest_label"] == pytest.approx(np.mean(steps), rel=1e-6)
        assert metrics["again"] == pytest.approx(float(metrics["loss"]), rel=1e-6)


def test_rows_of_absent_clients_keep_their_bits(method):
    _, batches, states = method.run
    for batch, before, after in zip(batches, states, states[1:], strict=False):
        present = np.asarray(batch.client_ids)[valid_examples(batch).any((1, 2))]
        absent = np.setdiff1d(np.arange(N), present)
        assert absent.size > 0
        assert_same_bits(rows_of(before.clients, absent), rows_of(after.clients, absent))


def test_what_is_masked_does_not_matter(method, noisy):
    def other_junk(batch):
        mask = jnp.asarray(valid_examples(batch))
        junk = {"x": batch.examples["x"] + np.nan, "y": (batch.examples["y"] + 1) % 3}
        keep = {"x": mask[..., None], "y": mask}
        rest = {k: v for k, v in batch.examples.items() if k not in junk}
        mixed = {k: jnp.where(keep[k], batch.examples[k], junk[k]) for k in junk}
        weights = jnp.where(batch.participates, batch.weights, 5.0)
        return batch._replace(examples=mixed | rest, weights=weights)

    expected, _ = method.advance(noisy)
    actual, _ = method.advance([other_junk(batch) for batch in noisy])
    assert_same_bits(expected, actual)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_client_that_is_not_finite_counts_as_absent(method, noisy, value):
    """It spoils one round; the rounds after it, in which it may return, are whole."""

    def spoilt(batch):
        taking = np.flatnonzero(valid_examples(batch).any((1, 2)))
        x = np.array(batch.examples["x"])
        x[taking[0]] = value
        return taking[0], batch._replace(examples=batch.examples | {"x": jax.device_put(x)})

    slot, broken = spoilt(noisy[1])
    participates = np.array(noisy[1].participates)
    participates[slot] = False
    without = noisy[1]._replace(participates=jax.device_put(participates))
    ends = []
    for batch in (broken, without):
        state, _ = method.round(method.first, noisy[0])
        state, metrics = method.round(state, batch)
        ends.append((method.round(state, noisy[2])[0], metrics))
    assert [float(metrics.pop("nonfinite_clients")) for _, metrics in ends] == [1, 0]
    chex.assert_trees_all_close(*ends, rtol=1e-9, atol=1e-9)


def test_cohort_order_does_not_matter(method, noisy):
    fields = ("client_ids", "examples", "example_mask", "num_steps", "weights", "participates")

    def reorder(batch):
        moved = {name: jax.tree.map(lambda a: a[::-1], getattr(batch, name)) for name in fields}
        return batch._replace(**moved)

    expected, _ = method.advance(noisy)
    actual, _ = method.advance([reorder(batch) for batch in noisy])
    for get in (method.algorithm.params, lambda state: state.clients):
        chex.assert_trees_all_close(get(expected), get(actual), atol=1e-9)


def test_a_loss_with_randomness_is_another_loss(name, method, noisy):
    """Else the two tests above could not find a wrong key."""
    silent = [batch._replace(key=jax.random.key(9)) for batch in noisy]
    first, _ = method.advance(noisy)
    second, _ = method.advance(silent)
    params = [method.problem.flat(method.algorithm.params(s)) for s in (first, second)]
    assert np.abs(params[0] - params[1]).max() > 1e-6


def test_a_round_without_clients_changes_nothing(method):
    _, batches, states = method.run
    assert_same_bits(states[EMPTY_ROUND], states[EMPTY_ROUND + 1])
    nobody = batches[2]._replace(participates=jnp.zeros(4, bool))
    after, metrics = method.round(states[2], nobody)
    assert_same_bits(states[2], after)
    assert metrics["participants"] == metrics["bytes_up"] == metrics["loss"] == 0


def test_bytes_are_those_of_what_travels(method):
    algorithm, params = method.algorithm, method.initial_params
    _, batches, states = method.run
    broadcast = sum(
        tree.nbytes(jax.eval_shape(phase.broadcast, states[0].server, jnp.int32(0)))
        for phase in algorithm.phases
        if not phase.once  # once in a run is no part of a round's traffic
    )
    assert algorithm.downlink(params) == broadcast
    _, metrics = method.round(states[0], batches[0])
    assert metrics["bytes_up"] == metrics["participants"] * algorithm.uplink(params)
    assert metrics["bytes_down"] == metrics["participants"] * broadcast
    sent = 18 * 8 * method.case.uplink
    if algorithm.name == "fednova":  # the number of steps, in four bytes
        sent = 18 * 8 + 4
    if algorithm.name == "cfedavg":  # top_k: 9 of 18 floats, and 9 indices of 5 bits in bytes
        sent = 9 * 8 + 6
    assert algorithm.uplink(params) == sent


def test_hyper_parameters_at_the_end_of_their_range(method):
    """All of them there at once gives no NaN; a learning rate of 0 stands still."""
    _, batches, _ = method.run
    floor = {n: 0.1 if n in ("tau", "temperature") else 0.0 for n in method.given}
    state, metrics = method.advance(batches[:3], **floor)
    found = jax.tree.leaves((method.algorithm.params(state), metrics))
    assert all(np.isfinite(leaf).all() for leaf in found)
    if "client_lr" in method.given:
        state, _ = method.advance(batches[:3], client_lr=0.0)
        assert_same_bits(method.algorithm.params(state), method.initial_params)


# The rest is about the round and the local steps, which all methods share: one of each kind.


@pytest.mark.parametrize("name", ["scaffold"], indirect=True)
def test_scanning_on_from_the_middle_gives_the_same_bits(method, noisy):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *noisy)
    round_fn = build_round(method.algorithm, "scan")
    run = jax.jit(lambda state, b: jax.lax.scan(round_fn, state, b)[0])
    first, second = rows_of(stacked, np.s_[:3]), rows_of(stacked, np.s_[3:])
    state = method.first
    assert_same_bits(run(state, stacked), run(run(state, first), second))


@pytest.mark.parametrize(
    "name", ["mime", pytest.param("fafed", marks=pytest.mark.methods)], indirect=True
)
def test_late_gather_equals_examples_in_the_batch(method, noisy):
    def late(batch):
        slots, steps, size = batch.example_mask.shape
        source = jax.tree.map(lambda e: e.reshape(-1, *e.shape[3:]), batch.examples)
        indices = jnp.arange(slots * steps * size, dtype=jnp.int32).reshape(slots, steps, size)
        return batch._replace(examples=indices, source=source)

    expected, _ = method.advance(noisy[:2])
    actual, _ = method.advance([late(batch) for batch in noisy[:2]])
    chex.assert_trees_all_close(expected, actual, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["fafed", pytest.param("moon", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.slow
def test_hyper_parameters_can_be_swept(method):
    """vmap over a round with two values of each hyper-parameter, and one by one."""
    _, batches, states = method.run
    values = {n: jnp.array([v, v / 2]) for n, v in method.given.items()}
    swept = jax.jit(jax.vmap(method.program, in_axes=(0, None, None)))(
        values, states[1], batches[1]
    )
    for i in range(2):
        alone = method.round(states[1], batches[1], **{n: v[i] for n, v in values.items()})
        chex.assert_trees_all_close(rows_of(swept, i), alone, atol=1e-9)


@pytest.mark.slow  # the twins judge the compiled round
def test_jit_equals_no_jit(method):
    _, batches, states = method.run
    eager, _ = build_round(method.algorithm, "vmap")(states[1], batches[1])
    chex.assert_trees_all_close(eager, states[2], atol=1e-9, rtol=1e-9)


@pytest.mark.methods
def test_gradients_go_through_a_round():
    drawn = reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)
    batch = to_batch(drawn[0][1], 0)

    @jax.jit
    def after(lr):
        algorithm = algorithms.scaffold(loss_fn, client_lr=lr)
        state, _ = algorithm.round_fn(algorithm.init(initial_params(), N), batch)
        return tree.norm(algorithm.params(state), squared=True)

    step = 1e-5
    difference = (after(0.2 + step) - after(0.2 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(after)(0.2), difference, rtol=1e-6)
