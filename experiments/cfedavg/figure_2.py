"""CFedAvg's Figure 2: accuracy for the same traffic, next to FedAvg with a single local step.

Paper: Yang et al., MobiHoc 2021, section 5, 2-a: p = 5 classes per client, accuracy against the
uplink in units of the model, with compressors (and error feedback) and without; the baseline takes
one local step a round and compresses nothing.

    python -m experiments.cfedavg figure_2
"""

from experiments.cfedavg.figure_1 import MACHINE, METHODS, PAPER, RATE
from experiments.studies.study import Column, Method, Scale, Study, smoke

BASELINE = "FedAvg, one local step"
_ONE_STEP = {"local_steps": 1, "local_epochs": None}
_FIVE = {"partition": "classes_per_client:5"}

STUDY = Study(
    name="cfedavg/figure_2",
    title="Figure 2: accuracy for the same traffic",
    notes="""\
p = 5, the setting of Figure 1 at 5 classes per client. What a client sends in a round of FedAvg is
the paper's unit of traffic: 203,560 bytes here, 4.07 MB from all 20 clients, 407 MB in 100
rounds.""",
    methods={
        BASELINE: Method("fedavg", RATE, settings=_ONE_STEP, style=(6, 2)),
        **{name: method for name, method in METHODS.items() if "no EF" not in name},
    },
    scales={
        "paper": Scale(
            columns={
                name: Column({**PAPER[name], **_FIVE}, PAPER[name]["rounds"])
                for name in ("MNIST", "CIFAR-10")
            },
            hardware="8 GPUs",
            minutes=250,
        ),
        "machine": Scale(
            columns={"classes_per_client:5": Column({**MACHINE, **_FIVE}, 100)},
            minutes=2,
        ),
        "smoke": smoke(10, 10, (BASELINE, "Top-k 0.99"), **_FIVE),
    },
)
