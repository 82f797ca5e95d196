"""FedSpeed's Tables 4.6 and 4.7 with tuned learning rates over the paper's 500 rounds.

No table of the paper, which gives all rows one learning rate. Tuned, do the modules add to one
another, and does perturbing gain?

    python -m experiments.fedspeed tuned_rounds
"""

import dataclasses

from experiments.fedspeed.more_rounds import STUDY as MORE_ROUNDS
from experiments.fedspeed.table_4_6 import METHODS as MODULES
from experiments.fedspeed.tables_4_7_and_4_8 import RADII
from experiments.studies.study import Scale, Study, smoke

_LR = {"client_lr": (0.03, 0.1, 0.3, 1.0)}
_RADII = ("FedSpeed, rho_0 = 0.01, alpha = 1", "FedSpeed, rho_0 = 0.2, alpha = 1")
_TUNING_ROUNDS = 160
_COLUMNS = MORE_ROUNDS.scales["machine"].columns

STUDY = Study(
    name="fedspeed/tuned_rounds",
    title="Tables 4.6 and 4.7 with tuned learning rates, 500 rounds",
    notes="""\
Tables 4.6 and 4.7 with the paper's 500 rounds, so that the learning rate falls to the paper's 0.37
of the first, and client_lr from {0.03, 0.1, 0.3, 1} in place of 0.1 for all rows: Fashion-MNIST at
Dirichlet 0.6, the MLP 784-200-100-10, 10 local steps. Only as published, with the mean of all
clients' duals. Prox-term and prox-correction without perturbation are rho_0 = 0, and all three
modules rho_0 = 0.1; 0.05 is not run. Ten seeds.

A first try had rates up to 0.3. Its first two rows, FedAvg and the prox-term alone, chose 0.3, and
it was given up before any other row for this grid, which goes on to 1.""",
    methods={
        name: dataclasses.replace(row, grid=_LR)
        for name, row in {**MODULES, **{name: RADII[name] for name in _RADII}}.items()
    },
    scales={
        "machine": Scale(
            columns={
                name: dataclasses.replace(
                    column, tuning_rounds=_TUNING_ROUNDS, paper={"table": "4.6|4.7"}
                )
                for name, column in _COLUMNS.items()
            },
            minutes=105,
            seeds=tuple(range(11, 21)),
        ),
        "smoke": smoke(20, 5, tuple(MODULES)[1:2], partition="dirichlet_equal:0.6"),
    },
    paper_head="paper, CIFAR-10 %",
)
