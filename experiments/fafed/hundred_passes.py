"""FAFED's Table 2 (b) and (c) at their own length: 100 passes over the data, with open rates.

Paper: Wu et al., AAAI 2023, Table 2: batch 50 and 10 local steps at medium heterogeneity (b), batch
100 and 5 local steps at high (c). Its claims were written before its runs.

    python -m experiments.fafed hundred_passes
"""

import dataclasses

from experiments.fafed.batch import METHODS_OPEN
from experiments.fafed.table_2 import HIGH, MEDIUM, paper_columns
from experiments.studies.study import Scale, Study, smoke

_COLUMNS = paper_columns("fashion_mnist", "fafed_cnn", "Fashion-MNIST", printed=True)
_LEVELS = {MEDIUM: _COLUMNS["Fashion-MNIST, medium"], HIGH: _COLUMNS["Fashion-MNIST, high"]}

STUDY = Study(
    name="fafed/hundred_passes",
    title="Table 2 (b) and (c): medium and high heterogeneity with the paper's 100 passes",
    notes="""\
Table 2's clients and network with the paper's batch and local steps, and 600 rounds: its 100 passes
over the data. Medium heterogeneity (`dirichlet_equal:1.0`) has batch 50 and q = 10 local steps,
high (`classes_per_client:5`) batch 100 and q = 5, as in `large_batch`. The paper states as an order
alone which batch belongs to which level. client_lr is from {0.01, 0.02, 0.05, 0.1, 0.2, 0.4}, as in
`batch`: beyond the paper's 0.1, at which five methods end after 10 passes, and without its 0.001.
The other grids and the order of tuning are those of Table 2, with a fifth of the rounds.""",
    methods=METHODS_OPEN,
    scales={
        "machine": Scale(
            columns={
                name: dataclasses.replace(column, settings={**column.settings, "eval_every": 20})
                for name, column in _LEVELS.items()
            },
            minutes=270,
        ),
        "smoke": smoke(10, 10, partition=HIGH),
    },
)
