"""The table of degenerate limits: at the edge of its parameters a method becomes another."""

from tests.algorithms.limits import (
    averaging,
    cfedavg,
    client_momentum,
    control_variates,
    dynamic_reg,
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

FAMILIES = (
    averaging,
    cfedavg,
    client_momentum,
    control_variates,
    dynamic_reg,
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
TABLE = [limit for family in FAMILIES for limit in family.TABLE]
