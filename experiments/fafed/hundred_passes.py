"""FAFED's Table 2 (c) at its own length: 100 passes over the data, with open rates.

Paper: Wu et al., AAAI 2023, Table 2 (c): high heterogeneity, batch 100, 5 local steps. Its claims
were written before its runs.

    python -m experiments.fafed hundred_passes
"""

import dataclasses

from experiments.fafed.batch import METHODS_OPEN
from experiments.fafed.large_batch import STUDY as LARGE_BATCH
from experiments.fafed.table_2 import HIGH
from experiments.studies.study import Scale, Study, smoke

_AT_10_PASSES = LARGE_BATCH.scales["machine"].columns[HIGH]

STUDY = Study(
    name="fafed/hundred_passes",
    title="Table 2 (c): high heterogeneity with batch 100 and the paper's 100 passes",
    notes="""\
The setting of `large_batch`, Table 2's at high heterogeneity with batch 100 and q = 5 local steps,
with 600 rounds: the paper's 100 passes over the data. client_lr is from {0.01, 0.02, 0.05, 0.1,
0.2, 0.4}, as in `batch`: beyond the paper's 0.1, at which five methods end after 10 passes, and
without its 0.001. The other grids and the order of tuning are those of Table 2, with a fifth of the
rounds.""",
    methods=METHODS_OPEN,
    scales={
        "machine": Scale(
            columns={
                HIGH: dataclasses.replace(
                    _AT_10_PASSES,
                    settings={**_AT_10_PASSES.settings, "rounds": 600, "eval_every": 20},
                    tuning_rounds=120,
                )
            },
            minutes=150,
        ),
        "smoke": smoke(10, 10, partition=HIGH),
    },
)
