"""Every method of the catalogue, by the name of its factory."""

from collections.abc import Callable

from fedjax_lab.algorithms.cfedavg import cfedavg
from fedjax_lab.algorithms.client_momentum import fedacg, fedcm, mime, mimelite
from fedjax_lab.algorithms.control_variates import scaffold
from fedjax_lab.algorithms.dynamic_reg import fedadmm, feddyn, fedpd
from fedjax_lab.algorithms.fafed import fafed, naive_adaptive_fedavg
from fedjax_lab.algorithms.fedavg import fedavg
from fedjax_lab.algorithms.fednova import fednova
from fedjax_lab.algorithms.fedopt import fedadagrad, fedadam, fedams, fedavgm, fedopt, fedyogi
from fedjax_lab.algorithms.fedspeed import fedspeed, fedspeed_ing
from fedjax_lab.algorithms.fedswa import fedmo, fedmoswa, fedswa
from fedjax_lab.algorithms.global_sharpness import fedlesam, fedsmoo
from fedjax_lab.algorithms.gradma import gradma, gradma_s, gradma_w
from fedjax_lab.algorithms.memory import mifa, mifam
from fedjax_lab.algorithms.proximal import fedprox, fedproxm
from fedjax_lab.algorithms.published import PUBLISHED, Published, as_published
from fedjax_lab.algorithms.representation import fedmlb, fedmlbm, moon, moonm
from fedjax_lab.algorithms.sharpness import fedasam, fedgamma, fedsam, mofedsam
from fedjax_lab.algorithms.stem import stem
from fedjax_lab.round import Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "cfedavg": cfedavg,
    "fafed": fafed,
    "fedacg": fedacg,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedadmm": fedadmm,
    "fedams": fedams,
    "fedasam": fedasam,
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedcm": fedcm,
    "feddyn": feddyn,
    "fedgamma": fedgamma,
    "fedlesam": fedlesam,
    "fedmlb": fedmlb,
    "fedmlbm": fedmlbm,
    "fedmo": fedmo,
    "fedmoswa": fedmoswa,
    "fednova": fednova,
    "fedopt": fedopt,
    "fedpd": fedpd,
    "fedprox": fedprox,
    "fedproxm": fedproxm,
    "fedsam": fedsam,
    "fedsmoo": fedsmoo,
    "fedspeed": fedspeed,
    "fedspeed_ing": fedspeed_ing,
    "fedswa": fedswa,
    "fedyogi": fedyogi,
    "gradma": gradma,
    "gradma_s": gradma_s,
    "gradma_w": gradma_w,
    "mifa": mifa,
    "mifam": mifam,
    "mime": mime,
    "mimelite": mimelite,
    "mofedsam": mofedsam,
    "moon": moon,
    "moonm": moonm,
    "naive_adaptive_fedavg": naive_adaptive_fedavg,
    "scaffold": scaffold,
    "stem": stem,
}

__all__ = [
    "ALGORITHMS",
    "PUBLISHED",
    "Published",
    "as_published",
    "cfedavg",
    "fafed",
    "fedacg",
    "fedadagrad",
    "fedadam",
    "fedadmm",
    "fedams",
    "fedasam",
    "fedavg",
    "fedavgm",
    "fedcm",
    "feddyn",
    "fedgamma",
    "fedlesam",
    "fedmlb",
    "fedmlbm",
    "fedmo",
    "fedmoswa",
    "fednova",
    "fedopt",
    "fedpd",
    "fedprox",
    "fedproxm",
    "fedsam",
    "fedsmoo",
    "fedspeed",
    "fedspeed_ing",
    "fedswa",
    "fedyogi",
    "gradma",
    "gradma_s",
    "gradma_w",
    "mifa",
    "mifam",
    "mime",
    "mimelite",
    "mofedsam",
    "moon",
    "moonm",
    "naive_adaptive_fedavg",
    "scaffold",
    "stem",
]
