"""Rows of gradma."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, Case, N
from tests.reference import problem as reference
from tests.reference.gradma_numpy import GradMA, GradMAS, GradMAW

PER_LEAF = {"options": LR | {"qp_scope": "per_leaf"}, "only_twin": {"leaves": reference.LEAVES}}
MEMORY = {"memory_size": 5, "server_momentum": 0.7, "memory_decay": 0.5}
ROOMY = MEMORY | {"memory_size": N}  # where nobody is discarded, the order of a cohort is nothing

CASES = [
    Case("gradma", algorithms.gradma, GradMA, LR | ROOMY, main=True),
    Case("gradma-keep", algorithms.gradma, GradMA, LR | MEMORY | {"keep_local_model": True}),
    Case("gradma_s-small", algorithms.gradma_s, GradMAS, LR | MEMORY),
    Case("gradma_w", algorithms.gradma_w, GradMAW, LR, main=True),
    Case("gradma_w-keep", algorithms.gradma_w, GradMAW, LR | {"keep_local_model": True}),
    Case("gradma_w-per_leaf", algorithms.gradma_w, GradMAW, **PER_LEAF),
    Case("gradma_s", algorithms.gradma_s, GradMAS, LR | ROOMY, main=True),
    Case(
        "gradma_s-per_leaf",
        algorithms.gradma_s,
        GradMAS,
        LR | MEMORY | {"qp_scope": "per_leaf"},
        only_twin={"leaves": reference.LEAVES},
    ),
    Case(
        "gradma_s-projected_gradient",
        algorithms.gradma_s,
        GradMAS,
        LR | MEMORY,
        only_factory={"qp_solver": "projected_gradient"},
    ),
    Case("gradma_s-margin", algorithms.gradma_s, GradMAS, LR | MEMORY | {"margin": 0.05}),
    Case("gradma_s-no_memory", algorithms.gradma_s, GradMAS, LR | MEMORY | {"memory_size": 0}),
]
