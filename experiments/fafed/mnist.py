"""FAFED's Figures 2 to 4 on MNIST: training loss of six methods over the rounds.

Paper: Wu et al., AAAI 2023, Figures 2 to 4, with the CNN of its Table 3; the other settings are
those of Table 2. The figures print no numbers.

    python -m experiments.fafed mnist
"""

from experiments.fafed.table_2 import HIGH, LOW, METHODS, paper_columns
from experiments.studies.study import Scale, Study, columns, smoke

_DIGITS = {
    "dataset": "digits",
    "model": "mlp",
    "model_option": {"hidden": [64]},
    "num_clients": 20,
    "cohort_size": 20,
    "batch_size": 5,
    "local_steps": 10,
    "rounds": 100,
    "eval_every": 5,
}

STUDY = Study(
    name="fafed/mnist",
    title="Figures 2 to 4, MNIST: six methods over the rounds",
    notes="""\
Scaled down to the machine: the 1,442 training images 8 x 8 of digits in place of MNIST and an MLP
64-64-10 in place of the CNN; clients, grids, batch 5 and q = 10 as in Table 2. A client has 72
images, so that 100 rounds are 69 passes over them. The paper draws training loss and prints no
numbers.""",
    methods=METHODS,
    scales={
        "paper": Scale(
            columns=paper_columns("mnist", "fafed_cnn_mnist", "MNIST"),
            hardware="1 GPU",
            minutes=900,
        ),
        "machine": Scale(
            columns=columns(_DIGITS, (LOW, HIGH), 20),
            minutes=4,
            held_out=200,
        ),
        "smoke": smoke(10, 10, ("FedAvg", "FAFED"), partition=LOW),
    },
)
