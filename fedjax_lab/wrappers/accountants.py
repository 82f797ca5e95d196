"""The privacy that noise and client sampling give: epsilon, and the noise for an epsilon.

The accountants come from the library dp-accounting (extra ``privacy``).

- "rdp", Rényi differential privacy. Cohorts of fixed size: Wang, Balle, Kasiviswanathan: Subsampled
  Rényi Differential Privacy and Analytical Moments Accountant. AISTATS 2019, Theorem 27. Poisson
  cohorts: Mironov, Talwar, Zhang: Rényi Differential Privacy of the Sampled Gaussian Mechanism,
  2019.
- "pld", the privacy loss distribution, not for cohorts of fixed size. Poisson cohorts: Koskela,
  Jälkö, Honkela: Computing Tight Differential Privacy Guarantees Using FFT. AISTATS 2020. It is
  tight up to its grid: never above "rdp", and half of it for little noise and cohorts of a
  thousandth of the clients. If the grid gives no number (multipliers below 0.2, tiny delta), "rdp"
  is used. All rounds of cyclic cohorts together are one Gaussian mechanism, whose epsilon has a
  closed form: Balle, Wang: Improving the Gaussian Mechanism for Differential Privacy. ICML 2018.

=====================  =================================  ===========================
sampling               neighbours                         one client changes the sum
=====================  =================================  ===========================
"without_replacement"  one client is replaced by another  by at most 2 clip_norm
"poisson"              one client is added or removed     by at most clip_norm
"cyclic"               one client is replaced by another  by at most 2 clip_norm
=====================  =================================  ===========================

The first two assume that the cohorts stay secret; "cyclic" does not.
"""

import functools
import logging
import math
from types import ModuleType
from typing import Any

import numpy as np

from fedjax_lab.checks import MOST_ROUNDS, check_choice, check_int, check_number, check_share, warn
from fedjax_lab.data.cyclic import turns
from fedjax_lab.machine.extras import imported
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.wrappers.correlated import sensitivity

ACCOUNTED = ("cyclic", "poisson", "without_replacement")  # values of ``sampling``
ACCOUNTANTS = ("pld", "rdp")
_LEAST_NOISE = 0.2  # below this multiplier a loss distribution takes gigabytes and minutes
_NO_NOISE = 1e-100  # below this multiplier the accountants cannot compute the square
_MOST_BANDS = 10_000  # each one except the first is a model in the server's state


