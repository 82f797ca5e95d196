"""FAFED's Figures 2 to 4 on CIFAR-10: training loss of six methods over the rounds.

Paper: Wu et al., AAAI 2023, Figures 2 to 4, with the CNN of its Table 5; the other settings are
those of Table 2. The figures print no numbers.

    python -m experiments.fafed cifar10
"""

from experiments.fafed.table_2 import HIGH, METHODS, paper_columns
from experiments.studies.study import Column, Scale, Study, smoke

_DIGITS = {
    "dataset": "digits",
    "model": "fafed_cnn_cifar10",
    "partition": HIGH,
    "num_clients": 20,
    "cohort_size": 20,
    "batch_size": 5,
    "local_steps": 5,
    "rounds": 60,
    "eval_every": 5,
}
_THREE = ("FedAvg", "FedAdam", "FAFED")

STUDY = Study(
    name="fafed/cifar10",
    title="Figures 2 to 4, CIFAR-10: FAFED, FedAdam and FedAvg over the rounds",
    notes="""\
Scaled down to the machine: the layers of the paper's CNN for CIFAR-10 (its Table 5, with the ReLU
after the last one that it prints), on the 1,442 training images 8 x 8 of digits, at high
heterogeneity, q = 5, 60 rounds, the first two values of each grid, three of the six methods. The
paper draws training loss and prints no numbers.""",
    methods=METHODS,
    scales={
        "paper": Scale(
            columns=paper_columns("cifar10", "fafed_cnn_cifar10", "CIFAR-10"),
            hardware="1 GPU",
            minutes=1200,
        ),
        "machine": Scale(
            columns={HIGH: Column(_DIGITS, 20)},
            minutes=3,
            held_out=200,
            grid_points=2,
            methods=_THREE,
        ),
        "smoke": smoke(10, 10, _THREE[::2], partition=HIGH),
    },
)
