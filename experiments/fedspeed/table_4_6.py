"""FedSpeed's Table 4.6: its three modules.

Paper: Sun, thesis of 2023, Table 4.6: CIFAR-10, 10 of 100 clients, 500 rounds.

    python -m experiments.fedspeed table_4_6
"""

from experiments.fedspeed.tables_4_3_and_4_4 import SLOW, ablation_scales, method
from experiments.studies.study import Study

_PROX = {"prox_weight": 0.1}

METHODS = {
    "FedAvg (no module)": method("fedavg", SLOW),
    "FedSpeed (prox-term only)": method(
        "fedspeed", 0.9995, **_PROX, correction=False, perturbation_radius=0.0
    ),
    "FedSpeed (prox-term + prox-correction)": method(
        "fedspeed", 0.9995, **_PROX, perturbation_radius=0.0
    ),
    "FedSpeed (prox-term + gradient perturbation)": method(
        "fedspeed", 0.9995, **_PROX, correction=False, perturbation_radius=0.1
    ),
    "FedSpeed (prox-term + prox-correction + gradient perturbation)": method(
        "fedspeed", 0.9995, **_PROX, perturbation_radius=0.1
    ),
}

STUDY = Study(
    name="fedspeed/table_4_6",
    title="Table 4.6: the modules of FedSpeed",
    notes="""\
The setting of Tables 4.3 and 4.4, 500 rounds at the paper's scale. Nothing is tuned. The paper
does not say the partition; Dirichlet 0.6 here. Prox-term: prox_weight 0.1. Prox-correction:
`correction`, the clients' duals. Gradient perturbation: perturbation_radius 0.1. FedAvg's learning
rate falls by 0.998 per round, the others' by 0.9995.

On two cores: Fashion-MNIST, the MLP 784-200-100-10, 10 local steps, 60 rounds. The paper's column
has CIFAR-10 with ResNet-18.""",
    methods=METHODS,
    scales=ablation_scales("4.6", tuple(METHODS)[1:3], minutes=4, paper_minutes=150),
    paper_head="paper, CIFAR-10 %",
)
