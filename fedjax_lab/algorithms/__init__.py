"""Every method of the catalogue, by the name of its factory."""

from collections.abc import Callable

from fedjax_lab.algorithms.control_variates import scaffold
from fedjax_lab.algorithms.fedavg import fedavg
from fedjax_lab.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedopt, fedyogi
from fedjax_lab.algorithms.gradma import gradma, gradma_s, gradma_w
from fedjax_lab.round import Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedopt": fedopt,
    "fedyogi": fedyogi,
    "gradma": gradma,
    "gradma_s": gradma_s,
    "gradma_w": gradma_w,
    "scaffold": scaffold,
}

__all__ = [
    "ALGORITHMS",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedopt",
    "fedyogi",
    "gradma",
    "gradma_s",
    "gradma_w",
    "scaffold",
]
