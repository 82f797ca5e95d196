"""FedSWA's Table 4 with the learning rate tuned for each rho.

No table of the paper. A smaller rho takes shorter steps: their sum over a round is about
(1 + rho) / 2 of that at rho = 1. At one learning rate for all rows, Table 4 compares these lengths
as well as the shape of the decay.

    python -m experiments.fedswa table_4_rates
"""

import dataclasses

from experiments.fedswa import table_4
from experiments.fedswa.tables_2_3_and_6 import MLP, machine_setting
from experiments.studies.study import Column, Scale, Study, smoke

_LRS = {"client_lr": (0.1, 0.03, 0.3, 1.0)}
_ROWS = tuple(f"FedSWA, rho = {rho}" for rho in ("0.1", "1.0", "1.0, alpha = 1"))

STUDY = Study(
    name="fedswa/table_4_rates",
    title="Table 4 with the learning rate tuned for each rho",
    notes="""\
Table 4's setting on two cores, with client_lr from {0.03, 0.1, 0.3, 1.0} for each row in place of
0.1 for all: a smaller rho takes shorter steps, which a larger rate makes up for. FedSWA only, with
the smallest and the largest rho, and with rho = 1 and alpha = 1. Ten seeds.""",
    methods={name: dataclasses.replace(table_4.STUDY.methods[name], grid=_LRS) for name in _ROWS},
    scales={
        "machine": Scale(
            columns={"dirichlet_equal:0.1": Column(machine_setting(MLP, eval_every=2), 20)},
            minutes=4,
            seeds=tuple(range(11, 21)),
        ),
        "smoke": smoke(20, 5, _ROWS[:2], partition="dirichlet_equal:0.1"),
    },
    axis="final_lr_ratio",
)
