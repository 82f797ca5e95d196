"""FedSWA's comparison on Fashion-MNIST: averaging of weights under strong label skew.

Paper: Liu et al., ICML 2025, section 6.1 and Tables 2 to 4, on CIFAR and Tiny-ImageNet: 100
clients, 10 of them a round, batch 50, 5 local epochs (50 steps), 1000 rounds, Dirichlet 0.1 to
0.6, learning rate from {0.001, 0.003, ..., 0.1, 0.3} times 0.998 per round. Here its smallest
model and its most heterogeneous partition on Fashion-MNIST, which the paper does not have.

    python -m experiments.fedswa.fashion_mnist
    python -m experiments.fedswa.fashion_mnist --report
"""

from experiments.study import Method, Scale, Schedule, Study, main, smoke

# Equal sizes, a class prior per client: as in the published code.
PARTITION = "dirichlet_equal:0.1"
_LR = {"client_lr": (0.1, 0.03, 0.3, 0.01, 0.003, 0.001)}

METHODS = {
    "fedavg": Method("fedavg", _LR, lr_decay=0.998),
    "scaffold": Method("scaffold", _LR, lr_decay=0.998),
    "fedsam": Method("fedsam", _LR, fixed={"perturbation_radius": 0.1}, lr_decay=0.998),
    "fedspeed": Method("fedspeed", _LR, lr_decay=0.9995),
    "fedswa": Method("fedswa", _LR, lr_decay=0.998),
    "fedmo": Method("fedmo", _LR, lr_decay=0.998),
    "fedmoswa": Method("fedmoswa", _LR, lr_decay=0.998),
}

STUDY = Study(
    name="fedswa/fashion_mnist",
    title="FedSWA and FedMoSWA on Fashion-MNIST at Dirichlet 0.1",
    notes="""\
The setting of the paper's section 6.1 on a data set and with a model that it does not have, so
that there is no paper column. As in the paper: 100 clients, 10 of them a round, batch 50, a class
prior per client from Dirichlet(0.1) and equal sizes, learning rates from its grid times 0.998 per
round (0.9995 for FedSpeed, as in its own paper), rho 0.1, alpha 1.5, gamma 0.2. Scaled down:
LeNet-5 with LeCun's widths (44,426 parameters) instead of the published code's (573,578), 10
local steps instead of 5 epochs (60 steps here), 80 rounds instead of 1000, and the learning rates
0.03, 0.1 and 0.3 of the grid; with `--scale mlp` the MLP 784-200-100-10, 20 local steps, 120
rounds, and 0.01 too. FedSAM and FedSpeed perturb with radius 0.1, FedSpeed's prox_weight is 0.1.
No weight decay and no clipping, which the paper does not state.""",
    partitions=(PARTITION,),
    methods=METHODS,
    scales={
        "paper": Scale(
            dataset="fashion_mnist",
            model="lenet5",
            num_clients=100,
            schedule=Schedule(cohort_size=10, batch_size=50, local_epochs=5),
            rounds=1000,
            tuning_rounds=200,
            eval_every=10,
            finalists=2,
        ),
        "machine": Scale(
            dataset="fashion_mnist",
            model="lenet5",
            model_options={"widths": (6, 16, 120, 84)},
            num_clients=100,
            schedule=Schedule(cohort_size=10, batch_size=50, local_steps=10),
            rounds=80,
            tuning_rounds=20,
            eval_every=10,
            finalists=2,
            grid_points=3,
        ),
        "mlp": Scale(
            dataset="fashion_mnist",
            model="mlp",
            num_clients=100,
            schedule=Schedule(cohort_size=10, batch_size=50, local_steps=20),
            rounds=120,
            tuning_rounds=30,
            eval_every=10,
            finalists=2,
            grid_points=4,
        ),
        "smoke": smoke(20, 5),
    },
)

if __name__ == "__main__":
    main(STUDY)
