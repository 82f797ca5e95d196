"""The whole catalogue on Fashion-MNIST: every method under the same conditions, in one table.

Setting: GradMA's Table 1 (Luo et al., CVPR 2023) with Fashion-MNIST in place of MNIST: 10 of 100
clients, 5 steps of batch 64, the MLP 784-200-100-10, Dirichlet 0.1 and 0.01.

    python -m experiments.catalogue.fashion_mnist
    python -m experiments.catalogue.fashion_mnist --report FILE.json
"""

from experiments.study import Method, Scale, Schedule, Study, main, smoke

_CLIENT = {"client_lr": (0.1, 0.01, 0.001)}
_BOTH = {**_CLIENT, "server_lr": (1.0, 0.1, 10.0)}
_ADAPTIVE = {"client_lr": (0.1, 0.01), "server_lr": (0.01, 0.1)}
_BETA = (0.5, 0.1, 0.9)
_PROX = (0.01, 0.001, 0.1)
_RADIUS = (0.05, 0.01, 0.2)


def _method(factory, grid=_BOTH, then=None, **fixed) -> Method:
    then = then or {}
    return Method(factory, grid, then, {name: values[0] for name, values in then.items()}, fixed)


_MEMORY = {"server_momentum": _BETA, "memory_decay": _BETA}
_SPEED = {"prox_weight": (0.1, 0.01), "perturbation_radius": _RADIUS}
_SWA = {"final_lr_ratio": (0.1, 0.5)}

METHODS = {
    "fedavg": _method("fedavg"),
    "fedprox": _method("fedprox", then={"prox_weight": _PROX}),
    "fednova": _method("fednova"),
    "fedavgm": _method("fedavgm", then={"momentum": _BETA}),
    "fedproxm": _method("fedproxm", then={"prox_weight": _PROX, "momentum": _BETA}),
    "fedadagrad": _method("fedadagrad", _ADAPTIVE, {"tau": (0.001, 0.01)}),
    "fedadam": _method("fedadam", _ADAPTIVE, {"tau": (0.001, 0.01)}),
    "fedyogi": _method("fedyogi", _ADAPTIVE, {"tau": (0.001, 0.01)}),
    "fedams": _method("fedams", _ADAPTIVE, {"tau": (1e-6, 1e-4)}),
    "scaffold": _method("scaffold"),
    "feddyn": _method("feddyn", _CLIENT, {"prox_weight": _PROX}),
    "fedadmm W": _method("fedadmm", _CLIENT, {"prox_weight": _PROX}, variant="W"),
    "fedadmm G": _method("fedadmm", then={"prox_weight": _PROX}, variant="G"),
    "fedpd": _method("fedpd", _CLIENT, {"prox_weight": (0.1, 1.0, 0.01)}),
    "mifa": _method("mifa"),
    "mifam": _method("mifam", then={"momentum": _BETA}),
    "moon": _method("moon", then={"contrastive_weight": (1.0, 0.1)}),
    "moonm": _method("moonm", then={"contrastive_weight": (1.0, 0.1), "momentum": _BETA}),
    "fedmlb": _method("fedmlb"),
    "fedmlbm": _method("fedmlbm", then={"momentum": _BETA}),
    "fedcm": _method("fedcm", then={"mixing": (0.1, 0.5)}),
    "mimelite": _method("mimelite", then={"momentum": _BETA}),
    "mime": _method("mime", then={"momentum": _BETA}),
    "fedacg": _method("fedacg", _CLIENT, {"prox_weight": (0.001, 0.01)}, momentum=0.85),
    "stem": _method("stem", _CLIENT, {"momentum": (0.1, 0.9)}),
    "naive adaptive": _method(
        "naive_adaptive_fedavg",
        {"client_lr": (0.01, 0.001, 0.1)},
        {"second_moment_decay": (0.99, 0.9)},
        initial_second_moment=0.01,
    ),
    "fafed": _method("fafed", _CLIENT, {"momentum": (0.1, 0.9), "second_moment_decay": (0.9, 0.1)}),
    "fedsam": _method("fedsam", then={"perturbation_radius": _RADIUS}),
    "fedasam": _method("fedasam", then={"perturbation_radius": (0.5, 0.1)}),
    "mofedsam": _method("mofedsam", then={"perturbation_radius": _RADIUS}, mixing=0.1),
    "fedgamma": _method("fedgamma", then={"perturbation_radius": _RADIUS}),
    "fedlesam": _method("fedlesam", then={"perturbation_radius": _RADIUS}),
    "fedlesam-S": _method("fedlesam", then={"perturbation_radius": _RADIUS}, variant="S"),
    "fedlesam-D": _method(
        "fedlesam", _CLIENT, {"prox_weight": _PROX, "perturbation_radius": _RADIUS}, variant="D"
    ),
    "fedsmoo": _method("fedsmoo", _CLIENT, {"prox_weight": _PROX, "perturbation_radius": _RADIUS}),
    "fedspeed": _method("fedspeed", then=_SPEED),
    "fedspeed_ing": _method("fedspeed_ing", then={**_SPEED, "inertia": (0.1, 0.5)}),
    "fedswa": _method("fedswa", _CLIENT, _SWA, server_lr=1.5),
    "fedmo": _method("fedmo", _CLIENT, {"momentum": (0.2, 0.05)}),
    "fedmoswa": _method("fedmoswa", _CLIENT, {**_SWA, "momentum": (0.2, 0.05)}, server_lr=1.5),
    "cfedavg": _method("cfedavg", compressor="top_k:0.9"),
    "gradma_w": _method("gradma_w"),
    "gradma_s": _method("gradma_s", then=_MEMORY, memory_size=100),
    "gradma": _method("gradma", then=_MEMORY, memory_size=100),
}  # fmt: skip


