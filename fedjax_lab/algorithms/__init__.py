"""Every method of the catalogue, by the name of its factory."""

from collections.abc import Callable

from fedjax_lab.algorithms.apfl import apfl
from fedjax_lab.algorithms.authors_codes import PUBLISHED, Published, as_published
from fedjax_lab.algorithms.cfedavg import cfedavg
from fedjax_lab.algorithms.client_momentum import fedacg, fedcm, mime, mimelite
from fedjax_lab.algorithms.control_variates import scaffold
from fedjax_lab.algorithms.ditto import ditto
from fedjax_lab.algorithms.dynamic_reg import fedadmm, feddyn, fedpd
from fedjax_lab.algorithms.fafed import fafed, naive_adaptive_fedavg
from fedjax_lab.algorithms.fedavg import fedavg
from fedjax_lab.algorithms.fedbabu import fedbabu, with_fine_tuning
from fedjax_lab.algorithms.fedexp import fedexp
from fedjax_lab.algorithms.fednova import fednova
from fedjax_lab.algorithms.fedopt import fedadagrad, fedadam, fedams, fedavgm, fedopt, fedyogi
from fedjax_lab.algorithms.fedspeed import fedspeed, fedspeed_ing
from fedjax_lab.algorithms.fedswa import fedmo, fedmoswa, fedswa
from fedjax_lab.algorithms.global_sharpness import fedlesam, fedsmoo
from fedjax_lab.algorithms.gradma import gradma, gradma_s, gradma_w
from fedjax_lab.algorithms.mifa import mifa, mifam
from fedjax_lab.algorithms.personal_layers import fedbn, fedper, fedrep, lg_fedavg, local_only
from fedjax_lab.algorithms.pfedme import pfedme
from fedjax_lab.algorithms.proximal import fedprox, fedproxm
from fedjax_lab.algorithms.representation import fedmlb, fedmlbm, moon, moonm
from fedjax_lab.algorithms.sharpness import fedasam, fedgamma, fedsam, mofedsam
from fedjax_lab.algorithms.stem import stem
from fedjax_lab.round import Algorithm

_METHODS: tuple[Callable[..., Algorithm], ...] = (
    *(apfl, cfedavg, ditto, fafed, fedacg, fedadagrad, fedadam, fedadmm, fedams, fedasam, fedavg),
    *(fedavgm, fedbabu, fedbn, fedcm, feddyn, fedexp, fedgamma, fedlesam, fedmlb, fedmlbm, fedmo),
    *(fedmoswa, fednova, fedopt, fedpd, fedper, fedprox, fedproxm, fedrep, fedsam, fedsmoo),
    *(fedspeed, fedspeed_ing, fedswa, fedyogi, gradma, gradma_s, gradma_w, lg_fedavg, local_only),
    *(mifa, mifam, mime, mimelite, mofedsam, moon, moonm, naive_adaptive_fedavg, pfedme, scaffold),
    stem,
)
ALGORITHMS = {method.__name__: method for method in _METHODS}

__all__ = [
    "ALGORITHMS",
    "PUBLISHED",
    "Published",
    "apfl",
    "as_published",
    "cfedavg",
    "ditto",
    "fafed",
    "fedacg",
    "fedadagrad",
    "fedadam",
    "fedadmm",
    "fedams",
    "fedasam",
    "fedavg",
    "fedavgm",
    "fedbabu",
    "fedbn",
    "fedcm",
    "feddyn",
    "fedexp",
    "fedgamma",
    "fedlesam",
    "fedmlb",
    "fedmlbm",
    "fedmo",
    "fedmoswa",
    "fednova",
    "fedopt",
    "fedpd",
    "fedper",
    "fedprox",
    "fedproxm",
    "fedrep",
    "fedsam",
    "fedsmoo",
    "fedspeed",
    "fedspeed_ing",
    "fedswa",
    "fedyogi",
    "gradma",
    "gradma_s",
    "gradma_w",
    "lg_fedavg",
    "local_only",
    "mifa",
    "mifam",
    "mime",
    "mimelite",
    "mofedsam",
    "moon",
    "moonm",
    "naive_adaptive_fedavg",
    "pfedme",
    "scaffold",
    "stem",
    "with_fine_tuning",
]
