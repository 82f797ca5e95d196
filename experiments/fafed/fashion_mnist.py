"""FAFED's Table 2 on Fashion-MNIST: six methods, low and high heterogeneity, full participation.

Paper: Wu et al., AAAI 2023, Table 2 (a) and (c): 20 clients, the small CNN of its Table 4, batch
in {5, 50, 100} and q in {5, 10, 20} local steps (which belongs to which column is not stated, nor
are the rounds), learning rates and momentum factors from the grids below.

    python -m experiments.fafed.fashion_mnist
    python -m experiments.fafed.fashion_mnist --report
"""

from experiments.study import Method, Scale, Schedule, Study, main, smoke

LOW, HIGH = "similarity:95", "classes_per_client:5"
_LR = {"client_lr": (0.1, 0.05, 0.02, 0.01, 0.001)}
_FACTOR = (0.9, 0.1)
# FedAdam's and FedAMS' further grids, tried one after the other.
_SERVER = {"server_lr": (10**-2, 10**-1.5, 10**-2.5), "beta1": _FACTOR, "beta2": _FACTOR}


def _method(factory: str, low: float, high: float, then=None, **fixed) -> Method:
    then = then or {}
    start = {name: values[0] for name, values in then.items()}
    return Method(factory, _LR, then, start, fixed, paper={LOW: low, HIGH: high})


METHODS = {  # with the paper's accuracies at low and at high heterogeneity
    "fedavg": _method("fedavg", 84.51, 79.58),
    "scaffold": _method("scaffold", 84.96, 80.34),
    "stem": _method("stem", 85.62, 80.53, {"momentum": _FACTOR}),
    "fedadam": _method("fedadam", 85.86, 80.40, _SERVER, tau=0.01),
    # Its tau is the floor under v, a square: 0.01 under the root, as FedAdam's.
    "fedams": _method("fedams", 86.97, 80.15, _SERVER, tau=1e-4),
    "fafed": _method("fafed", 88.16, 81.88, {"momentum": _FACTOR, "second_moment_decay": _FACTOR}),
}

STUDY = Study(
    name="fafed/fashion_mnist",
    title="FAFED's Table 2 on Fashion-MNIST: six methods at low and at high heterogeneity",
    notes="""\
Table 2 (a) and (c) of the paper, with its own CNN (conv3x3 5, pool, conv3x3 10, pool, dense 100,
dense 10, tanh after each, also after the last: 26,620 parameters), its 20 clients that all take
part, and its grids: learning rate 0.001 to 0.1; for FedAdam and FedAMS server_lr 10^-2.5 to
10^-1.5, beta1 and beta2 0.1 or 0.9; for STEM and FAFED momentum (alpha) and second_moment_decay
(beta) 0.1 or 0.9. The learning rate is tuned first, with the first value of each other grid, and
then the others one after the other. SCAFFOLD's server_lr is 1, FAFED's rho 0.01, FedAdam's tau
0.01; FedAMS's is 1e-4, because it stands under the root there. Batch 5 and q = 10 local steps are
the paper's values that suit this machine; which ones belong to which column, and the number of
rounds, the paper does not say. Low heterogeneity is `similarity:95`, high is
`classes_per_client:5`. 200 rounds of 10 steps with batch 5 are 3.3 passes over the data.""",
    partitions=(LOW, HIGH),
    methods=METHODS,
    scales={
        "paper": Scale(
            dataset="fashion_mnist",
            model="fafed_cnn",
            num_clients=20,
            schedule=Schedule(cohort_size=20, batch_size=50, local_steps=10),
            rounds=1000,
            tuning_rounds=200,
            eval_every=10,
            finalists=2,
        ),
        "machine": Scale(
            dataset="fashion_mnist",
            model="fafed_cnn",
            num_clients=20,
            schedule=Schedule(cohort_size=20, batch_size=5, local_steps=10),
            rounds=200,
            tuning_rounds=40,
            eval_every=20,
            finalists=2,
        ),
        "smoke": smoke(10, 10, partitions=(HIGH,)),
    },
)

if __name__ == "__main__":
    main(STUDY)
