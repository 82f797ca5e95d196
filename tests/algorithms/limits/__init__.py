"""The table of degenerate limits: at the edge of its parameters a method becomes another."""

from tests.algorithms.limits import averaging, cfedavg, control_variates, fedspeed, fedswa, gradma

FAMILIES = (averaging, cfedavg, control_variates, fedspeed, fedswa, gradma)
TABLE = [limit for family in FAMILIES for limit in family.TABLE]
