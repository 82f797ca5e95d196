"""Whole runs with Poisson cohorts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, simulate, sweep
from fedjax_lab.data.poisson import poisson_slots
from tests import federations
from tests.data.test_poisson import with_slots
from tests.federations import softmax_loss

SETTINGS = {"cohort_size": 6, "local_steps": 2, "batch_size": 4, "rounds": 4, "eval_every": 2}


def problem():
    """(loss, 24 clients, params)."""
    return softmax_loss, federations.signs(5), jnp.zeros((5, 2))


def run(name="scaffold", **options):
    loss, clients, start = problem()
    algorithm = getattr(algorithms, name)(loss, client_lr=0.1)
    return simulate(algorithm, start, clients, **{"sampling": "poisson", **SETTINGS, **options})


@pytest.mark.methods
def test_the_same_run_by_all_clients_coins():
    """Against rounds whose cohorts are drawn from all clients by hand, one slot for each."""
    loss, clients, start = problem()
    algorithm = algorithms.scaffold(loss, client_lr=0.1)
    state, key = algorithm.init(start, 24), jax.random.key(0)
    came = []
    for t in range(4):
        batch = data.draw_batch(clients, key, t, cohort_size=24, local_steps=2, batch_size=4)
        coin = jax.random.split(jax.random.fold_in(key, t), 4)[0]
        bits = [jax.random.bits(jax.random.fold_in(coin, i), (), jnp.uint32) for i in range(24)]
        batch = batch._replace(participates=jnp.asarray(np.array(bits) < 2**30))  # 6 of 24
        state, metrics = algorithm.round_fn(state, batch)
        came.append(metrics["participants"])
    result = run(client_map="scan")
    chex.assert_trees_all_close(result.state, state, atol=1e-6)
    assert result.history[-1]["bytes_up"] == sum(came) * algorithm.uplink(start)
    assert len(set(map(float, came))) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *({"client_map": client_map} for client_map in ("vmap", "chunk:2", "shard_map")),
        {"client_store": "host"},
    ],
)
@pytest.mark.parametrize("sampling", [{}, {"sampling": "cyclic", "cohort_size": 5}])
def test_other_maps_and_stores(sampling, options):
    """Of cyclic cohorts, one in five has an empty slot."""
    expected, actual = run(client_map="scan", **sampling), run(**sampling, **options)
    chex.assert_trees_all_close(actual.params, expected.params, atol=1e-6)
    table = actual.state.clients
    if "client_store" in options:
        table = table.read(np.arange(24))
    chex.assert_trees_all_close(table, expected.state.clients, atol=1e-6)


@pytest.mark.slow
def test_it_goes_on_and_is_another_run_than_that_of_fixed_cohorts(tmp_path):
    first = run("fedavg", rounds=2, run_dir=tmp_path / "run")
    later = run("fedavg", run_dir=tmp_path / "run")
    chex.assert_trees_all_equal(later.params, run("fedavg").params)
    assert later.history[: len(first.history)] == first.history
    with pytest.raises(FileExistsError, match="sampling"):
        run("fedavg", run_dir=tmp_path / "run", sampling="without_replacement")


@pytest.mark.slow
def test_a_sweep_has_the_same_cohorts():
    loss, clients, start = problem()
    swept = sweep(
        lambda client_lr: algorithms.fedavg(loss, client_lr=client_lr),
        start,
        clients,
        points={"client_lr": [0.1]},
        seeds=[0],
        sampling="poisson",
        **SETTINGS,
    )
    chex.assert_trees_all_close(swept.params[0, 0], run("fedavg").params, atol=1e-6)


def test_too_many_clients_end_the_run(monkeypatch):
    with_slots(monkeypatch, 3)
    with pytest.raises(RuntimeError, match="a Poisson cohort has more clients than slots"):
        run("fedavg", client_map="scan")


def test_no_run_with_a_sampler_of_its_own():
    with pytest.raises(ValueError, match="sampling is 'poisson' and sample_cohort is set"):
        run("fedavg", sample_cohort=lambda key, round: jnp.arange(6))
    assert poisson_slots(6, 24) < 24
