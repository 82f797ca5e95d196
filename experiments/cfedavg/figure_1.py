"""CFedAvg's Figures 1 and 3 to 9: compressors and error feedback under label skew.

Paper: Yang et al., MobiHoc 2021, section 5 and appendix B, which print no numbers: 100 clients
that all take part, 10 local epochs of batch 64, client_lr 0.1, server_lr 1, p of 10 classes per
client; a CNN on MNIST and Fashion-MNIST for 100 rounds, ResNet-18 on CIFAR-10 for 200. Figures 1
and 4 to 7 draw loss and accuracy of these runs, Figures 3, 8 and 9 the squared norms of a client's
change and residual, which the metrics of the same runs hold as ``change_sq`` and ``error_sq``.

    python -m experiments.cfedavg figure_1
"""

from experiments.studies.study import Column, Method, Scale, Study, columns, smoke

RATE = {"client_lr": (0.1,)}
PARTITIONS = tuple(f"classes_per_client:{p}" for p in (10, 5, 2, 1))
_COMPRESSORS = {
    "Top-k 0.9": "top_k:0.9",
    "Top-k 0.99": "top_k:0.99",
    "RD 0.9": "random_drop:0.9",
    "RD 0.99": "random_drop:0.99",
}


def _compressed(compressor: str, error_feedback: bool, colour: int) -> Method:
    option = {"compressor": compressor, "error_feedback": error_feedback}
    return Method("cfedavg", RATE, option=option, style=(colour, 0 if error_feedback else 2))


METHODS = {"FedAvg": Method("fedavg", RATE, style=(6, 0))}
for _colour, (_name, _compressor) in enumerate(_COMPRESSORS.items()):
    METHODS[_name] = _compressed(_compressor, True, _colour)
    METHODS[f"{_name}, no EF"] = _compressed(_compressor, False, _colour)


def paper_setting(dataset: str, model: str, rounds: int) -> dict:
    """The paper's setting for a data set."""
    return {
        "dataset": dataset,
        "model": model,
        "num_clients": 100,
        "cohort_size": 100,
        "batch_size": 64,
        "local_epochs": 10,
        "rounds": rounds,
        "eval_every": 2,
    }


# Small enough for two cores: fewer clients, fewer and shorter local steps, an MLP.
MACHINE = {
    "dataset": "fashion_mnist",
    "model": "mlp",
    "model_option": {"hidden": [64]},
    "num_clients": 20,
    "cohort_size": 20,
    "batch_size": 32,
    "local_steps": 10,
    "rounds": 100,
    "eval_every": 2,
}
PAPER = {
    "MNIST": paper_setting("mnist", "cnn", 100),
    "Fashion-MNIST": paper_setting("fashion_mnist", "cnn", 100),
    "CIFAR-10": paper_setting("cifar10", "resnet18", 200),
}

STUDY = Study(
    name="cfedavg/figure_1",
    title="Figures 1 and 3 to 9: top-k and random dropping, with and without error feedback",
    notes="""\
As in the paper: full participation, client_lr 0.1, server_lr 1, 100 rounds, p of 10 classes per
client, equal sizes. Scaled down to the machine: Fashion-MNIST only, 20 clients instead of 100, 10
local steps a round of batch 32 instead of 10 epochs of batch 64 (100 steps), and an MLP 784-64-10
with 50,890 parameters instead of the CNN with 582,026. Top-k 0.99 sends the 1 % of the coordinates
that are largest, RD 0.99 drops each one with probability 0.99; "no EF" is without error feedback.
Nothing is tuned, as in the paper, whose results are curves without printed numbers.""",
    methods=METHODS,
    scales={
        "paper": Scale(
            columns={
                f"{name}, {spec}": Column({**settings, "partition": spec}, settings["rounds"])
                for name, settings in PAPER.items()
                for spec in PARTITIONS
            },
            hardware="8 GPUs",
            minutes=2000,
        ),
        "machine": Scale(columns=columns(MACHINE, PARTITIONS, 100), minutes=7),
        "smoke": smoke(10, 10, partition="classes_per_client:2"),
    },
)
