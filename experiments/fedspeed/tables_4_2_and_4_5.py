"""FedSpeed's Tables 4.2 and 4.5: 2 % of the clients a round, and stronger heterogeneity.

Paper: Sun, thesis of 2023, sections 4.2 and 4.3: 500 clients, 10 of them a round, 2 local epochs,
batch 20, 1500 rounds (3000 on Tiny-ImageNet), iid and Dirichlet 0.6; Table 4.5 adds 0.3 on
CIFAR-10. The lower part of Table 4.4, rounds to a target, is of the same runs.

    python -m experiments.fedspeed tables_4_2_and_4_5
"""

from experiments.fedspeed.tables_4_3_and_4_4 import (
    NAMES,
    machine_setting,
    paper_setting,
    rows,
    twice,
)
from experiments.studies.study import Column, Scale, Study, smoke

_PARTITIONS = {
    "iid": "iid",
    "dirichlet_equal:0.6": "dirichlet:0.6",
    "dirichlet_equal:0.3": "dirichlet:0.3",
}
_OF_500 = {"num_clients": 500, "cohort_size": 10, "batch_size": 20, "local_epochs": 2}
_OF_250 = {"num_clients": 250, "cohort_size": 5, "batch_size": 20, "local_steps": 12}


def _numbers(printed, partition):
    return {
        "table": "4.2|4.4|4.5",
        "dataset": printed,
        "num_clients": "500",
        "partition": _PARTITIONS[partition],
    }


def _columns(dataset, printed, rounds, partitions):
    return {
        f"{printed}, {partition}": Column(
            paper_setting(dataset, partition, rounds, **_OF_500),
            rounds // 5,
            _numbers(printed, partition),
        )
        for partition in partitions
    }


STUDY = Study(
    name="fedspeed/tables_4_2_and_4_5",
    title="Tables 4.2 and 4.5: 2 % of the clients a round",
    notes="""\
The setting of Tables 4.3 and 4.4 with 2 % of the clients a round, batch 20, prox_weight 0.001 and,
for FedDyn and FedSpeed, learning rates times 0.9998 per round. Nothing is tuned. With so small a
weight the local steps are almost those of FedAvg; what the server adds does not depend on it: the
dual divided by the weight, which is the sum of a client's past changes. Tiny-ImageNet is read from
tiny_imagenet.npz.

On two cores: Fashion-MNIST, the MLP 784-200-100-10, 250 clients in place of 500 so that each is
seen more than once, 5 of them a round, 12 local steps (one epoch in place of two), 150 rounds in
place of 1500. The decays are not rescaled: learning rates end at 0.74 (0.998) and 0.97 (0.9998) of
the first, where the paper's end at 0.05 and 0.74. The paper's column has CIFAR-10 with ResNet-18 at
the same heterogeneity.""",
    methods=rows(0.001, 0.9998, 0.9995),
    scales={
        "paper": Scale(
            columns={
                **_columns("cifar10", "CIFAR-10", 1500, tuple(_PARTITIONS)),
                **_columns("cifar100", "CIFAR-100", 1500, tuple(_PARTITIONS)[:2]),
                **_columns("npz:tiny_imagenet.npz", "Tiny-ImageNet", 3000, tuple(_PARTITIONS)[:2]),
            },
            hardware="1 GPU",
            minutes=1200,
        ),
        "machine": Scale(
            columns=twice(
                {
                    partition: Column(
                        machine_setting(partition, **_OF_250, rounds=150),
                        50,
                        _numbers("CIFAR-10", partition),
                    )
                    for partition in _PARTITIONS
                },
                NAMES,
            ),
            minutes=13,
        ),
        "smoke": smoke(50, 1, ("FedDyn", "FedSpeed"), partition="dirichlet_equal:0.3"),
    },
)
