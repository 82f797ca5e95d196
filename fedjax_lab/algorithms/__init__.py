"""Every method of the catalogue, by the name of its factory."""

from collections.abc import Callable

from fedjax_lab.algorithms.cfedavg import cfedavg
from fedjax_lab.algorithms.control_variates import scaffold
from fedjax_lab.algorithms.fafed import fafed, naive_adaptive_fedavg
from fedjax_lab.algorithms.fedavg import fedavg
from fedjax_lab.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedopt, fedyogi
from fedjax_lab.algorithms.fedspeed import fedspeed, fedspeed_ing
from fedjax_lab.algorithms.fedswa import fedmo, fedmoswa, fedswa
from fedjax_lab.algorithms.gradma import gradma, gradma_s, gradma_w
from fedjax_lab.round import Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "cfedavg": cfedavg,
    "fafed": fafed,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedmo": fedmo,
    "fedmoswa": fedmoswa,
    "fedopt": fedopt,
    "fedspeed": fedspeed,
    "fedspeed_ing": fedspeed_ing,
    "fedswa": fedswa,
    "fedyogi": fedyogi,
    "gradma": gradma,
    "gradma_s": gradma_s,
    "gradma_w": gradma_w,
    "naive_adaptive_fedavg": naive_adaptive_fedavg,
    "scaffold": scaffold,
}

__all__ = [
    "ALGORITHMS",
    "cfedavg",
    "fafed",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedmo",
    "fedmoswa",
    "fedopt",
    "fedspeed",
    "fedspeed_ing",
    "fedswa",
    "fedyogi",
    "gradma",
    "gradma_s",
    "gradma_w",
    "naive_adaptive_fedavg",
    "scaffold",
]
