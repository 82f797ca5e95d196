"""GradMA's Tables 1 and 2 on Fashion-MNIST against all 13 baselines, with ten seeds.

Paper: Luo et al., CVPR 2023, Tables 1 and 2, MNIST, S = 10, Dirichlet 0.01 and 0.1: all methods
as the paper writes them and, at 0.01, as its code runs them. Its claims were written before its
runs.

    python -m experiments.gradma all_baselines
"""

from experiments.gradma.tables_1_and_2 import METHODS, allowed, as_published, fashion_columns
from experiments.studies.study import Scale, Study, smoke

# The paper's three groups: improvements on the worker side, on the server side, or both.
WORKER = ("FedAvg", "FedProx", "MOON", "FedMLB", "SCAFFOLD")
SERVER = ("FedAvgM", "MIFA", "MIFAM")
_BOTH = ("FedProxM", "FedMLBM", "MOONM", "FedDyn", "MimeLite")
BASELINES = (*WORKER, *SERVER, *_BOTH)
_METHODS = {name: METHODS[name] for name in (*BASELINES, "GradMA-W", "GradMA-S", "GradMA")}

STUDY = Study(
    name="gradma/all_baselines",
    title="Tables 1 and 2 on Fashion-MNIST: all 13 baselines, ten seeds",
    notes="""\
100 clients, 10 a round, 5 steps of batch 64, the MLP 784-200-100-10, uniform weights, 500 rounds:
the setting of the tables' MNIST columns with Fashion-MNIST in place of MNIST, whose numbers the
paper's column has. "As published" is GradMA's code: weights by examples, BatchNorm after each
hidden layer, and a quadratic program for each parameter array. Learning rates, momentum factors and
proximal weights are those of the paper's grid; pairs of learning rates whose product is outside
0.01 to 0.1 are left out for all methods.""",
    methods=_METHODS,
    scales={
        "machine": Scale(
            columns={
                **fashion_columns("dirichlet:0.01", "dirichlet:0.1"),
                **as_published(fashion_columns("dirichlet:0.01"), tuple(_METHODS)),
            },
            minutes=540,
            seeds=tuple(range(11, 21)),
        ),
        "smoke": smoke(100, 5, ("MIFAM", "GradMA")),
    },
    allowed=allowed,
    paper_head="paper, MNIST %",
)
