"""Every method with its NumPy twin: the table that all tests over the catalogue read."""

from tests.algorithms.cases import (
    averaging,
    cfedavg,
    control_variates,
    fafed,
    fedspeed,
    fedswa,
    gradma,
)
from tests.algorithms.cases.base import Case, N

__all__ = ["CASES", "MAIN", "Case", "N"]

FAMILIES = (averaging, cfedavg, control_variates, fafed, fedspeed, fedswa, gradma)
CASES = [case for family in FAMILIES for case in family.CASES]
MAIN = [case for case in CASES if case.main]
