"""GradMA's Figures 5 and 21: top accuracy of GradMA-S over its two momentum factors.

Paper: Luo et al., CVPR 2023: server_momentum (beta1) and memory_decay (beta2) from {0, 0.1, 0.3,
0.5, 0.7, 0.9}, memory for all 100 clients, S = 10.

    python -m experiments.gradma figure_5
"""

from experiments.gradma.tables_1_and_2 import table_setting
from experiments.studies.study import Method, Scale, Study, columns, smoke

_PAPER = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
_MACHINE = (0.0, 0.5, 0.9)


def _name(beta1: float, beta2: float) -> str:
    return f"beta1 {beta1:g}, beta2 {beta2:g}"


METHODS = {
    _name(beta1, beta2): Method(
        "gradma_s",
        {"client_lr": (0.1,), "server_lr": (1.0,)},
        option={"server_momentum": beta1, "memory_decay": beta2, "memory_size": 100},
    )
    for beta1 in _PAPER
    for beta2 in _PAPER
}
# The paper compares beta2 = 0 with MIFA, whose server has the latest updates as well.
METHODS["MIFA"] = Method("mifa", {"client_lr": (0.1,), "server_lr": (1.0,)})
_NINE = tuple(_name(beta1, beta2) for beta1 in _MACHINE for beta2 in _MACHINE)

STUDY = Study(
    name="gradma/figure_5",
    title="Figure 5: GradMA-S over its momentum factors",
    notes="""\
beta1 is `server_momentum`, beta2 `memory_decay`. The setting of Tables 1 and 2 with client_lr 0.1
and server_lr 1 for all, 200 rounds, nine of the paper's 36 pairs. MIFA has the same rates and no
momentum.""",
    methods=METHODS,
    scales={
        "paper": Scale(
            columns=columns(
                table_setting("mnist", "mlp", 500),
                ("dirichlet:0.01", "dirichlet:0.1", "dirichlet:1.0"),
                100,
            ),
            hardware="1 GPU",
            minutes=60,
        ),
        "machine": Scale(
            columns=columns(table_setting("fashion_mnist", "mlp", 200), ("dirichlet:0.01",), 40),
            minutes=6,
            methods=(*_NINE, "MIFA"),
        ),
        "smoke": smoke(100, 5, _NINE[:2]),
    },
)