@suggest_keywords
def epsilon(
    noise_multiplier: float,
    delta: float,
    rounds: int,
    *,
    cohort_size: int,
    num_clients: int,
    sampling: str = "without_replacement",
    exchanges: int = 1,
    first_exchanges: int | None = None,
    accountant: str = "rdp",
    noise_bands: int = 1,
) -> float:
    """Compute the epsilon of (epsilon, delta)-differential privacy after a number of rounds.

    Args:
      noise_multiplier: standard deviation of the noise on a sum of messages, divided by the clip
        norm.
      delta: in (0, 1); a value above 1 / num_clients causes a warning.
      rounds: number of rounds, at least 0.
      cohort_size: clients in a round; with "poisson" the expected number, with "cyclic" the largest
        one.
      num_clients: number of clients from which the cohort is sampled.
      sampling: "without_replacement", "poisson" or "cyclic", as in ``simulate``.
      exchanges: number of noised sums of a round, such as 2 in Mime.
      first_exchanges: number of noised sums of the first round; None: ``exchanges``.
      accountant: "rdp" (Rényi divergences), or "pld" (the distribution of the privacy loss), which
        is tighter and does not support "without_replacement". The rows of runs with "poisson" or
        "cyclic" use "pld"; a multiplier that was found with "rdp" is larger than they need.
      noise_bands: as in ``with_dp``; above 1 only with "cyclic".

    Returns:
      Epsilon; infinity without noise.

    Raises:
      TypeError, ValueError: an argument is out of range.
      ImportError: dp-accounting is not installed.
    """
    check_number("noise_multiplier", noise_multiplier, minimum=0.0)
    check_share("delta", delta)
    check_int("rounds", rounds, minimum=0, maximum=MOST_ROUNDS)
    check_int("num_clients", num_clients, minimum=1)
    check_int("cohort_size", cohort_size, minimum=1, maximum=num_clients)
    check_choice("sampling", sampling, ACCOUNTED)
    check_int("exchanges", exchanges, minimum=1)
    check_choice("accountant", accountant, ACCOUNTANTS)
    if accountant == "pld" and sampling == "without_replacement":
        raise ValueError(
            "accountant is 'pld', which supports only Poisson and cyclic cohorts; use "
            "sampling='poisson' or 'cyclic', or accountant 'rdp'."
        )
    check_bands(noise_bands, sampling)
    if delta * num_clients > 1:
        warn(
            f"delta is {delta} with {num_clients:,} clients; it should be well below "
            f"{1 / num_clients:g}, the delta of publishing one client chosen at random.",
        )
    first = exchanges if first_exchanges is None else first_exchanges
    check_int("first_exchanges", first, minimum=1)
    if rounds == 0:
        return 0.0
    if noise_multiplier < _NO_NOISE:
        return math.inf
    dp = _library()
    if sampling == "cyclic":
        separation = turns(cohort_size, num_clients)
        squared = exchanges * sensitivity(noise_bands, rounds, separation) ** 2 + first - exchanges
        multiplier = noise_multiplier / (2 * math.sqrt(squared))
        if accountant == "pld":
            return float(dp.get_epsilon_gaussian(multiplier, delta))
        accounted = dp.rdp.RdpAccountant()
        accounted.compose(dp.GaussianDpEvent(multiplier))
        return float(accounted.get_epsilon(delta))
    # n sums with noise z cost as much as one sum with noise z / sqrt(n).
    regular, opening = (noise_multiplier / math.sqrt(count) for count in (exchanges, first))
    parts = [(regular, rounds)] if first == exchanges else [(opening, 1), (regular, rounds - 1)]
    parts = [(multiplier, count) for multiplier, count in parts if count]
    if accountant == "pld":
        tight = _by_loss_distribution(tuple(parts), cohort_size / num_clients, delta)
        if math.isfinite(tight):
            return tight
    return _by_renyi_divergence(parts, cohort_size, num_clients, sampling, delta)


_epsilon = epsilon  # by another name, where ``epsilon`` is an argument


