"""GradMA's Table 1 setting on Fashion-MNIST: six methods, strong and extreme label skew.

Paper: Luo et al., CVPR 2023, Table 1 (there: MNIST, 500 rounds of 5 steps, S = 10 of N = 100,
batch 64, the MLP 784-200-100-10; top test accuracy, mean and spread of 3 seeds). Here: the same
on Fashion-MNIST, so that "machine" and "paper" are one scale.

Tuning: learning rates of the paper's grid for 100 rounds, then the momentum factors one after
the other at the best learning rates.

    make gradma-study
    python -m experiments.gradma.fashion_mnist --partitions dirichlet:0.01 --methods fedavg
    python -m experiments.gradma.fashion_mnist --report
"""

from experiments.study import Method, Scale, Schedule, Study, main, smoke

STRONG, EXTREME = "dirichlet:0.1", "dirichlet:0.01"
_LRS = {"client_lr": (0.1, 0.01, 0.001), "server_lr": (1.0, 0.1, 10.0)}
_BETA = (0.5, 0.1, 0.9)
# Pairs whose product lies outside were the worst ones of FedAvg, FedAvgM and SCAFFOLD at
# Dirichlet 0.01; they are left out for all methods.
_SMALLEST, _LARGEST = 0.0099, 0.11


def _method(factory: str, strong: float, extreme: float, *betas: str, **fixed) -> Method:
    then, start = dict.fromkeys(betas, _BETA), dict.fromkeys(betas, _BETA[0])
    return Method(factory, _LRS, then, start, fixed, paper={STRONG: strong, EXTREME: extreme})


_SERVER = ("server_momentum", "memory_decay")
METHODS = {  # with the paper's top accuracies on MNIST, S = 10
    "fedavg": _method("fedavg", 97.11, 46.19),
    "fedavgm": _method("fedavgm", 97.20, 53.77, "momentum"),
    "scaffold": _method("scaffold", 93.94, 50.86),
    "gradma_w": _method("gradma_w", 97.01, 63.34),
    "gradma_s": _method("gradma_s", 97.35, 74.52, *_SERVER, memory_size=100),
    "gradma": _method("gradma", 97.34, 77.97, *_SERVER, memory_size=100),
}
_TABLE_1 = Scale(
    dataset="fashion_mnist",
    model="mlp",
    num_clients=100,
    schedule=Schedule(cohort_size=10, batch_size=64, local_steps=5),
    rounds=500,
    tuning_rounds=100,
    eval_every=10,
)

STUDY = Study(
    name="gradma/fashion_mnist",
    title="GradMA's Table 1 setting on Fashion-MNIST",
    notes="""\
100 clients, 10 a round, 5 steps of batch 64, the MLP 784-200-100-10, uniform weights: Table 1's
setting, with Fashion-MNIST in place of MNIST, whose numbers the paper's column has. Learning rates
and momentum factors are those of the paper's grid: FedAvg, FedAvgM and SCAFFOLD were tuned on all
nine pairs of learning rates, GradMA's three on those whose product is within 0.01 to 0.1.""",
    partitions=(EXTREME, STRONG),
    methods=METHODS,
    scales={
        "paper": _TABLE_1,
        "machine": _TABLE_1,
        "smoke": smoke(100, 5, partitions=(STRONG,)),  # as many clients as the memory holds
    },
    allowed=lambda hyper: _SMALLEST < hyper["client_lr"] * hyper["server_lr"] < _LARGEST,
    paper_head="paper, MNIST %",
)

if __name__ == "__main__":
    main(STUDY)
