"""FAFED's Table 2, high heterogeneity, with the larger batch and the fewer steps of the paper.

Paper: Wu et al., AAAI 2023, Table 2 (c). Its batches rise to 100, and its local steps fall to 5,
with heterogeneity. The study of that table has batch 5 and 10 steps at both levels.

    python -m experiments.fafed large_batch
"""

import dataclasses

from experiments.fafed.table_2 import HIGH, METHODS
from experiments.fafed.table_2 import STUDY as TABLE_2
from experiments.studies.study import Scale, Study, smoke

_SHORT = {"batch_size": 100, "local_steps": 5, "rounds": 60, "eval_every": 6}
_AT_BATCH_5 = TABLE_2.scales["machine"].columns[HIGH]

STUDY = Study(
    name="fafed/large_batch",
    title="Table 2 (c): high heterogeneity with batch 100",
    notes="""\
Table 2's setting at high heterogeneity (`classes_per_client:5`) with batch 100 and q = 5 local
steps, which are among the paper's values, and 60 rounds: 10 passes over the data, where the paper
has 100. Grids and order of tuning are those of Table 2. Ten seeds.""",
    methods=METHODS,
    scales={
        "machine": Scale(
            columns={
                HIGH: dataclasses.replace(
                    _AT_BATCH_5, settings={**_AT_BATCH_5.settings, **_SHORT}, tuning_rounds=18
                )
            },
            minutes=30,
            seeds=tuple(range(11, 21)),
        ),
        "smoke": smoke(10, 10, partition=HIGH),
    },
)
