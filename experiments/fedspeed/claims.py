"""What the thesis and the paper of FedSpeed say of their tables."""

from experiments.fedspeed.figure_4_3 import NAMES as INTERVAL_NAMES
from experiments.fedspeed.tables_4_3_and_4_4 import NAMES
from experiments.studies.claims import Claim
from experiments.studies.measures import rounds_to

_OTHERS = tuple(name for name in NAMES if name != "FedSpeed")
_DIRICHLET = "dirichlet_equal:0.6"
_TERM = "FedSpeed (prox-term only)"
_CORRECTED = "FedSpeed (prox-term + prox-correction)"
_PERTURBED = "FedSpeed (prox-term + gradient perturbation)"
_COHORT = (
    "the text's server averages the duals of its cohort; with those of all clients, the study of "
    "duals, the gap closes"
)
_BOTH_WAYS = f"{_COHORT} to about one point; why that one is left is not known"
_PERTURBING = (
    "the number of rounds, in part; after the paper's 500 in place of 60 (`more_rounds`) the two "
    "are level, and radius 0.1 is not ahead"
)
_ALL = "FedSpeed (prox-term + prox-correction + gradient perturbation)"


_AGAIN = "rho_0 = 0.1 is ahead of 0, 500 rounds (Table 4.7)"


def _modules(text: str, ahead: str, *of: str, **more: str) -> Claim:
    return Claim(f"{text} (Table 4.6)", "table_4_6", _DIRICHLET, ahead, of, **more)


CLAIMS = (
    *(
        Claim(
            f"FedSpeed is ahead of all others, 2 % a round, {column} (Tables 4.2, 4.5)",
            "tables_4_2_and_4_5",
            column,
            "FedSpeed",
            _OTHERS,
            why=why,
        )
        for column, why in (
            ("iid", _BOTH_WAYS),
            (_DIRICHLET, _BOTH_WAYS),
            ("dirichlet_equal:0.3", _COHORT),
        )
    ),
    Claim(
        "FedSpeed is ahead of all others, 10 % a round (Table 4.4)",
        "tables_4_3_and_4_4",
        _DIRICHLET,
        "FedSpeed",
        _OTHERS,
        why=_BOTH_WAYS,
    ),
    Claim(
        "FedSpeed is ahead of FedAvg, 10 % a round (Table 4.4)",
        "tables_4_3_and_4_4",
        _DIRICHLET,
        "FedSpeed",
        ("FedAvg",),
    ),
    Claim(
        "FedSpeed needs the fewest rounds, 10 % a round (Table 4.3)",
        "tables_4_3_and_4_4",
        _DIRICHLET,
        "FedSpeed",
        _OTHERS,
        measure=rounds_to(80),
        why=_COHORT,
    ),
    Claim(
        "From iid to Dirichlet 0.3, FedSpeed loses least (Table 4.2)",
        "tables_4_2_and_4_5",
        "dirichlet_equal:0.3",
        "FedSpeed",
        _OTHERS,
        since="iid",
        why=_COHORT,
    ),
    _modules(
        "The prox-term is ahead of FedAvg",
        _TERM,
        "FedAvg (no module)",
        why="not known; the two hardly differ",
    ),
    _modules("The prox-correction adds to the prox-term", _CORRECTED, _TERM),
    _modules(
        "The perturbation adds to the prox-term",
        _PERTURBED,
        _TERM,
        why=f"not known; with the prox-correction it is {_PERTURBING}",
    ),
    _modules(
        "All three modules are ahead of any two",
        _ALL,
        _CORRECTED,
        _PERTURBED,
        why=f"as published, {_PERTURBING}; as written, the duals of the cohort",
        reversed_by=_AGAIN,
    ),
    Claim(
        "Perturbing (rho_0 = 0.1) is ahead of not perturbing (Table 4.7)",
        "table_4_7",
        _DIRICHLET,
        "FedSpeed, rho_0 = 0.1, alpha = 1",
        ("FedSpeed, rho_0 = 0, alpha = 1",),
        why=_PERTURBING,
        reversed_by=_AGAIN,
    ),
    *(
        Claim(
            f"rho_0 = 0.1 is ahead of {radius}, 500 rounds (Table 4.7)",
            "more_rounds",
            _DIRICHLET,
            "FedSpeed, rho_0 = 0.1, alpha = 1",
            (f"FedSpeed, rho_0 = {radius}, alpha = 1",),
        )
        for radius in ("0", "0.01", "0.2")
    ),
    *(
        Claim(
            f"{text}, tuned, 500 rounds (Table {table})",
            "tuned_rounds",
            _DIRICHLET,
            ahead,
            of,
            why="not known; beside the correction it costs nothing" if ahead == _PERTURBED else "",
        )
        for table, text, ahead, of in (
            ("4.6", "FedSpeed is ahead of FedAvg", _ALL, ("FedAvg (no module)",)),
            ("4.6", "The prox-term is ahead of FedAvg", _TERM, ("FedAvg (no module)",)),
            ("4.6", "The prox-correction adds to the prox-term", _CORRECTED, (_TERM,)),
            ("4.6", "The perturbation adds to the prox-term", _PERTURBED, (_TERM,)),
            ("4.6", "All three modules are ahead of any two", _ALL, (_CORRECTED, _PERTURBED)),
            ("4.7", "rho_0 = 0.1 is ahead of 0", _ALL, (_CORRECTED,)),
            *(
                (
                    "4.7",
                    f"rho_0 = 0.1 is ahead of {r}",
                    _ALL,
                    (f"FedSpeed, rho_0 = {r}, alpha = 1",),
                )
                for r in ("0.01", "0.2")
            ),
        )
    ),
    Claim(
        "alpha = 0.9375 is as good as 1 (Table 4.8)",
        "table_4_8",
        _DIRICHLET,
        "FedSpeed, alpha = 0.9375, rho_0 = 0.1",
        ("FedSpeed, alpha = 1.0, rho_0 = 0.1",),
        alike=True,
    ),
    Claim(
        "alpha = 1 is ahead of 0 (Table 4.8)",
        "table_4_8",
        _DIRICHLET,
        "FedSpeed, alpha = 1.0, rho_0 = 0.1",
        ("FedSpeed, alpha = 0, rho_0 = 0.1",),
        why=_PERTURBING,
        reversed_by=_AGAIN,
    ),
    *(
        Claim(
            f"FedSpeed-Ing is ahead of FedSpeed, duals of {dual}, inertia {inertia} (Table 4.3)",
            "duals",
            "10 of 100 clients",
            f"FedSpeed-Ing {inertia}, {dual}",
            (f"FedSpeed, {dual}",),
        )
        for dual in ("cohort", "all")
        for inertia in (0.1, 0.9)
    ),
    *(
        Claim(
            f"From E = 1 to 20, FedSpeed loses less than {name} (Figure 4.3)",
            "figure_4_3",
            "E = 20",
            "FedSpeed",
            (name,),
            since="E = 1",
            why="" if name == "FedAdam" else "not known",
        )
        for name in INTERVAL_NAMES
        if name != "FedSpeed"
    ),
    Claim(
        "FedSpeed stays ahead of all others at E = 20 (Figure 4.3)",
        "figure_4_3",
        "E = 20",
        "FedSpeed",
        tuple(name for name in INTERVAL_NAMES if name != "FedSpeed"),
        why="not known as published; as written, the duals of the cohort",
    ),
)
