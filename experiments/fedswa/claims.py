"""What the paper of FedSWA and FedMoSWA says of its tables."""

from experiments.studies.claims import Claim, flatness

_COLUMN = "dirichlet_equal:0.1"
_MAIN = ("tables_2_3_and_6", _COLUMN)
_OTHERS = ("FedAvg", "SCAFFOLD", "FedSAM", "FedMo", "FedSWA")
_FLAT = ("figures_1_and_4", _COLUMN)

CLAIMS = (
    Claim("FedMoSWA is ahead of all others (Tables 2, 3)", *_MAIN, "FedMoSWA", _OTHERS),
    Claim("FedMoSWA is ahead of SCAFFOLD (Tables 2, 3)", *_MAIN, "FedMoSWA", ("SCAFFOLD",)),
    Claim("FedMoSWA is ahead of FedAvg (Tables 2, 3)", *_MAIN, "FedMoSWA", ("FedAvg",)),
    Claim("FedSWA is ahead of FedAvg (Tables 2, 3)", *_MAIN, "FedSWA", ("FedAvg",)),
    Claim("FedSWA is ahead of FedSAM (Tables 2, 3)", *_MAIN, "FedSWA", ("FedSAM",)),
    *(
        Claim(f"FedSWA is ahead of FedSAM, {rounds}", "more_rounds", rounds, "FedSWA", ("FedSAM",))
        for rounds in ("60 rounds", "300 rounds")
    ),
    Claim("FedMo is ahead of FedAvg (Table 6)", *_MAIN, "FedMo", ("FedAvg",)),
    Claim("FedMoSWA is ahead of its parts (Table 6)", *_MAIN, "FedMoSWA", ("FedMo", "FedSWA")),
    *(
        Claim(
            f"{name} with rho = 0.1 is ahead of 1.0 (Table 4)",
            "table_4",
            _COLUMN,
            f"{name}, rho = 0.1",
            (f"{name}, rho = 1.0",),
        )
        for name in ("FedSWA", "FedMoSWA")
    ),
    Claim(
        "FedMoSWA is ahead where all clients take part (Table 5)",
        "table_5",
        _COLUMN,
        "FedMoSWA",
        ("FedAvg", "SCAFFOLD", "FedSAM", "MoFedSAM", "FedLESAM", "FedSWA", "FedMo"),
    ),
    Claim(
        "FedMoSWA is ahead of FedSMOO and FedGAMMA (Table 8)",
        "table_8",
        _COLUMN,
        "FedMoSWA",
        ("FedSMOO", "FedGAMMA"),
    ),
    Claim(
        "alpha = 1.5 is ahead of 1 and 2 (Figure 5a)",
        "figure_5a",
        _COLUMN,
        "alpha = 1.5",
        ("alpha = 1.0", "alpha = 2.0"),
    ),
    Claim(
        "gamma = 0.2 is ahead of 0.05 (Figure 5b)",
        "figure_5b",
        _COLUMN,
        "gamma = 0.2",
        ("gamma = 0.05",),
    ),
    Claim(
        "gamma = 0.2 is ahead of 1 (Figure 5b)",
        "figure_5b",
        _COLUMN,
        "gamma = 0.2",
        ("gamma = 1.0",),
    ),
    *(
        Claim(
            f"{name}'s minimum is flatter than FedAvg's and FedSAM's: smallest eigenvalue "
            "(Figures 1, 4)",
            *_FLAT,
            name,
            ("FedAvg", "FedSAM"),
            measure=flatness,
        )
        for name in ("FedSWA", "FedMoSWA")
    ),
)
