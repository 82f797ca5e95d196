"""Means over seeds, with their 95 % intervals."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_LONG = 1e9  # such as a loss that is about to diverge; all its digits would say nothing
_MANY_DECIMALS = 12  # beyond these, of tiny errors, powers of ten
NOTHING = "-"  # in a table, for a value that does not exist


class Estimate(NamedTuple):
    """A mean over seeds.

    Attributes:
      mean: NaN if a seed has no value.
      half_width: of the 95 % interval (Student's t); None for a single seed.
      n: number of seeds.
    """

    mean: float
    half_width: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Compute the mean and 95 % interval of independent values: mean ± t(0.975, n - 1) s / sqrt(n).

    Args:
      values: one value for each seed; a NaN makes the estimate NaN.

    Raises:
      ValueError: there are no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("values is empty; there must be at least one.")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    # Without squares, which may overflow.
    deviation = math.hypot(*(value - mean for value in values)) / math.sqrt(n - 1)
    return Estimate(mean, standard_errors(n) * deviation / math.sqrt(n), n)


def standard_errors(n: int) -> float:
    """Return the half-width of a mean's 95 % interval (Student's t), in standard errors.

    Args:
      n: number of values, at least 2.
    """
    # A dependency of jax that only reports need; scipy.stats takes half a second to import.
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 0.975))


def decimals(values: Iterable[float]) -> int:
    """Return the decimals that show three digits of the smallest value, at least two.

    Args:
      values: any; NaN and 0 do not count.
    """
    sizes = [abs(value) for value in values if math.isfinite(value) and value != 0]
    return max(2, 2 - math.floor(math.log10(min(sizes)))) if sizes else 2


def digits_of(values: Iterable[float], is_error: bool) -> int:
    """Return the decimals of a column of scores: two, or of errors what their size needs.

    Args:
      values: the scores, as for ``decimals``.
      is_error: whether they are errors.
    """
    return decimals(values) if is_error else 2


def digits_of_amount(amount: float) -> int:
    """Return the decimals of an amount, such as megabytes: one, or below 10 those of three digits.

    Args:
      amount: at least 0; NaN and 0 do not count.
    """
    return decimals([amount]) if amount < 10 else 1


def format_estimate(value: Estimate, digits: int) -> str:
    """Format an estimate, such as "95.12 ± 0.31"; NaN becomes a dash.

    Args:
      value: mean and half-width.
      digits: digits after the decimal point.
    """
    if math.isnan(value.mean):
        return NOTHING
    is_plain = abs(value.mean) < _LONG and digits <= _MANY_DECIMALS
    form = f"z,.{digits}f" if is_plain else ".3g"  # z: no minus before a zero
    text = f"{value.mean:{form}}"
    if value.half_width is None:
        return text
    return f"{text} ± {value.half_width:{form}}"
