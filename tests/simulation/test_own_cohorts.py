"""Cohorts that a function of the caller's own draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import build_round, data, simulate, sweep
from fedjax_lab.data.cohort import Schedule
from tests.federations import of_sizes
from tests.simulation.test_run import (
    FEDAVG,
    SCAFFOLD,
    N,
    assert_same_bits,
    first_params,
    make_clients,
    run,
)

DRAWN = {"cohort_size": 3, "local_steps": 2, "batch_size": 4, "replace": True}


def in_turn(key, round):
    """Three neighbours on the ring of clients, one further in each round."""
    return (round + jnp.arange(3)) % N


def by_size(key, round):
    """Large clients more often: Gumbel's way to draw without replacement."""
    sizes = jnp.asarray([5.0, 9, 12, 7, 20, 11])
    return jax.lax.top_k(jnp.log(sizes) + jax.random.gumbel(key, (N,)), 3)[1]


@pytest.mark.methods
def test_the_ids_are_the_functions():
    for t in range(8):
        batch = data.draw_batch(
            make_clients(), jax.random.key(0), t, sample_cohort=in_turn, **DRAWN
        )
        np.testing.assert_array_equal(batch.client_ids, [t % N, (t + 1) % N, (t + 2) % N])
        assert batch.client_ids.dtype == jnp.int32


def test_a_clients_minibatches_do_not_depend_on_how_it_was_drawn():
    clients, key = make_clients(), jax.random.key(3)
    everybody = data.draw_batch(clients, key, 5, **{**DRAWN, "cohort_size": N})
    some = data.draw_batch(clients, key, 5, sample_cohort=in_turn, **DRAWN)
    np.testing.assert_array_equal(everybody.client_ids, np.arange(N))
    np.testing.assert_array_equal(some.examples, everybody.examples[some.client_ids])


@pytest.mark.slow
def test_a_function_like_the_librarys_own_gives_the_same_run():
    clients = make_clients()
    expected = run(FEDAVG)
    actual = run(FEDAVG, sample_cohort=lambda key, round: data.sample_clients(key, clients, 3))
    assert_same_bits(actual.state, expected.state)
    assert actual.history == expected.history


@pytest.mark.parametrize("client_map", ["scan", pytest.param("shard_map", marks=pytest.mark.slow)])
def test_a_run_equals_its_rounds_taken_one_by_one(client_map):
    result = run(SCAFFOLD, rounds=5, sample_cohort=in_turn, client_map=client_map)
    round_fn, schedule = jax.jit(build_round(SCAFFOLD, "vmap")), Schedule(**DRAWN)
    drawn = [
        schedule._replace(sample_cohort=lambda key, round, ids=ids: ids)
        for ids in ([0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 0])
    ]
    state = jax.jit(lambda: SCAFFOLD.init(first_params(), N))()
    for t, one in enumerate(drawn):
        state, _ = round_fn(state, one.draw(make_clients(), jax.random.key(5), jnp.int32(t)))
    np.testing.assert_allclose(result.params["w"], SCAFFOLD.params(state)["w"], atol=1e-5)


@pytest.mark.methods
def test_clients_are_drawn_as_often_as_the_function_says():
    schedule = Schedule(**DRAWN, sample_cohort=by_size)
    draw = jax.jit(jax.vmap(lambda t: schedule.draw(make_clients(), jax.random.key(0), t)))
    counts = np.bincount(np.asarray(draw(jnp.arange(4000)).client_ids).reshape(-1), minlength=N)
    # The chance to be among three draws without replacement, by adding up all orders.
    sizes = np.array([5, 9, 12, 7, 20, 11.0])
    chance, total = np.zeros(N), sizes.sum()
    for i in range(N):
        for j in set(range(N)) - {i}:
            for k in set(range(N)) - {i, j}:
                rest = total - sizes[i]
                order = sizes[i] / total * sizes[j] / rest * sizes[k] / (rest - sizes[j])
                chance[[i, j, k]] += order
    np.testing.assert_allclose(counts / 4000, chance, atol=4 * np.sqrt(0.25 / 4000))


@pytest.mark.slow
def test_it_is_resumed_and_bound_by_content(tmp_path):
    def stride(step):
        return lambda key, round: (round + step * jnp.arange(3)) % (N + step - 1)

    settings = {"algorithm": FEDAVG, "rounds": 4}
    whole = run(**settings, sample_cohort=stride(1))
    run(**{**settings, "rounds": 2}, sample_cohort=stride(1), run_dir=tmp_path)
    grown = run(**settings, sample_cohort=stride(1), run_dir=tmp_path)
    assert_same_bits(grown.state, whole.state)
    with pytest.raises(FileExistsError, match="the function sample_cohort"):
        run(**settings, sample_cohort=in_turn, run_dir=tmp_path)
    with pytest.raises(FileExistsError, match="the function sample_cohort"):
        run(**settings, run_dir=tmp_path)


@pytest.mark.slow
def test_a_sweep_takes_it_too():
    swept = sweep(
        lambda: FEDAVG,
        first_params(),
        make_clients(),
        points={},
        seeds=[5, 6],
        rounds=4,
        eval_every=2,
        sample_cohort=in_turn,
        run_map="scan",
        **DRAWN,
    )
    for index, seed in enumerate((5, 6)):
        single = run(FEDAVG, rounds=4, seed=seed, sample_cohort=in_turn)
        np.testing.assert_allclose(swept.params["w"][0, index], single.params["w"], atol=1e-5)


NEEDS = r"uses the value of its key or round, .* traced .*: write jnp\.asarray\(table\)\[round\]"


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (
            lambda key, t: jnp.arange(2),
            r"shape \(2,\); it must be \(3,\)",
        ),
        (lambda key, t: None, "sample_cohort returned None; it must return the ids"),
        (lambda key, t: jnp.arange(3.0), "returned float32; client ids must be integers"),
        (lambda key, t: jnp.array([0, 1, 1]), r"ids \[0, 1, 1\] in round 0; they must be distinct"),
        (
            lambda key, t: t + jnp.arange(3),
            r"\[4, 5, 6\] in round 4; they must lie between 0 and 5",
        ),
        (lambda key, t: jnp.arange(3) - 1, r"\[-1, 0, 1\] in round 0; they must lie between"),
        ([0, 1, 2], r"sample_cohort is \[0, 1, 2\]; it must be a function"),
        (lambda key, t: jnp.arange(3) + int(t), NEEDS),
        (lambda key, t: np.eye(3, dtype=int)[t], NEEDS),
        (lambda key, t: jnp.arange(3) if t < 2 else jnp.arange(1, 4), NEEDS),
        (
            lambda key, t: np.random.default_rng(np.asarray(jax.random.key_data(key))).permutation(
                N
            )[:3],
            NEEDS,
        ),
    ],
)
def test_bad_cohorts_are_refused(sampler, message):
    with pytest.raises((ValueError, TypeError), match=message):
        run(FEDAVG, sample_cohort=sampler)


def test_clients_without_data_are_refused():
    clients = of_sizes([2, 2, 0, 2, 2, 0], np.ones((8, 4), np.float32))
    with pytest.raises(ValueError, match=r"the clients \[2\] have no data"):
        simulate(
            FEDAVG, first_params(), clients, rounds=1, sample_cohort=lambda key, t: jnp.arange(3),
            **DRAWN,
        )  # fmt: skip
