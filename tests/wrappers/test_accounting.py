"""Epsilon against numbers that others have published, and against an accountant of our own."""

import pytest

from fedjax_lab import privacy
from tests.reference import privacy_loss_numpy

pytest.importorskip("dp_accounting")

# Noise multiplier, delta, rounds, cohort, clients, accountant -> epsilon, of Poisson cohorts.
PUBLISHED = {
    # The tests of TensorFlow Privacy (compute_dp_sgd_privacy_test.py): 15 epochs of batches of 150
    # among 60,000 examples, 30 epochs of 100 among 100,000, and a privacy statement of 5 epochs of
    # 64 among 10,000, where the sensitivity is doubled for microbatches.
    "mnist": (1.3, 1e-5, 6000, 150, 60_000, "rdp", 0.7242234),
    "epochs of 100": (1.0, 1e-7, 30_000, 100, 100_000, "rdp", 1.4154988),
    "statement, rdp": (1.0, 1e-6, 782, 64, 10_000, "rdp", 1.616),
    "statement, pld": (1.0, 1e-6, 782, 64, 10_000, "pld", 1.199),
    "one in a hundred, rdp": (0.7, 1e-5, 120, 1, 100, "rdp", 3.2392676),
    "one in a hundred, pld": (0.7, 1e-5, 120, 1, 100, "pld", 2.4612381),
    # The tests of Opacus (accountants_test.py): 90 epochs of batches of 4 %.
    "opacus": (1.5, 1e-5, 2250, 4, 100, "rdp", 7.3291112),
    # The tests of dp-accounting: the multiplier of (1, 1e-6), for one round of everybody.
    "a gaussian": (4.530877117, 1e-6, 1, 10, 10, "rdp", 1.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_epsilon_is_the_published_one(name):
    z, delta, rounds, cohort, clients, accountant, expected = PUBLISHED[name]
    ours = privacy.epsilon(
        z,
        delta,
        rounds,
        cohort_size=cohort,
        num_clients=clients,
        sampling="poisson",
        accountant=accountant,
    )
    assert ours == pytest.approx(expected, rel=0.01)


# Rounds and noise cohort of pfl-research's benchmarks with central privacy, of a population of 10^6
# and for (2, 1e-6): its configurations of CIFAR-10 and StackOverflow.
PFL = {"cifar10": (3000, 1000), "stackoverflow": (2000, 5000)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PFL)
def test_the_noise_of_pfls_benchmarks(name):
    """The multiplier for their epsilon, which by convolution in NumPy costs just that."""
    rounds, cohort = PFL[name]
    among = {"cohort_size": cohort, "num_clients": 10**6, "sampling": "poisson"}
    z = privacy.noise_multiplier(2.0, 1e-6, rounds, accountant="pld", **among)
    exact = privacy_loss_numpy.epsilon_of(1e-6, cohort / 10**6, z, rounds)
    assert exact == pytest.approx(2.0, rel=0.01)
    ours = privacy.epsilon(z, 1e-6, rounds, accountant="pld", **among)
    assert ours == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    ("z", "rounds", "q"),
    [(2.0, 100, 0.1), pytest.param(0.65, 400, 0.01, marks=pytest.mark.slow)],
)
def test_the_loss_distribution_against_convolution(z, rounds, q):
    ours = privacy.epsilon(
        z,
        1e-5,
        rounds,
        cohort_size=round(1000 * q),
        num_clients=1000,
        sampling="poisson",
        accountant="pld",
    )
    assert ours == pytest.approx(privacy_loss_numpy.epsilon_of(1e-5, q, z, rounds), rel=0.01)


@pytest.mark.slow
def test_exchanges_of_the_first_round_in_the_loss_distribution():
    """Two sums with noise z are one with noise z / sqrt(2)."""
    among = {"cohort_size": 50, "num_clients": 1000, "sampling": "poisson", "accountant": "pld"}
    z = 2**0.5
    twice = privacy.epsilon(z, 1e-5, 50, exchanges=2, **among)
    assert twice == pytest.approx(privacy.epsilon(1.0, 1e-5, 50, **among), rel=1e-6)
    more = privacy.epsilon(z, 1e-5, 50, first_exchanges=2, **among)
    assert privacy.epsilon(z, 1e-5, 50, **among) < more < twice


@pytest.mark.parametrize(
    ("z", "delta"), [(0.05, 1e-5), pytest.param(2.0, 1e-15, marks=pytest.mark.slow)]
)
def test_where_the_loss_distribution_gives_no_number_the_other_bound_stands_in(z, delta):
    """Little noise would take gigabytes; so small a delta is below what its grid leaves out."""
    among = {"cohort_size": 10, "num_clients": 100, "sampling": "poisson"}
    bound = privacy.epsilon(z, delta, 10, accountant="rdp", **among)
    assert privacy.epsilon(z, delta, 10, accountant="pld", **among) == bound < 1e4


def test_the_loss_distribution_is_of_poisson_cohorts():
    with pytest.raises(
        ValueError, match="accountant is 'pld'; it knows Poisson and cyclic cohorts"
    ):
        privacy.epsilon(1.0, 1e-5, 3, cohort_size=2, num_clients=4, accountant="pld")
    with pytest.raises(ValueError, match="accountant is 'prv'; it must be one of"):
        privacy.epsilon(1.0, 1e-5, 3, cohort_size=2, num_clients=4, accountant="prv")
