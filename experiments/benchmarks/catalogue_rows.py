"""The catalogue's methods as rows with an example of each hyperparameter, for benchmarks."""

from experiments.studies.study import Method

_CLIENT = {"client_lr": (0.1, 0.01, 0.001)}
_BOTH = {**_CLIENT, "server_lr": (1.0, 0.1, 10.0)}
_ADAPTIVE = {"client_lr": (0.1, 0.01), "server_lr": (0.01, 0.1)}
_BETA = (0.5, 0.1, 0.9)
_MOMENTUM = {"momentum": _BETA}
_MU = {"prox_weight": (0.01, 0.001, 0.1)}
_RADIUS = {"perturbation_radius": (0.05, 0.01, 0.2)}
_CONTRAST = {"contrastive_weight": (1.0, 0.1)}
_TAU = {"tau": (0.001, 0.01)}
_MEMORY = {"server_momentum": _BETA, "memory_decay": _BETA}
_ALL_SLOTS = {"memory_size": 100}
_SPEED = {"prox_weight": (0.1, 0.01), **_RADIUS}
_SWA = {"final_lr_ratio": (0.1, 0.5)}
_AVERAGING = {"server_lr": 1.5}

METHODS = {
    "fedavg": Method("fedavg", _BOTH),
    "fedprox": Method("fedprox", _BOTH, _MU),
    "fednova": Method("fednova", _BOTH),
    "fedavgm": Method("fedavgm", _BOTH, _MOMENTUM),
    "fedproxm": Method("fedproxm", _BOTH, {**_MU, **_MOMENTUM}),
    "fedadagrad": Method("fedadagrad", _ADAPTIVE, _TAU),
    "fedadam": Method("fedadam", _ADAPTIVE, _TAU),
    "fedyogi": Method("fedyogi", _ADAPTIVE, _TAU),
    "fedams": Method("fedams", _ADAPTIVE, {"tau": (1e-6, 1e-4)}),
    "scaffold": Method("scaffold", _BOTH),
    "feddyn": Method("feddyn", _CLIENT, _MU),
    "fedadmm W": Method("fedadmm", _CLIENT, _MU, option={"variant": "W"}),
    "fedadmm G": Method("fedadmm", _BOTH, _MU, option={"variant": "G"}),
    "fedpd": Method("fedpd", _CLIENT, {"prox_weight": (0.1, 1.0, 0.01)}),
    "mifa": Method("mifa", _BOTH),
    "mifam": Method("mifam", _BOTH, _MOMENTUM),
    "moon": Method("moon", _BOTH, _CONTRAST),
    "moonm": Method("moonm", _BOTH, {**_CONTRAST, **_MOMENTUM}),
    "fedmlb": Method("fedmlb", _BOTH),
    "fedmlbm": Method("fedmlbm", _BOTH, _MOMENTUM),
    "fedcm": Method("fedcm", _BOTH, {"mixing": (0.1, 0.5)}),
    "mimelite": Method("mimelite", _BOTH, _MOMENTUM),
    "mime": Method("mime", _BOTH, _MOMENTUM),
    "fedacg": Method("fedacg", _CLIENT, {"prox_weight": (0.001, 0.01)}, option={"momentum": 0.85}),
    "stem": Method("stem", _CLIENT, {"momentum": (0.1, 0.9)}),
    "naive adaptive": Method(
        "naive_adaptive_fedavg",
        {"client_lr": (0.01, 0.001, 0.1)},
        {"second_moment_decay": (0.99, 0.9)},
        option={"initial_second_moment": 0.01},
    ),
    "fafed": Method("fafed", _CLIENT, {"momentum": (0.1, 0.9), "second_moment_decay": (0.9, 0.1)}),
    "fedsam": Method("fedsam", _BOTH, _RADIUS),
    "fedasam": Method("fedasam", _BOTH, {"perturbation_radius": (0.5, 0.1)}),
    "mofedsam": Method("mofedsam", _BOTH, _RADIUS, option={"mixing": 0.1}),
    "fedgamma": Method("fedgamma", _BOTH, _RADIUS),
    "fedlesam": Method("fedlesam", _BOTH, _RADIUS),
    "fedlesam-S": Method("fedlesam", _BOTH, _RADIUS, option={"variant": "S"}),
    "fedlesam-D": Method("fedlesam", _CLIENT, {**_MU, **_RADIUS}, option={"variant": "D"}),
    "fedsmoo": Method("fedsmoo", _CLIENT, {**_MU, **_RADIUS}),
    "fedspeed": Method("fedspeed", _BOTH, _SPEED),
    "fedspeed_ing": Method("fedspeed_ing", _BOTH, {**_SPEED, "inertia": (0.1, 0.5)}),
    "fedswa": Method("fedswa", _CLIENT, _SWA, settings=_AVERAGING),
    "fedmo": Method("fedmo", _CLIENT, {"momentum": (0.2, 0.05)}),
    "fedmoswa": Method("fedmoswa", _CLIENT, {**_SWA, "momentum": (0.2, 0.05)}, settings=_AVERAGING),
    "cfedavg": Method("cfedavg", _BOTH, option={"compressor": "top_k:0.9"}),
    "gradma_w": Method("gradma_w", _BOTH),
    "gradma_s": Method("gradma_s", _BOTH, _MEMORY, option=_ALL_SLOTS),
    "gradma": Method("gradma", _BOTH, _MEMORY, option=_ALL_SLOTS),
}
