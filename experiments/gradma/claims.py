"""What the paper of GradMA says of its tables."""

from experiments.studies.claims import Claim

_TABLES, _SKEWED, _MILD = "tables_1_and_2", "dirichlet:0.01", "dirichlet:0.1"
_OTHERS = ("FedAvg", "FedAvgM", "SCAFFOLD")


def _table(text: str, ahead: str, *of: str, column: str = _SKEWED, by: float = 0.0) -> Claim:
    return Claim(f"{text} (Tables 1, 2)", _TABLES, column, ahead, of, by=by)


def _memory(column: str) -> Claim:
    return Claim(
        f"A memory of all clients is ahead of none, {column} (Figures 6, 7)",
        "figures_6_and_7",
        column,
        "m = 100",
        ("m = 0 (FedAvgM)",),
    )


CLAIMS = (
    _table("GradMA is ahead of FedAvg, FedAvgM and SCAFFOLD, 0.01", "GradMA", *_OTHERS),
    _table(
        "GradMA is ahead of FedAvg, FedAvgM and SCAFFOLD, 0.1", "GradMA", *_OTHERS, column=_MILD
    ),
    _table("GradMA is ahead of FedAvg by 20 points, 0.01", "GradMA", "FedAvg", by=20.0),
    _table("GradMA-S is ahead of FedAvgM, 0.01", "GradMA-S", "FedAvgM"),
    _table("GradMA-S is ahead of FedAvgM, 0.1", "GradMA-S", "FedAvgM", column=_MILD),
    _table("GradMA-W is ahead of FedAvg, 0.01", "GradMA-W", "FedAvg"),
    _table("GradMA-W with x_-1 kept is ahead of FedAvg, 0.01", "GradMA-W, x_-1 kept", "FedAvg"),
    _table("GradMA is ahead of GradMA-S, 0.01", "GradMA", "GradMA-S"),
    _table("GradMA is ahead of GradMA-W, 0.01", "GradMA", "GradMA-W"),
    _memory(_SKEWED),
    _memory(_MILD),
    Claim(
        "Accumulated updates in the memory are ahead of the latest ones (Figure 5)",
        "figure_5",
        _SKEWED,
        "beta1 0, beta2 0.5",
        ("beta1 0, beta2 0",),
    ),
)
