"""FedSpeed's Figure 4.3: longer local intervals for fewer rounds, at the same total work.

Paper: Sun, thesis of 2023, Figure 4.3: CIFAR-10, 10 of 100 clients, E = 1, 2, 5, 10 and 20 local
epochs in 2500 / E rounds.

    python -m experiments.fedspeed figure_4_3
"""

from experiments.fedspeed.tables_4_3_and_4_4 import machine_setting, paper_setting, rows, twice
from experiments.studies.study import Column, Scale, Study, smoke

NAMES = ("FedAdam", "FedCM", "SCAFFOLD", "FedSpeed")
_EPOCHS, _TOTAL_EPOCHS = (1, 2, 5, 10, 20), 2500
_STEPS_OF_EPOCH, _TOTAL_STEPS, _EVALUATIONS = 5, 2000, 20


def _paper_column(epochs):
    rounds = _TOTAL_EPOCHS // epochs
    changed = {"local_epochs": epochs, "eval_every": rounds // 25}
    settings = paper_setting("cifar10", "dirichlet_equal:0.6", rounds, **changed)
    return Column(settings, rounds)


def _machine_column(epochs):
    steps = _STEPS_OF_EPOCH * epochs
    rounds = _TOTAL_STEPS // steps
    settings = machine_setting(
        "dirichlet_equal:0.6",
        num_clients=20,
        cohort_size=5,
        local_steps=steps,
        rounds=rounds,
        eval_every=rounds // _EVALUATIONS,
    )
    return Column(settings, rounds)


STUDY = Study(
    name="fedspeed/figure_4_3",
    title="Figure 4.3: longer local intervals at the same total work",
    notes="""\
Rounds times local epochs E are 2500 in every column, so that a larger E communicates less for the
same number of gradients; only FedSpeed takes twice as many. The paper's claim: from E = 1 to 20
FedAdam loses 13.7 points and FedCM 10.6, while FedSpeed stays within 3.8. It prints no other
numbers, and not the partition: Dirichlet 0.6 here. Learning rates fall per round, as in the paper:
the shorter runs end with larger ones. Nothing is tuned; the setting is that of Tables 4.3 and 4.4.

On two cores: Fashion-MNIST, the MLP 784-200-100-10, E of 5 local steps, 2,000 steps in every
column: 400 rounds of 5 to 20 rounds of 100. 5 of 20 clients take part instead of 10 of 100, so
that at E = 20, too, a client is seen five times (in the paper 12): FedSpeed's and SCAFFOLD's
corrections come from earlier visits. All columns are evaluated equally often, 20 times.""",
    methods=rows(0.1, 0.9995, 0.9995, NAMES),
    scales={
        "paper": Scale(
            columns={f"E = {epochs}": _paper_column(epochs) for epochs in _EPOCHS},
            hardware="1 GPU",
            minutes=900,
        ),
        "machine": Scale(
            columns=twice({f"E = {epochs}": _machine_column(epochs) for epochs in (1, 5, 10, 20)}),
            minutes=19,
        ),
        "smoke": smoke(10, 5, ("FedCM", "FedSpeed"), partition="dirichlet_equal:0.6"),
    },
)
