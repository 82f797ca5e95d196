"""FedSWA's Figures 1, 4 and 6: how flat the loss is around the last model.

Paper: Liu et al., ICML 2025: training loss surfaces on CIFAR-100, ResNet-18, Dirichlet 0.1.

    python -m experiments.fedswa figures_1_and_4
"""

import dataclasses

from experiments.fedswa.tables_2_3_and_6 import (
    FIXED,
    MLP,
    cifar100,
    cifar100_paper,
    machine_setting,
    rows,
)
from experiments.studies.study import Column, Scale, Study, smoke

_NAMES = ("FedAvg", "SCAFFOLD", "FedSAM", "MoFedSAM", "FedLESAM", "FedSWA", "FedMoSWA")
_ON_TWO_CORES = ("FedAvg", "FedSAM", "FedSWA", "FedMoSWA")

STUDY = Study(
    name="fedswa/figures_1_and_4",
    title="Figures 1 and 4: flatness of the minima",
    notes="""\
The largest eigenvalue of the training loss' Hessian at the last model of each seed (before the
protocol: of the first alone), and the loss on a plane through the first one's that two
filter-normalised random directions span, both over 2,000 training images. The paper has surfaces
only: it finds those of FedSWA and FedMoSWA flat and low, FedSAM's flat but high. The setting of
Tables 2, 3 and 6 with client_lr 0.1 for all, which is not tuned: curvature depends on the learning
rate, so that equal ones are to be compared.

On two cores: Fashion-MNIST at Dirichlet 0.1, the MLP 784-200-100-10, 10 local steps, 60 rounds,
four methods. The paper's column has CIFAR-100 with ResNet-18 at the same skew.""",
    methods=rows(_NAMES, FIXED),
    scales={
        "paper": Scale(
            columns={"CIFAR-100, ResNet-18, Dirichlet 0.1": cifar100("0.1", "3")},
            hardware="1 GPU",
            minutes=400,
            seeds=(1,),
            landscape=_NAMES,
        ),
        "machine": Scale(
            columns={
                "dirichlet_equal:0.1": Column(machine_setting(MLP), 20, cifar100_paper("0.1", "3"))
            },
            minutes=2,
            methods=_ON_TWO_CORES,
            landscape=_ON_TWO_CORES,
        ),
        "smoke": dataclasses.replace(
            smoke(20, 5, ("FedAvg", "FedSWA"), partition="dirichlet_equal:0.1"),
            landscape=("FedSWA",),
        ),
    },
    paper_head="paper, CIFAR-100 %",
)
