"""FedSWA's Table 8: against FedSMOO and FedGAMMA, under three strengths of label skew.

Paper: Liu et al., ICML 2025, appendix, Table 8: CIFAR-100, ResNet-18, Dirichlet 0.1, 0.3 and 0.6.

    python -m experiments.fedswa table_8
"""

from experiments.fedswa.tables_2_3_and_6 import (
    LRS,
    MLP,
    cifar100,
    cifar100_paper,
    machine_setting,
    rows,
)
from experiments.studies.study import Column, Scale, Study, smoke

_ALPHAS = ("0.1", "0.3", "0.6")

STUDY = Study(
    name="fedswa/table_8",
    title="Table 8: against FedSMOO and FedGAMMA",
    notes="""\
Both perturb the gradient as FedSAM does and correct it for the drift of the clients, FedGAMMA with
SCAFFOLD's controls, FedSMOO with FedDyn's duals. Their parameters are not stated: radius 0.01
(FedGAMMA) and 0.1 (FedSMOO), prox_weight 0.1. Everything else is as in Tables 2, 3 and 6, where
FedSWA's and FedMoSWA's numbers come from at the paper's scale.

On two cores: Fashion-MNIST at Dirichlet 0.1, the MLP 784-200-100-10, 10 local steps, 60 rounds,
three learning rates of the grid. The paper's column has CIFAR-100 with ResNet-18 at the same
skew.""",
    methods=rows(("FedSMOO", "FedGAMMA", "FedSWA", "FedMoSWA"), LRS),
    scales={
        "paper": Scale(
            columns={
                f"CIFAR-100, ResNet-18, Dirichlet {alpha}": cifar100(alpha, "8")
                for alpha in _ALPHAS
            },
            hardware="8 GPUs",
            minutes=2000,
        ),
        "machine": Scale(
            columns={
                "dirichlet_equal:0.1": Column(machine_setting(MLP), 20, cifar100_paper("0.1", "8"))
            },
            minutes=5,
            grid_points=3,
        ),
        "smoke": smoke(20, 5, ("FedSMOO", "FedGAMMA"), partition="dirichlet_equal:0.1"),
    },
    paper_head="paper, CIFAR-100 %",
)