def _tried(hyper):
    """Pairs of learning rates whose product is far from 0.1 and 0.01 are left out.

    They were the worst of FedAvg, FedAvgM and SCAFFOLD in GradMA's study at Dirichlet 0.01, where
    all were tried. Adaptive servers' steps have lengths of their own.
    """
    if "server_lr" not in hyper or "tau" in hyper:
        return True
    return 0.0099 < hyper["client_lr"] * hyper["server_lr"] < 0.11


STUDY = Study(
    name="catalogue/fashion_mnist",
    title="The whole catalogue on Fashion-MNIST",
    notes="""\
GradMA's Table 1 setting (Luo et al., CVPR 2023) with Fashion-MNIST in place of MNIST: 100
clients, 10 a round, 5 steps of batch 64, the MLP 784-200-100-10, uniform weights. Learning rates
from {0.001, 0.01, 0.1} and {0.1, 1, 10}, of which pairs with a product between 0.01 and 0.1 are
tried; each method's own hyper-parameters one after the other at the best of these. `fedopt`
stands for any optax optimiser and is here in its published forms; `cfedavg` is `top_k:0.9` with
error feedback.""",
    partitions=("dirichlet:0.1", "dirichlet:0.01"),
    methods=METHODS,
    allowed=_tried,
    scales={
        "paper": Scale(
            dataset="fashion_mnist",
            model="mlp",
            num_clients=100,
            schedule=Schedule(cohort_size=10, batch_size=64, local_steps=5),
            rounds=500,
            tuning_rounds=100,
            eval_every=10,
            finalists=2,
        ),
        "machine": Scale(
            dataset="fashion_mnist",
            model="mlp",
            num_clients=100,
            schedule=Schedule(cohort_size=10, batch_size=64, local_steps=5),
            rounds=120,
            tuning_rounds=40,
            eval_every=10,
            finalists=2,
        ),
        "smoke": smoke(100, 4, model_options={"hidden": (16, 16)}, partitions=("dirichlet:0.1",)),
    },
)

if __name__ == "__main__":
    main(STUDY)
