"""Correlated noise: its matrix, its sensitivity, its covariance, its price, and what is refused."""

import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg, optimize, special, stats

from fedjax_lab import algorithms, build_round, privacy, simulate, with_dp
from fedjax_lab.wrappers.correlated import coefficients, sensitivity
from tests.simulation.test_poisson_runs import problem
from tests.wrappers.teller import D, N, batch_of, params, teller
from tests.wrappers.test_privacy import SUMS, vectors


def matrix(bands, rounds):
    """C of the paper, of binomials."""
    k = np.arange(min(bands, rounds))
    column = np.zeros(rounds)
    column[k] = special.binom(2 * k, k) / 4.0**k
    return linalg.toeplitz(column, np.zeros(rounds))


def test_the_matrix_is_a_root_of_the_prefix_sums():
    whole = matrix(30, 30)
    np.testing.assert_allclose(whole @ whole, np.tril(np.ones((30, 30))), atol=1e-12)
    np.testing.assert_allclose(coefficients(30), whole[:, 0], rtol=1e-12)


@pytest.mark.parametrize("bands", [1, 2, 3, 7])
@pytest.mark.parametrize("separation", [1, 2, 3, 5])
@pytest.mark.methods
def test_sensitivity_by_brute_force(bands, separation):
    """All rounds in which a client may take part, with all signs of what it sends."""
    rounds = 7
    root, largest = matrix(bands, rounds), 0.0
    for sent in itertools.product((-1, 0, 1), repeat=rounds):
        came = np.flatnonzero(sent)
        if (np.diff(came) >= separation).all():
            largest = max(largest, np.linalg.norm(root @ sent))
    assert sensitivity(bands, rounds, separation) == pytest.approx(largest, rel=1e-12)


def sums_of(bands, rounds, seeds, present=None, client_map="vmap"):
    """What the server of multiplier 0.7 and clip norm 2 gets: [seeds, rounds, 2 D]; all send 0."""
    algorithm = with_dp(teller(SUMS), 2.0, 0.7, noise_bands=bands)
    batch = batch_of(np.zeros((N, 2, D), np.float32))
    present = np.ones(rounds, bool) if present is None else present
    round_fn = build_round(algorithm, client_map)

    def run(batch, seed):
        def one(state, at):
            t, comes = at
            key = jax.random.fold_in(jax.random.key(seed), t)
            here = jnp.full(N, comes)
            state, _ = round_fn(state, batch._replace(key=key, round=t, participates=here))
            return state, state.server.inner["got"]

        times = jnp.arange(rounds, dtype=jnp.int32), jnp.asarray(present)
        return jax.lax.scan(one, algorithm.init(params(), N), times)[1]

    many = run if seeds == 1 else jax.vmap(run, in_axes=(None, 0))
    got = jax.jit(many)(batch, 0 if seeds == 1 else jnp.arange(seeds))
    return vectors(got, seeds * rounds).reshape(seeds, rounds, 2 * D)


def test_the_noise_against_numpy():
    """C y = z for the z of independent noise, and the covariance of y is C^-1 C^-T."""
    bands, rounds, seeds = 3, 6, 3000
    independent, noise = sums_of(1, rounds, seeds), sums_of(bands, rounds, seeds)
    root = matrix(bands, rounds)
    expected = np.einsum("ts,nsd->ntd", np.linalg.inv(root), independent.astype(float))
    np.testing.assert_allclose(noise, expected, atol=2e-5)
    samples = noise.transpose(0, 2, 1).reshape(-1, rounds) / 1.4
    inverse = np.linalg.inv(root)
    covariance = inverse @ inverse.T
    found = samples.T @ samples / len(samples)
    np.testing.assert_allclose(np.sqrt(np.diag(found)), np.sqrt(np.diag(covariance)), rtol=0.02)
    np.testing.assert_allclose(found, covariance, atol=0.03)


@pytest.mark.slow
def test_rounds_to_which_nobody_came_count():
    """The server stays as it was, and the noise goes on as if they had come."""
    present = np.array([True, False, True, False, False, True])
    whole, gaps = sums_of(3, 6, 1)[0], sums_of(3, 6, 1, present)[0]
    np.testing.assert_array_equal(gaps[present], whole[present])
    np.testing.assert_array_equal(gaps[[1, 3, 4]], gaps[[0, 2, 2]])


@pytest.mark.slow
@pytest.mark.parametrize("client_map", ["scan", "chunk:2", "shard_map", "pmap"])
def test_the_draw_is_the_same_under_every_client_map(client_map):
    np.testing.assert_array_equal(sums_of(3, 4, 1), sums_of(3, 4, 1, client_map=client_map))


def exact_epsilon(multiplier, delta):
    """Of one Gaussian mechanism of this noise and sensitivity 1: Balle and Wang's Theorem 8."""

    def excess(epsilon):
        low = stats.norm.logcdf(-0.5 / multiplier - epsilon * multiplier)
        reached = stats.norm.cdf(0.5 / multiplier - epsilon * multiplier)
        return reached - math.exp(epsilon + low) - delta

    return optimize.brentq(excess, 0, 500)


