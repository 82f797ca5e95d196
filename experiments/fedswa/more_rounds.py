"""FedSWA against FedSAM and FedAvg as the rounds grow: does their order turn?

No table of the paper: Table 3's setting on two cores, whose 60 rounds are the start of training,
gone on with. The learning rate falls by 0.998 per round, so that it ends at 0.89 and 0.55 of the
first; the paper's 1,000 rounds take two cores an hour.

    python -m experiments.fedswa more_rounds
"""

from experiments.fedswa.tables_2_3_and_6 import FIXED, MLP, machine_setting, rows
from experiments.studies.study import Column, Scale, Study, smoke

_NAMES = ("FedAvg", "FedSAM", "FedSWA")


def _column(rounds):
    return Column(machine_setting(MLP, rounds=rounds, eval_every=rounds // 30), rounds)


STUDY = Study(
    name="fedswa/more_rounds",
    title="FedSWA and FedSAM over more rounds",
    notes="""\
The MLP of the ablations at Dirichlet 0.1, client_lr 0.1 for all, which is not tuned; 60 and 300
rounds, where the paper has 1,000.""",
    methods=rows(_NAMES, FIXED),
    scales={
        "machine": Scale(
            columns={f"{rounds:,} rounds": _column(rounds) for rounds in (60, 300)},
            minutes=20,
        ),
        "smoke": smoke(20, 5, ("FedSAM", "FedSWA"), partition="dirichlet_equal:0.1"),
    },
)
