"""FAFED's Table 2: six methods on Fashion-MNIST at three levels of heterogeneity.

Paper: Wu et al., AAAI 2023, Table 2, and the Fashion-MNIST curves of Figures 2 to 4: 20 clients
that all take part, the small CNN of its Table 4, batches of 5, 50 or 100 and 20, 10 or 5 local
steps, the larger batch and the fewer steps with more heterogeneity; learning rates and factors from
the grids below. Its rounds it does not state, but that all settings see as many epochs. The numbers
of its medium column are not in the text at hand.

    python -m experiments.fafed table_2
"""

from experiments.studies.study import Column, Method, Scale, Study, smoke

# At medium heterogeneity clients hold examples of all classes, in proportions left open.
LOW, MEDIUM, HIGH = "similarity:95", "dirichlet_equal:1.0", "classes_per_client:5"
FACTOR = (0.9, 0.1)
_LR = {"client_lr": (0.1, 0.05, 0.02, 0.01, 0.001)}
# FedAdam's and FedAMS' further grids, tried one after the other.
_SERVER = {"server_lr": (10**-2, 10**-1.5, 10**-2.5), "beta1": FACTOR, "beta2": FACTOR}

METHODS = {
    "FedAvg": Method("fedavg", _LR),
    "SCAFFOLD": Method("scaffold", _LR),
    "STEM": Method("stem", _LR, {"momentum": FACTOR}),
    "FedAdam": Method("fedadam", _LR, _SERVER, option={"tau": 0.01}),
    # Its tau is the floor under v, a square: 0.01 under the root, as FedAdam's.
    "FedAMS": Method("fedams", _LR, _SERVER, option={"tau": 1e-4}),
    "FAFED": Method("fafed", _LR, {"momentum": FACTOR, "second_moment_decay": FACTOR}),
}


def paper_columns(dataset: str, model: str, name: str, printed: bool = False) -> dict[str, Column]:
    """The paper's three levels: 100 passes over the data with rising batch, falling steps."""
    found = {}
    for level, partition, batch_size, local_steps, rounds in (
        ("low", LOW, 5, 20, 3000),
        ("medium", MEDIUM, 50, 10, 600),
        ("high", HIGH, 100, 5, 600),
    ):
        settings = {
            "dataset": dataset,
            "model": model,
            "partition": partition,
            "num_clients": 20,
            "cohort_size": 20,
            "batch_size": batch_size,
            "local_steps": local_steps,
            "rounds": rounds,
            "eval_every": rounds // 60,
        }
        paper = {"table": "2", "partition": level} if printed and level != "medium" else {}
        found[f"{name}, {level}"] = Column(settings, rounds // 5, paper)
    return found


def _machine(partition: str, level: str) -> Column:
    settings = {
        "dataset": "fashion_mnist",
        "model": "fafed_cnn",
        "partition": partition,
        "num_clients": 20,
        "cohort_size": 20,
        "batch_size": 5,
        "local_steps": 10,
        "rounds": 200,
        "eval_every": 20,
    }
    return Column(settings, 40, {"table": "2", "partition": level})


STUDY = Study(
    name="fafed/table_2",
    title="Table 2: six methods at low and at high heterogeneity",
    notes="""\
Table 2 (a) and (c) of the paper, with its own CNN (conv3x3 5, pool, conv3x3 10, pool, dense 100,
dense 10, tanh after each, also after the last: 26,620 parameters), its 20 clients that all take
part, and its grids: learning rate 0.001 to 0.1; for FedAdam and FedAMS server_lr 10^-2.5 to
10^-1.5, beta1 and beta2 0.1 or 0.9; for STEM and FAFED momentum (alpha) and second_moment_decay
(beta) 0.1 or 0.9. The learning rate is tuned first, with the first value of each other grid, and
then the others one after the other. SCAFFOLD's server_lr is 1, FAFED's rho 0.01, FedAdam's tau
0.01; FedAMS's is 1e-4, because it stands under the root there. Batch 5 and q = 10 local steps are
among the paper's values; how many rounds it took, it does not say. Low heterogeneity is
`similarity:95`, high is `classes_per_client:5`. 200 rounds of 10 steps with batch 5 are 3.3 passes
over the data.""",
    methods=METHODS,
    scales={
        "paper": Scale(
            columns=paper_columns("fashion_mnist", "fafed_cnn", "Fashion-MNIST", printed=True),
            hardware="1 GPU",
            minutes=600,
        ),
        "machine": Scale(
            columns={LOW: _machine(LOW, "low"), HIGH: _machine(HIGH, "high")},
            minutes=25,
        ),
        "smoke": smoke(10, 10, partition=HIGH),
    },
)
