"""GradMA's Figures 6, 7 and 22: accuracy of GradMA-S over the size of the server's memory.

Paper: Luo et al., CVPR 2023: m from {0, 10, 20, 40, 60, 80, 100} slots for 100 clients, S = 10;
without a memory it is FedAvgM.

    python -m experiments.gradma figures_6_and_7
"""

from experiments.gradma.tables_1_and_2 import table_setting
from experiments.studies.study import Method, Scale, Study, columns, smoke

_RATES = {"client_lr": (0.1,), "server_lr": (1.0,)}
_FACTORS = {"server_momentum": 0.5, "memory_decay": 0.5}

METHODS = {
    "m = 0 (FedAvgM)": Method("fedavgm", _RATES, option={"momentum": 0.5}, at=0),
    **{
        f"m = {size}": Method("gradma_s", _RATES, option={**_FACTORS, "memory_size": size}, at=size)
        for size in (10, 20, 40, 60, 80, 100)
    },
}
_SMOKE = ("m = 0 (FedAvgM)", "m = 10")

STUDY = Study(
    name="gradma/figures_6_and_7",
    title="Figures 6 and 7: GradMA-S over the size of its memory",
    notes="""\
The setting of Tables 1 and 2 with client_lr 0.1, server_lr 1, server_momentum 0.5 and memory_decay
0.5 for all.""",
    methods=METHODS,
    scales={
        "paper": Scale(
            columns=columns(
                table_setting("mnist", "mlp", 500),
                ("dirichlet:0.01", "dirichlet:0.1", "dirichlet:1.0"),
                100,
            ),
            hardware="1 GPU",
            minutes=15,
        ),
        "machine": Scale(
            columns=columns(
                table_setting("fashion_mnist", "mlp", 300), ("dirichlet:0.01", "dirichlet:0.1"), 60
            ),
            minutes=8,
        ),
        "smoke": smoke(100, 5, _SMOKE),
    },
    axis="memory_size",
)
