"""FedSpeed's Table 4.7 over the paper's 500 rounds: how far the gradient is perturbed.

Paper: Sun, thesis of 2023, Table 4.7: CIFAR-10, 10 of 100 clients, 500 rounds. The study of that
table has 60 rounds.

    python -m experiments.fedspeed more_rounds
"""

from experiments.fedspeed.tables_4_3_and_4_4 import SLOW, machine_setting
from experiments.fedspeed.tables_4_7_and_4_8 import RADII
from experiments.studies.study import Column, Scale, Study, smoke

_ROWS = tuple(f"FedSpeed, rho_0 = {radius}, alpha = 1" for radius in ("0", "0.01", "0.1", "0.2"))
_SKEWED, _ROUNDS = "dirichlet_equal:0.6", 500
_PUBLISHED = Column(
    {**machine_setting(_SKEWED), "rounds": _ROUNDS, "eval_every": 10},
    100,
    {"table": "4.7"},
    published="FL-Simulator",
    override={"client_lr_schedule": f"exponential:{SLOW}"},
)

STUDY = Study(
    name="fedspeed/more_rounds",
    title="Table 4.7: FedSpeed over rho_0, 500 rounds",
    notes="""\
Table 4.7's study with the paper's 500 rounds in place of 60: Fashion-MNIST at Dirichlet 0.6, the
MLP 784-200-100-10, 10 local steps. Nothing is tuned. Only as published, with the mean of all
clients' duals; as written, with the duals of the cohort, FedSpeed is behind FedAvg (Table 4.6).
Four of the five radii, to save time; 0.05 is not run. Ten seeds.""",
    methods=RADII,
    scales={
        "machine": Scale(
            columns={f"{_SKEWED}, as published": _PUBLISHED},
            minutes=25,
            seeds=tuple(range(11, 21)),
            methods=_ROWS,
        ),
        "smoke": smoke(20, 5, tuple(RADII)[:2], partition=_SKEWED),
    },
    paper_head="paper, CIFAR-10 %",
    axis="perturbation_radius",
)
