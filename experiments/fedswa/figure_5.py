"""FedSWA's Figure 5: FedMoSWA over its server learning rate, and over its momentum.

Paper: Liu et al., ICML 2025, Figure 5: CIFAR-100, ResNet-18; (a) alpha, (b) gamma.

    python -m experiments.fedswa figure_5a figure_5b
"""

from experiments.fedswa.tables_2_3_and_6 import FIXED, MLP, machine_setting, paper_setting
from experiments.studies.study import Column, Method, Scale, Study, smoke

_NOTES = """\
The setting of Tables 2, 3 and 6 with client_lr 0.1 for all, which is not tuned. The paper has
curves without numbers; its text names neither all values nor the partition, which is Dirichlet 0.6
at the paper's scale. On two cores: Fashion-MNIST at Dirichlet 0.1, the MLP 784-200-100-10, 10
local steps, 60 rounds."""


def _alpha(value):
    grid = {**FIXED, "server_lr": (value,)}
    return Method("fedmoswa", grid, option={"final_lr_ratio": 0.1, "momentum": 0.2}, at=value)


def _gamma(value):
    grid = {**FIXED, "server_lr": (1.5,)}
    return Method("fedmoswa", grid, option={"final_lr_ratio": 0.1, "momentum": value}, at=value)


def _scales(methods, machine, minutes):
    settings = paper_setting("cifar100", "resnet18", "dirichlet_equal:0.6")
    return {
        "paper": Scale(
            columns={"CIFAR-100, ResNet-18, Dirichlet 0.6": Column(settings, 200)},
            hardware="1 GPU",
            minutes=600,
        ),
        "machine": Scale(
            columns={"dirichlet_equal:0.1": Column(machine_setting(MLP), 20)},
            minutes=minutes,
            methods=machine,
        ),
        "smoke": smoke(20, 5, methods[:2], partition="dirichlet_equal:0.1"),
    }


_ALPHAS = {f"alpha = {value}": _alpha(value) for value in (1.0, 1.25, 1.5, 1.75, 2.0)}
_GAMMAS = {f"gamma = {value}": _gamma(value) for value in (0.05, 0.1, 0.2, 0.5, 1.0)}

STUDIES = (
    Study(
        name="fedswa/figure_5a",
        title="Figure 5a: FedMoSWA over alpha",
        notes="alpha is `server_lr`: above 1 the server goes beyond the clients' mean. The paper "
        f"finds 1.5 best and more worse. {_NOTES}",
        methods=_ALPHAS,
        scales=_scales(tuple(_ALPHAS), ("alpha = 1.0", "alpha = 1.5", "alpha = 2.0"), 0.7),
        axis="server_lr",
    ),
    Study(
        name="fedswa/figure_5b",
        title="Figure 5b: FedMoSWA over gamma",
        notes="gamma is `momentum`, the share of the cohort's mean in the server's control. The "
        f"paper finds 0.2 best and 0.05 very slow. {_NOTES}",
        methods=_GAMMAS,
        scales=_scales(
            tuple(_GAMMAS),
            ("gamma = 0.05", "gamma = 0.2", "gamma = 0.5", "gamma = 1.0"),
            0.9,
        ),
        axis="momentum",
    ),
)