@pytest.mark.parametrize(("bands", "rounds"), [(1, 40), (4, 40), (8, 23)])
def test_epsilon_is_that_of_one_gaussian_mechanism(bands, rounds):
    """Of 30 clients in cohorts of 4, which come back after 8 rounds; one of them is replaced."""
    pytest.importorskip("dp_accounting")
    among = {"cohort_size": 4, "num_clients": 30, "sampling": "cyclic", "noise_bands": bands}
    moved = np.zeros(rounds)
    moved[::8] = 2.0
    multiplier = 9.0 / np.linalg.norm(matrix(bands, rounds) @ moved)
    exact = exact_epsilon(multiplier, 1e-5)
    ours = privacy.epsilon(9.0, 1e-5, rounds, accountant="pld", **among)
    assert ours == pytest.approx(exact, rel=1e-6)
    by_renyi = privacy.epsilon(9.0, 1e-5, rounds, **among)
    assert exact <= by_renyi <= 1.15 * exact
    z = privacy.noise_multiplier(3.0, 1e-5, rounds, accountant="pld", **among)
    assert privacy.epsilon(z, 1e-5, rounds, accountant="pld", **among) == pytest.approx(3, rel=2e-3)


def test_epsilon_of_several_exchanges():
    """Two sums a round are one with noise z / sqrt(2); first estimates are one more, once."""
    pytest.importorskip("dp_accounting")
    among = {"cohort_size": 4, "num_clients": 30, "sampling": "cyclic", "accountant": "pld"}
    ours = privacy.epsilon(9.0, 1e-5, 20, exchanges=2, first_exchanges=3, noise_bands=4, **among)
    squared = 2 * sensitivity(4, 20, 8) ** 2 + 1
    assert ours == pytest.approx(exact_epsilon(4.5 / math.sqrt(squared), 1e-5), rel=1e-6)


def test_the_sums_of_the_noise_are_smaller_at_the_same_epsilon():
    """60 rounds, a client comes back after 10: root mean square over the rounds, times the cost."""
    prefix, errors = np.tril(np.ones((60, 60))), {}
    for bands in (1, 10):
        summed = prefix @ np.linalg.inv(matrix(bands, 60))
        rms = np.sqrt((summed**2).sum() / 60)
        errors[bands] = rms * sensitivity(bands, 60, 10)
    assert errors[10] == pytest.approx(0.456 * errors[1], rel=1e-2)


@pytest.mark.slow
def test_a_run_has_epsilon_and_goes_on(tmp_path):
    """Interrupted or not, the same bits, and a sweep says the same."""
    pytest.importorskip("dp_accounting")
    loss, clients, start = problem()
    algorithm = with_dp(algorithms.fedavg(loss, client_lr=0.1), 1.0, 2.0, 1e-3, noise_bands=5)
    settings = {"cohort_size": 5, "local_steps": 2, "batch_size": 4, "eval_every": 3}
    settings |= {"sampling": "cyclic", "client_map": "scan"}
    whole = simulate(algorithm, start, clients, rounds=9, **settings)
    simulate(algorithm, start, clients, rounds=3, run_dir=tmp_path / "run", **settings)
    later = simulate(algorithm, start, clients, rounds=9, run_dir=tmp_path / "run", **settings)
    chex.assert_trees_all_equal(later.state, whole.state)
    among = {"cohort_size": 5, "num_clients": 24, "sampling": "cyclic", "noise_bands": 5}
    expected = [privacy.epsilon(2.0, 1e-3, t, accountant="pld", **among) for t in (3, 6, 9)]
    assert [row["epsilon"] for row in whole.history] == expected
    assert [row["epsilon"] for row in later.history] == expected


@pytest.mark.slow
def test_first_estimates_have_independent_noise():
    loss, clients, start = problem()
    plain = algorithms.fafed(loss, client_lr=0.1, momentum=0.1, second_moment_decay=0.1)
    algorithm = with_dp(plain, 1.0, 0.1, noise_bands=3)
    kept = algorithm.init(start, 24).server.noise
    assert [bool(jax.tree.leaves(noise)) for noise in kept] == [False, True]
    settings = {"cohort_size": 5, "local_steps": 2, "batch_size": 4, "sampling": "cyclic"}
    result = simulate(algorithm, start, clients, rounds=6, **settings)
    assert np.isfinite(result.params).all()


def test_what_is_refused():
    with pytest.raises(ValueError, match="noise_bands is 0; it must be between 1 and"):
        with_dp(teller(), 1.0, 1.0, noise_bands=0)
    with pytest.raises(ValueError, match=r"noise_bands is 2 and adaptive_quantile 0\.5; .* scale"):
        with_dp(teller(), 1.0, 1.0, adaptive_quantile=0.5, noise_bands=2)
    algorithm = with_dp(teller(), 1.0, 1.0, noise_bands=2)
    poisson = batch_of(np.zeros((N, 2, D), np.float32))._replace(expected_size=jnp.asarray(4.0))
    with pytest.raises(ValueError, match="noise_bands is 2 and sampling 'poisson'; the privacy"):
        algorithm.round_fn(algorithm.init(params(), N), poisson)
    loss, clients, start = problem()
    algorithm = with_dp(algorithms.fedavg(loss, client_lr=0.1), 1.0, 2.0, noise_bands=5)
    with pytest.raises(ValueError, match="noise_bands is 5 and sampling 'without_replacement'"):
        simulate(algorithm, start, clients, rounds=1, cohort_size=5, local_steps=1, batch_size=4)
    with pytest.raises(ValueError, match="noise_bands is 2 and sampling 'poisson'"):
        privacy.epsilon(
            1.0, 0.1, 3, cohort_size=2, num_clients=4, sampling="poisson", noise_bands=2
        )
