"""FedSWA's Table 4: how far the learning rate falls within a round.

Paper: Liu et al., ICML 2025, Table 4: CIFAR-100, ResNet-18, Dirichlet 0.6; rho, the last local
learning rate over the first, from {0.1, 0.2, 0.3, 0.4, 0.7, 0.8, 1.0}.

    python -m experiments.fedswa table_4
"""

from experiments.fedswa.tables_2_3_and_6 import (
    FIXED,
    MLP,
    cifar100,
    cifar100_paper,
    machine_setting,
)
from experiments.studies.study import Column, Method, Scale, Study, smoke

_PAPER = (0.1, 0.2, 0.3, 0.4, 0.7, 0.8, 1.0)
_MACHINE = (0.1, 0.4, 0.7, 1.0)
_METHODS = {"FedSWA": "fedswa", "FedMoSWA": "fedmoswa"}


def _name(method: str, ratio: float) -> str:
    return f"{method}, rho = {ratio}"


def _plain(method: str) -> str:
    return f"{method}, rho = 1.0, alpha = 1"


STUDY = Study(
    name="fedswa/table_4",
    title="Table 4: FedSWA and FedMoSWA over rho",
    notes="""\
rho is `final_lr_ratio`; with 1 the learning rate is constant within a round. The setting of Tables
2, 3 and 6 with client_lr 0.1 for all, which is not tuned, and server_lr (alpha) 1.5. The paper does
not say its alpha. Its numbers at rho = 1.0 are those of FedAvg and FedMo, that is of alpha = 1, so
that its last step is more than one of rho; a row with rho = 1 and alpha = 1 repeats that
comparison. A smaller rho takes shorter steps, too: the sum over the round is about (1 + rho) / 2 of
that at rho = 1.

On two cores: Fashion-MNIST at Dirichlet 0.1 in place of CIFAR-100 at 0.6, the MLP 784-200-100-10,
10 local steps, 60 rounds, four of the seven values. The paper's column has CIFAR-100.""",
    methods={
        _name(name, ratio): Method(algorithm, FIXED, option={"final_lr_ratio": ratio}, at=ratio)
        for name, algorithm in _METHODS.items()
        for ratio in _PAPER
    }
    | {
        _plain(name): Method(
            algorithm, FIXED, option={"final_lr_ratio": 1.0}, settings={"server_lr": 1.0}
        )
        for name, algorithm in _METHODS.items()
    },
    scales={
        "paper": Scale(
            columns={"CIFAR-100, ResNet-18, Dirichlet 0.6": cifar100("0.6", "4")},
            hardware="1 GPU",
            minutes=1500,
        ),
        "machine": Scale(
            columns={
                "dirichlet_equal:0.1": Column(machine_setting(MLP), 20, cifar100_paper("0.6", "4"))
            },
            minutes=1.8,
            methods=(
                *(_name(name, ratio) for name in _METHODS for ratio in _MACHINE),
                *map(_plain, _METHODS),
            ),
        ),
        "smoke": smoke(
            20,
            5,
            (_name("FedSWA", 0.1), _name("FedSWA", 1.0)),
            partition="dirichlet_equal:0.1",
        ),
    },
    paper_head="paper, CIFAR-100 %",
    axis="final_lr_ratio",
)
