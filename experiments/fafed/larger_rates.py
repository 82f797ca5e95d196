"""FAFED's Table 2 with learning rates above its grid, for the methods that chose its largest.

No table of the paper. Its grid ends at 0.1, which FedAvg, SCAFFOLD and STEM choose; do the last two
pass the first where they may step further?

    python -m experiments.fafed larger_rates
"""

import dataclasses

from experiments.fafed.table_2 import HIGH, METHODS
from experiments.fafed.table_2 import STUDY as TABLE_2
from experiments.studies.study import Scale, Study, smoke

_LR = {"client_lr": (0.1, 0.2, 0.4, 0.8)}
_NAMES = ("FedAvg", "SCAFFOLD", "STEM")

STUDY = Study(
    name="fafed/larger_rates",
    title="Table 2 with larger learning rates",
    notes="""\
Table 2's setting with client_lr from {0.1, 0.2, 0.4, 0.8} in place of the paper's 0.001 to 0.1;
STEM's momentum 0.1 or 0.9, as there.""",
    methods={name: dataclasses.replace(METHODS[name], grid=_LR) for name in _NAMES},
    scales={
        "machine": Scale(columns=TABLE_2.scales["machine"].columns, minutes=20),
        "smoke": smoke(10, 10, partition=HIGH),
    },
)
