"""FedSWA's Tables 2, 3 and 6 with larger learning rates, and with the paper's decay to its end.

No table of the paper. The grid of Table 3's study ends at 0.3, which four of six methods choose,
and its 60 rounds see the rate fall to 0.89 of the first, where the paper's thousand see 0.135.

    python -m experiments.fedswa larger_rates
"""

from experiments.fedswa.tables_2_3_and_6 import MLP, ROWS, machine_setting, rows
from experiments.studies.study import Column, Scale, Study, smoke

NAMES = tuple(name for name in ROWS if name not in ("FedSMOO", "FedGAMMA"))
_LRS = {"client_lr": (0.1, 0.03, 0.3, 1.0)}
_ROUNDS = 60
_DECAY = f"exponential:{0.998 ** (1000 / _ROUNDS):.4f}"
SKEWED, MILDER = "dirichlet_equal:0.1", ("dirichlet_equal:0.3", "dirichlet_equal:0.6")


def _column(partition: str) -> Column:
    changed = {"partition": partition, "client_lr_schedule": _DECAY}
    settings = machine_setting(MLP, **changed, rounds=_ROUNDS, eval_every=2)
    return Column(settings, 20)


STUDY = Study(
    name="fedswa/larger_rates",
    title="Tables 2, 3 and 6 with larger learning rates and the whole decay",
    notes="""\
Methods as the paper writes them: FedMoSWA, its nine rivals and FedMo. client_lr is from {0.03, 0.1,
0.3, 1.0} and times 0.9672 per round, so that after 60 rounds it has fallen to 0.135 of the first,
as after the paper's 1,000. The rest is the setting of the ablations: Fashion-MNIST, the MLP
784-200-100-10, 10 local steps, 60 rounds. Ten seeds.""",
    methods=rows(NAMES, _LRS),
    scales={
        "machine": Scale(
            columns={partition: _column(partition) for partition in (SKEWED, *MILDER)},
            minutes=75,
            seeds=tuple(range(11, 21)),
        ),
        "smoke": smoke(20, 5, ("FedAvg", "FedMoSWA"), partition="dirichlet_equal:0.1"),
    },
)
