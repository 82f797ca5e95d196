"""Whose duals the server averages: FedSpeed, FedSpeed-Ing, FedADMM and FedPD, cohort against all.

No table of the paper: its text has the server average the cohort's duals, its group's code those of
all clients. The thesis gives FedSpeed-Ing's inertia no value, so that here is a small grid.

    python -m experiments.fedspeed duals
"""

from experiments.fedspeed.tables_4_3_and_4_4 import SLOW, machine_setting, method
from experiments.studies.study import Column, Scale, Study, smoke

_INERTIAS = (0.1, 0.3, 0.6, 0.9)
_SPEED = {"prox_weight": 0.1, "perturbation_radius": 0.1}

METHODS = {
    "FedAvg": method("fedavg", SLOW),
    "FedDyn": method("feddyn", 0.9995, prox_weight=0.1),
    "FedADMM, mean over all (Wang)": method("fedadmm", 0.9995, prox_weight=0.1),
    "FedADMM, mean over the cohort (Gong)": method("fedadmm", 0.9995, prox_weight=0.1, variant="G"),
    "FedPD": method("fedpd", 0.9995, prox_weight=0.1),
    **{
        f"FedSpeed, {dual}": method("fedspeed", 0.9995, **_SPEED, server_dual=dual)
        for dual in ("cohort", "all")
    },
    **{
        f"FedSpeed-Ing {inertia}, {dual}": method(
            "fedspeed_ing", 0.9995, **_SPEED, server_dual=dual, inertia=inertia
        )
        for dual in ("cohort", "all")
        for inertia in _INERTIAS
    },
}

_PARTITION = "dirichlet_equal:0.6"
_EVERYBODY = machine_setting(_PARTITION, num_clients=10, cohort_size=10)

STUDY = Study(
    name="fedspeed/duals",
    title="Whose duals the server averages",
    notes="""\
The setting of Tables 4.3 and 4.4 as the paper writes it, without clipping; nothing is tuned.
"Cohort" is `server_dual="cohort"`, the paper's text; "all" the published code's. Wang et al.'s
FedADMM has the mean over all clients by construction, Gong et al.'s that of the cohort. FedPD is
defined for full participation: with a cohort, its server has the mean of those who came. In the
second column all of ten clients take part in every round, so that both means are one.""",
    methods=METHODS,
    scales={
        "machine": Scale(
            columns={
                "10 of 100 clients": Column(machine_setting(_PARTITION), 20),
                "10 of 10 clients": Column(
                    _EVERYBODY,
                    20,
                    methods=tuple(name for name in METHODS if "all" not in name.split(", ")),
                ),
            },
            minutes=9,
        ),
        "smoke": smoke(20, 5, ("FedPD", "FedSpeed, all"), partition=_PARTITION),
    },
)
