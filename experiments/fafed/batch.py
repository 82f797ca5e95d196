"""FAFED's Table 2, high heterogeneity, where only the batch changes: 5 against 100.

No table of the paper. Table 2's study at batch 5 and ``large_batch`` differ in batch, local steps,
rounds and passes over the data at once. A smaller batch changes the passes, the rounds or the
steps, too, so there are three columns at batch 5.

    python -m experiments.fafed batch
"""

import dataclasses

from experiments.fafed.large_batch import STUDY as LARGE_BATCH
from experiments.fafed.table_2 import HIGH, METHODS
from experiments.studies.study import Scale, Study, smoke

_AT_BATCH_100 = LARGE_BATCH.scales["machine"].columns[HIGH]
_LRS = (0.1, 0.05, 0.02, 0.01, 0.2, 0.4)
METHODS_OPEN = {
    name: dataclasses.replace(method, grid={"client_lr": _LRS}) for name, method in METHODS.items()
}
ROUNDS = 30
BATCH_100 = "batch 100"
BATCH_5 = {  # column -> (local steps, rounds)
    "batch 5, same rounds and steps": (5, ROUNDS),
    "batch 5, same steps and passes": (5, 20 * ROUNDS),
    "batch 5, same rounds and passes": (100, ROUNDS),
}


def _column(batch_size, local_steps, rounds):
    changed = {
        "batch_size": batch_size,
        "local_steps": local_steps,
        "rounds": rounds,
        "eval_every": rounds // 10,
    }
    return dataclasses.replace(
        _AT_BATCH_100,
        settings={**_AT_BATCH_100.settings, **changed},
        tuning_rounds=rounds // 5,
        paper={},
    )


STUDY = Study(
    name="fafed/batch",
    title="Table 2 (c): only the batch changes",
    notes="""\
The setting of `large_batch`, Table 2's at high heterogeneity, with half of its rounds: q = 5 local
steps and 30 rounds, which are 5 passes over the data. Batch 5 in place of 100 has the same rounds
and steps with a quarter of a pass; the same steps and passes with 600 rounds; or the same rounds
and passes with 100 steps. client_lr is from {0.01, 0.02, 0.05, 0.1, 0.2, 0.4}: beyond the paper's
0.1, where five methods end, and without its 0.001. The other grids and the order of tuning are
those of Table 2, with a fifth of the rounds.""",
    methods=METHODS_OPEN,
    scales={
        "machine": Scale(
            columns={
                BATCH_100: _column(100, 5, ROUNDS),
                **{name: _column(5, *work) for name, work in BATCH_5.items()},
            },
            minutes=40,
        ),
        "smoke": smoke(10, 10, partition=HIGH),
    },
)
