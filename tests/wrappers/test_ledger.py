"""Epsilon against numbers that others have published, and against an accountant of our own."""

import itertools
import logging
import math

import pytest
from scipy import optimize, stats

from fedjax_lab import privacy
from tests.reference import privacy_loss_numpy
from tests.tiers import few

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


@pytest.mark.parametrize("name", few(2, PUBLISHED))
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
@pytest.mark.methods
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
        ValueError, match="accountant is 'pld', which supports only Poisson and cyclic cohorts"
    ):
        privacy.epsilon(1.0, 1e-5, 3, cohort_size=2, num_clients=4, accountant="pld")
    with pytest.raises(ValueError, match="accountant is 'prv'; it must be one of"):
        privacy.epsilon(1.0, 1e-5, 3, cohort_size=2, num_clients=4, accountant="prv")


KINDS = ("without_replacement rdp", "poisson rdp", "poisson pld", "cyclic rdp", "cyclic pld")
GRID = list(itertools.product(KINDS, (0.01, 0.1, 0.2, 0.5, 0.9, 1), (0.5, 1, 2)))
FEW = [(kind, 0.2, 0.5) for kind in KINDS if kind != "poisson pld"]
FEW += [("poisson rdp", 0.5, 2), ("poisson rdp", 0.9, 1)]


def said_by_the_library(kind, q, z, rounds, delta=1e-5):
    """Of one client in a hundred, composed by dp_accounting itself; after so many rounds each."""
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import pld_privacy_accountant
    from dp_accounting.rdp import RdpAccountant

    sampling, accountant = kind.split()
    event, relation = dp.GaussianDpEvent(z / 2), dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if sampling == "without_replacement":
        relation = dp.NeighboringRelation.REPLACE_ONE
        event = dp.SampledWithoutReplacementDpEvent(100, round(100 * q), event)
    elif sampling == "poisson":
        event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z))
    if kind == "cyclic pld":  # how often a client came, as one Gaussian mechanism
        turns = math.ceil(100 / round(100 * q))
        times = [math.ceil(count / turns) for count in rounds]
        return [dp.get_epsilon_gaussian(z / 2 / math.sqrt(k), delta) for k in times]
    if accountant == "rdp":
        composed = RdpAccountant(neighboring_relation=relation)
    else:
        composed = pld_privacy_accountant.PLDAccountant(neighboring_relation=relation)
    done, epsilons = 0, []
    for count in rounds:
        if sampling == "cyclic":
            count = math.ceil(count / math.ceil(100 / round(100 * q)))
        if count > done:
            composed.compose(event, count - done)
            done = count
        epsilons.append(composed.get_epsilon(delta))
    return epsilons


def exact_of_one_round(q, z, delta=1e-5):
    """Of a Poisson cohort: the loss rises with the noised sum, so that both tails are normal."""

    def above(epsilon):  # one client more against one less, and the other way round
        likely, cdf = (math.exp(epsilon) - 1 + q) / q, stats.norm.cdf
        at = z**2 * math.log(likely) + 0.5
        more = (1 - q) * cdf(-at / z) + q * cdf((1 - at) / z) - math.exp(epsilon) * cdf(-at / z)
        unlikely = (math.exp(-epsilon) - 1 + q) / q
        if unlikely <= 0:
            return more
        at = z**2 * math.log(unlikely) + 0.5
        with_one = (1 - q) * cdf(at / z) + q * cdf((at - 1) / z)
        return max(more, cdf(at / z) - math.exp(epsilon) * with_one)

    return optimize.brentq(lambda epsilon: above(epsilon) - delta, 1e-6, 50)


@pytest.mark.parametrize(
    ("kind", "q", "z"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.slow) for case in GRID],
)
def test_epsilon_is_at_least_the_librarys_and_grows(kind, q, z):
    """After 1, 2 and 10 rounds, for the cohort as for the accountant."""
    sampling, accountant = kind.split()
    rounds = (1, 2, 10)
    among = {"cohort_size": round(100 * q), "num_clients": 100, "sampling": sampling}
    ours = [privacy.epsilon(z, 1e-5, t, accountant=accountant, **among) for t in rounds]
    assert ours == pytest.approx(said_by_the_library(kind, q, z, rounds), rel=1e-9)
    assert 0 < ours[0] <= ours[1] <= ours[2]
    if kind == "poisson rdp" and q < 1:
        assert exact_of_one_round(q, z) <= ours[0]


def test_the_noise_for_the_epsilon_of_one_round():
    """8 is reached, by the library's own account, and just so."""
    among = {"cohort_size": 20, "num_clients": 100, "sampling": "poisson"}
    z = privacy.noise_multiplier(8.0, 1e-5, 1, **among)
    assert said_by_the_library("poisson rdp", 0.2, z, [1])[0] <= 8
    assert said_by_the_library("poisson rdp", 0.2, z / 1.002, [1])[0] > 8


def test_first_sums_of_a_single_round():
    """The noise of other rounds, of which there are none, plays no part."""
    among = {"cohort_size": 20, "num_clients": 100, "sampling": "poisson"}
    two = privacy.epsilon(1.0, 1e-5, 1, first_exchanges=2, **among)
    assert two == privacy.epsilon(1 / math.sqrt(2), 1e-5, 1, **among) > 0


def test_what_the_library_warns_of_is_heard(caplog):
    """But for the orders that it leaves out, of which there are dozens."""
    among = {"cohort_size": 37, "num_clients": 100, "sampling": "poisson"}
    with caplog.at_level(logging.WARNING, logger="absl"):
        privacy.epsilon(0.77, 1e-5, 1, **among)
        assert caplog.text == ""
        logging.getLogger("absl").warning("Negative divergence")
    assert "Negative divergence" in caplog.text


def test_noise_too_small_to_square_is_none():
    among = {"cohort_size": 20, "num_clients": 100, "sampling": "poisson"}
    assert privacy.epsilon(1e-200, 1e-5, 1, **among) == math.inf
