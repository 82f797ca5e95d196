"""FAFED's Table 2 at its own length: 100 passes over the data, with open rates.

Paper: Wu et al., AAAI 2023, Table 2: batch 5 and 20 local steps at low heterogeneity (a), 50 and 10
at medium (b), 100 and 5 at high (c). Its claims were written before its runs.

    python -m experiments.fafed hundred_passes
"""

import dataclasses

from experiments.fafed.batch import METHODS_OPEN
from experiments.fafed.table_2 import HIGH, LOW, MEDIUM, paper_columns
from experiments.studies.study import Scale, Study, smoke

_COLUMNS = paper_columns("fashion_mnist", "fafed_cnn", "Fashion-MNIST", printed=True)
_LEVELS = {
    LOW: _COLUMNS["Fashion-MNIST, low"],
    MEDIUM: _COLUMNS["Fashion-MNIST, medium"],
    HIGH: _COLUMNS["Fashion-MNIST, high"],
}
# At low heterogeneity FAFED's best rate of the grid is its smallest.
SMALLER = "FAFED, smaller rates"
_SMALLER_RATES = {"client_lr": (0.01, 0.005, 0.002, 0.001)}
_METHODS = {
    **METHODS_OPEN,
    SMALLER: dataclasses.replace(METHODS_OPEN["FAFED"], grid=_SMALLER_RATES),
}


def _evaluated_less(name, column):
    """As a column of the paper, with half of its evaluations."""
    settings = {**column.settings, "eval_every": column.settings["rounds"] // 30}
    methods = None if name == LOW else tuple(METHODS_OPEN)
    return dataclasses.replace(column, settings=settings, methods=methods)


STUDY = Study(
    name="fafed/hundred_passes",
    title="Table 2: three levels of heterogeneity with the paper's 100 passes",
    notes="""\
Table 2's clients and network with the paper's batch and local steps, and its 100 passes over the
data. Low heterogeneity (`similarity:95`) has batch 5, q = 20 local steps and 3,000 rounds, medium
(`dirichlet_equal:1.0`) batch 50 and q = 10, high (`classes_per_client:5`) batch 100 and q = 5, as
in `large_batch`, both with 600 rounds. The paper states as an order alone which batch belongs to
which level. client_lr is from {0.01, 0.02, 0.05, 0.1, 0.2, 0.4}, as in
`batch`: beyond the paper's 0.1, at which five methods end after 10 passes, and without its 0.001.
At low heterogeneity the row "FAFED, smaller rates" has {0.001, 0.002, 0.005, 0.01}. The other grids
and the order of tuning are those of Table 2, with a fifth of the rounds.""",
    methods=_METHODS,
    scales={
        "machine": Scale(
            columns={name: _evaluated_less(name, column) for name, column in _LEVELS.items()},
            minutes=1000,
        ),
        "smoke": smoke(10, 10, tuple(METHODS_OPEN), partition=HIGH),
    },
)
