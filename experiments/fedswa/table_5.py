"""FedSWA's Table 5: ten clients that all take part in every round.

Paper: Liu et al., ICML 2025, Table 5: CIFAR-100, ResNet-18, 300 rounds.

    python -m experiments.fedswa table_5
"""

from experiments.fedswa.tables_2_3_and_6 import (
    LRS,
    MLP,
    machine_setting,
    paper_setting,
    rows,
)
from experiments.studies.study import Column, Scale, Study, smoke

_PAPER = {"table": "5"}
_ALL = {"num_clients": 10, "cohort_size": 10}
_NAMES = (
    "FedAvg",
    "SCAFFOLD",
    "FedSAM",
    "MoFedSAM",
    "FedLESAM",
    "FedSWA",
    "FedMo",
    "FedMoSWA",
)

STUDY = Study(
    name="fedswa/table_5",
    title="Table 5: full participation of ten clients",
    notes="""\
Where all clients take part there is no cohort to be drawn, and what is left of FedMoSWA's advantage
is not that of fresher controls. The partition is not stated: Dirichlet 0.6 as in Table 6 at the
paper's scale. Everything else is as in Tables 2, 3 and 6.

On two cores: Fashion-MNIST at Dirichlet 0.1, the MLP 784-200-100-10, 10 local steps, 60 rounds in
place of 300, three learning rates of the grid. The paper's column has CIFAR-100.""",
    methods=rows(_NAMES, LRS),
    scales={
        "paper": Scale(
            columns={
                "CIFAR-100, ResNet-18": Column(
                    {
                        **paper_setting("cifar100", "resnet18", "dirichlet_equal:0.6", 300),
                        **_ALL,
                    },
                    60,
                    _PAPER,
                )
            },
            hardware="8 GPUs",
            minutes=2500,
        ),
        "machine": Scale(
            columns={"dirichlet_equal:0.1": Column(machine_setting(MLP, **_ALL), 20, _PAPER)},
            minutes=8,
            grid_points=3,
        ),
        "smoke": smoke(10, 10, ("SCAFFOLD", "FedMoSWA"), partition="dirichlet_equal:0.1"),
    },
    paper_head="paper, CIFAR-100 %",
)
