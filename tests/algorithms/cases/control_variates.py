"""Rows of control_variates."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case
from tests.reference.scaffold_numpy import Scaffold

CASES = [
    Case("scaffold", algorithms.scaffold, Scaffold, LR, main=True, uplink=2),
    Case("scaffold-I", algorithms.scaffold, Scaffold, LR | {"control_update": "I"}),
    Case("scaffold-transform", algorithms.scaffold, Scaffold, LR, **TRANSFORM),
]
