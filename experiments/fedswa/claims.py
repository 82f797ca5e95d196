"""What the paper of FedSWA and FedMoSWA says of its tables."""

from experiments.fedswa.larger_rates import MILDER
from experiments.studies.claims import Claim
from experiments.studies.measures import FLATNESS

_COLUMN = "dirichlet_equal:0.1"
_MAIN = ("tables_2_3_and_6", _COLUMN)
_RIVALS = (
    *("FedAvg", "FedDyn", "SCAFFOLD", "FedSAM", "MoFedSAM", "FedLESAM", "FedASAM", "FedACG"),
    "FedSWA",
)
_FLAT = ("figures_1_and_4", _COLUMN)
_LARGER = ("larger_rates", _COLUMN)
_MOMENTUM_AHEAD = (
    "not known; FedACG and MoFedSAM, whose local steps have the server's momentum, are ahead of it"
)

CLAIMS = (
    Claim(
        "FedMoSWA is ahead of its nine rivals (Tables 2, 3)",
        *_MAIN,
        "FedMoSWA",
        _RIVALS,
        why="not known; FedACG and FedDyn are ahead of it",
    ),
    Claim("FedMoSWA is ahead of SCAFFOLD (Tables 2, 3)", *_MAIN, "FedMoSWA", ("SCAFFOLD",)),
    Claim("FedMoSWA is ahead of FedAvg (Tables 2, 3)", *_MAIN, "FedMoSWA", ("FedAvg",)),
    Claim("FedSWA is ahead of FedAvg (Tables 2, 3)", *_MAIN, "FedSWA", ("FedAvg",)),
    Claim("FedSWA is ahead of FedSAM (Tables 2, 3)", *_MAIN, "FedSWA", ("FedSAM",)),
    Claim("FedAvg is ahead of FedSAM (Tables 2, 3)", *_MAIN, "FedAvg", ("FedSAM",)),
    *(
        Claim(f"FedSWA is ahead of FedSAM, {rounds}", "more_rounds", rounds, "FedSWA", ("FedSAM",))
        for rounds in ("60 rounds", "300 rounds")
    ),
    Claim("FedMo is ahead of FedAvg (Table 6)", *_MAIN, "FedMo", ("FedAvg",)),
    Claim("FedMoSWA is ahead of its parts (Table 6)", *_MAIN, "FedMoSWA", ("FedMo", "FedSWA")),
    *(
        Claim(
            f"{ahead} is ahead of {text}, larger rates and the whole decay",
            *_LARGER,
            ahead,
            of,
            why=_MOMENTUM_AHEAD if of == _RIVALS else "",
        )
        for ahead, text, of in (
            ("FedMoSWA", "its nine rivals", _RIVALS),
            ("FedMoSWA", "SCAFFOLD", ("SCAFFOLD",)),
            ("FedMoSWA", "FedAvg", ("FedAvg",)),
            ("FedMoSWA", "its parts", ("FedMo", "FedSWA")),
            ("FedSWA", "FedAvg", ("FedAvg",)),
            ("FedSWA", "FedSAM", ("FedSAM",)),
            ("FedAvg", "FedSAM", ("FedSAM",)),
            ("FedMo", "FedAvg", ("FedAvg",)),
        )
    ),
    *(
        Claim(
            f"{ahead} is ahead of {text}, {skew} (Table 3)",
            "larger_rates",
            skew,
            ahead,
            of,
            why=f"{_MOMENTUM_AHEAD}, and so is FedDyn" if of == _RIVALS else "",
        )
        for skew in MILDER
        for ahead, text, of in (
            ("FedMoSWA", "its nine rivals", _RIVALS),
            ("FedMoSWA", "FedAvg", ("FedAvg",)),
            ("FedSWA", "FedAvg", ("FedAvg",)),
        )
    ),
    Claim(
        "FedMoSWA's lead over FedAvg grows with skew, 0.1 against 0.6 (Table 3)",
        *_LARGER,
        "FedMoSWA",
        ("FedAvg",),
        since=MILDER[-1],
    ),
    *(
        Claim(
            f"{name} with rho = 0.1 is ahead of {text}{more} (Table 4)",
            study,
            _COLUMN,
            f"{name}, rho = 0.1",
            (f"{name}, rho = {rho}",),
            why=why,
        )
        for text, rho, known in (
            ("1.0", "1.0", "not known; it is not the length of the steps, the rate being tuned"),
            ("rho = 1 with alpha = 1", "1.0, alpha = 1", ""),
        )
        for name, study, more, why in (
            ("FedSWA", "table_4_rates", ", the rate tuned for each", known),
            ("FedMoSWA", "table_4", "", ""),
        )
    ),
    Claim(
        "FedMoSWA is ahead where all clients take part (Table 5)",
        "table_5",
        _COLUMN,
        "FedMoSWA",
        ("FedAvg", "SCAFFOLD", "FedSAM", "MoFedSAM", "FedLESAM", "FedSWA", "FedMo"),
        why="MoFedSAM is ahead at learning rate 0.3, the largest of the grid; it was behind at 0.1",
    ),
    Claim(
        "FedMoSWA is ahead of FedSMOO and FedGAMMA (Table 8)",
        "table_8",
        _COLUMN,
        "FedMoSWA",
        ("FedSMOO", "FedGAMMA"),
        why="not known; FedSMOO takes two gradients a step, FedMoSWA one",
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
            measure=FLATNESS,
            why=why,
        )
        for name, why in (
            ("FedSWA", "not known; FedSAM, whose step seeks flat places, is the flattest"),
            (
                "FedMoSWA",
                "not known; it is the least flat of four methods, and ahead on the test set",
            ),
        )
    ),
)
