"""FedSpeed's Tables 4.7 and 4.8: how far, and with which weight, the gradient is perturbed.

Paper: Sun, thesis of 2023, Tables 4.7 and 4.8: CIFAR-10, 10 of 100 clients, 500 rounds.

    python -m experiments.fedspeed table_4_7 table_4_8
"""

import dataclasses

from experiments.fedspeed.tables_4_3_and_4_4 import ablation_scales, method
from experiments.studies.study import Method, Study

_NOTES = """\
The setting of Tables 4.3 and 4.4, 500 rounds at the paper's scale. Nothing is tuned. The paper does
not say the partition; Dirichlet 0.6 here.

On two cores: Fashion-MNIST, the MLP 784-200-100-10, 10 local steps, 60 rounds. The paper's column
has CIFAR-10 with ResNet-18."""


def _fedspeed(radius: float, weight: float, at: float) -> Method:
    row = method(
        "fedspeed",
        0.9995,
        prox_weight=0.1,
        perturbation_radius=radius,
        perturbation_weight=weight,
    )
    return dataclasses.replace(row, at=at)


def _scales(table, machine):
    return ablation_scales(table, machine[:2], minutes=1.2, paper_minutes=250, methods=machine)


RADII = {
    f"FedSpeed, rho_0 = {radius:g}, alpha = 1": _fedspeed(radius, 1.0, radius)
    for radius in (0.0, 0.01, 0.05, 0.1, 0.2)
}
_WEIGHTS = {
    f"FedSpeed, alpha = {text}, rho_0 = 0.1": _fedspeed(0.1, float(text), float(text))
    for text in ("0", "0.5", "0.75", "0.875", "0.9375", "1.0")
}

STUDIES = (
    Study(
        name="fedspeed/table_4_7",
        title="Table 4.7: FedSpeed over rho_0",
        notes="rho_0 is `perturbation_radius`, the length of the ascent step; 0 takes one "
        f"gradient. {_NOTES}",
        methods=RADII,
        scales=_scales("4.7", tuple(RADII)[:1] + tuple(RADII)[2:]),
        paper_head="paper, CIFAR-10 %",
        axis="perturbation_radius",
    ),
    Study(
        name="fedspeed/table_4_8",
        title="Table 4.8: FedSpeed over alpha",
        notes="alpha is `perturbation_weight`, the share of the perturbed gradient; 0 takes one "
        f"gradient. {_NOTES}",
        methods=_WEIGHTS,
        scales=_scales("4.8", tuple(_WEIGHTS)[:2] + tuple(_WEIGHTS)[4:]),
        paper_head="paper, CIFAR-10 %",
        axis="perturbation_weight",
    ),
)
