"""The privacy loss of Poisson-sampled Gaussian noise, by numerical convolution.

Koskela, Jälkö, Honkela: Computing Tight Differential Privacy Guarantees Using FFT. AISTATS 2020.
One client's message changes a sum by 1; it is in the sum with probability q; the noise has standard
deviation sigma.
"""

import numpy as np
from scipy import stats
from scipy.optimize import brentq

STEP = 5e-5
REACH = 30.0


def _loss_masses(q, sigma, removed):
    """(grid, probability of each loss) of one round."""
    grid = np.arange(-REACH, REACH, STEP)
    edges = grid - STEP / 2
    # log((1 - q) + q exp((2 x - 1) / (2 sigma^2))) lies below an edge where x lies below this.
    signed = edges if removed else -edges
    inner = np.expm1(signed) + q
    x = np.full_like(signed, -np.inf)
    x[inner > 0] = sigma**2 * np.log(inner[inner > 0] / q) + 0.5
    plain, shifted = stats.norm.cdf(x / sigma), stats.norm.cdf((x - 1) / sigma)
    below = (1 - q) * plain + q * shifted if removed else 1 - plain
    return grid, np.diff(below, append=1.0)


def epsilon_of(delta, q, sigma, rounds):
    """The epsilon of so many rounds at a delta."""
    spent = _composed(q, sigma, rounds)
    return brentq(lambda e: max(_delta(e, *one) for one in spent) - delta, 0.0, 25.0, xtol=1e-6)


def _composed(q, sigma, rounds):
    both = []
    for removed in (True, False):
        grid, masses = _loss_masses(q, sigma, removed)
        start = np.roll(masses, -(len(grid) // 2))  # the loss 0 first
        power = np.fft.irfft(np.fft.rfft(start) ** rounds, len(grid))
        both.append((grid, np.roll(power, len(grid) // 2)))
    return both


def _delta(epsilon, grid, masses):
    above = grid > epsilon
    return float(np.sum(masses[above] * -np.expm1(epsilon - grid[above])))
