"""Every method with its NumPy twin: the table that all tests over the catalogue read."""

from tests.algorithms.cases import (
    averaging,
    cfedavg,
    client_momentum,
    control_variates,
    dynamic_reg,
    fafed,
    fednova,
    fedspeed,
    fedswa,
    gradma,
    memory,
    personal,
    proximal,
    representation,
    sharpness,
    stem,
)
from tests.algorithms.cases.base import Case, N

__all__ = ["CASES", "MAIN", "Case", "N"]

FAMILIES = (
    averaging,
    cfedavg,
    client_momentum,
    control_variates,
    dynamic_reg,
    fafed,
    fednova,
    fedspeed,
    fedswa,
    gradma,
    memory,
    personal,
    proximal,
    representation,
    sharpness,
    stem,
)
CASES = [case for family in FAMILIES for case in family.CASES]
MAIN = [case for case in CASES if case.main]