@suggest_keywords
def noise_multiplier(
    epsilon: float,
    delta: float,
    rounds: int,
    *,
    cohort_size: int,
    num_clients: int,
    sampling: str = "without_replacement",
    exchanges: int = 1,
    accountant: str = "rdp",
    noise_bands: int = 1,
) -> float:
    """Find the smallest noise multiplier for a given epsilon and number of rounds.

    Args:
      epsilon: largest epsilon after all rounds, above 0.
      delta, cohort_size, num_clients, sampling, exchanges, accountant, noise_bands: as in
        ``epsilon``.
      rounds: number of rounds, at least 1.

    Returns:
      The multiplier, rounded up, to within a thousandth.

    Raises:
      TypeError, ValueError: an argument is out of range, or no multiplier up to 10^6 suffices.
      ImportError: dp-accounting is not installed.
    """
    check_number("epsilon", epsilon, minimum=0.0, exclusive_minimum=True)
    check_int("rounds", rounds, minimum=1)
    among: dict[str, Any] = {
        "cohort_size": cohort_size,
        "num_clients": num_clients,
        "sampling": sampling,
        "exchanges": exchanges,
        "accountant": accountant,
        "noise_bands": noise_bands,
    }

    def spent(multiplier: float) -> float:
        return _epsilon(multiplier, delta, rounds, **among)

    low, high = 0.0, 1.0
    spent(low)  # checks the arguments
    if accountant == "pld":  # slow, and never above "rdp"
        high = noise_multiplier(epsilon, delta, rounds, **{**among, "accountant": "rdp"})
        low = 0.8 * high
        while spent(low) <= epsilon:
            low, high = 0.8 * low, low
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise ValueError(
                f"epsilon is {epsilon}; no noise multiplier up to 1e6 suffices for {rounds} rounds."
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high


@functools.lru_cache(maxsize=256)
def _by_loss_distribution(
    parts: tuple[tuple[float, int], ...], probability: float, delta: float
) -> float:
    """Compute epsilon of Poisson cohorts; infinity if the grid is too coarse or would be too large.

    Parts: (noise multiplier, rounds).
    """
    if min(multiplier for multiplier, _ in parts) < _LEAST_NOISE:
        return math.inf
    from dp_accounting.pld import PLDAccountant

    dp, spent = _library(), PLDAccountant()
    for multiplier, count in parts:
        gaussian = dp.GaussianDpEvent(multiplier)
        spent.compose(dp.PoissonSampledDpEvent(probability, gaussian), count)
    return float(spent.get_epsilon(delta))


def _by_renyi_divergence(
    parts: list[tuple[float, int]], cohort_size: int, num_clients: int, sampling: str, delta: float
) -> float:
    """Compute epsilon of fixed or Poisson cohorts; infinity if no order has a bound.

    Parts: (noise multiplier, rounds, at least 1).
    """
    total = np.zeros(())
    for multiplier, count in parts:
        orders, rdp = _one_round(multiplier, cohort_size, num_clients, sampling)
        total = total + count * rdp
    # A divergence is at least 0, and infinite at an order whose series does not converge.
    is_bound = np.isfinite(total) & (total >= 0)
    if not is_bound.any():
        return math.inf
    orders, total = orders[is_bound], total[is_bound]
    return float(_library().rdp.compute_epsilon(orders, total, delta)[0])


@functools.lru_cache(maxsize=256)
def _one_round(
    multiplier: float, cohort_size: int, num_clients: int, sampling: str
) -> tuple[Any, np.ndarray]:
    """Compute (orders, RDP of one round at each order; infinite without a bound)."""
    dp = _library()
    neighbours = dp.NeighboringRelation
    if sampling == "poisson":
        relation = neighbours.ADD_OR_REMOVE_ONE
        event = dp.PoissonSampledDpEvent(cohort_size / num_clients, dp.GaussianDpEvent(multiplier))
    else:
        relation = neighbours.REPLACE_ONE
        event = dp.SampledWithoutReplacementDpEvent(
            num_clients, cohort_size, dp.GaussianDpEvent(multiplier / 2)
        )
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation)
    log = logging.getLogger("absl")
    log.addFilter(_tells_more)
    try:
        accountant.compose(event)
    finally:
        log.removeFilter(_tells_more)
    return accountant.orders, np.asarray(accountant.rdp)


def _tells_more(record: logging.LogRecord) -> bool:
    """Filter out messages about omitted orders near 1; the other orders give bounds, too."""
    return "failed to converge" not in str(record.msg)


def _library() -> ModuleType:
    needs = "epsilon needs the package dp-accounting"
    imported("dp_accounting.rdp", needs, "privacy")  # an attribute of the package from now on
    return imported("dp_accounting", needs, "privacy")


def check_bands(bands: int, sampling: str | None = None) -> None:
    """Check the number of noise bands.

    Args:
      sampling: as in ``simulate``; None: not known yet.

    Raises:
      TypeError, ValueError: ``bands`` is out of range, or above 1 for a sampling in which a client
        may participate in consecutive rounds.
    """
    check_int("noise_bands", bands, minimum=1, maximum=_MOST_BANDS)
    if bands > 1 and sampling not in (None, "cyclic"):
        raise ValueError(
            f"noise_bands is {bands} and sampling {sampling!r}; the privacy cost of correlated "
            "noise depends on the rounds between two participations of a client, which are only "
            "known for sampling='cyclic'."
        )
