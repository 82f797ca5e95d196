"""What the paper of FAFED says of its table and figures. It has no published code."""

from experiments.fafed.table_2 import HIGH, LOW
from experiments.studies.claims import Claim, lost, low_perplexity

_LEVELS = {"low": LOW, "high": HIGH}
_LARGER = "larger_rates"
_OTHERS = ("FedAvg", "SCAFFOLD", "STEM", "FedAdam", "FedAMS")


def _table(text: str, ahead: str, *of: str, study: str = "table_2", **more) -> list[Claim]:
    return [
        Claim(f"{text}, {level} heterogeneity", study, column, ahead, of, **more)
        for level, column in _LEVELS.items()
    ]


CLAIMS = (
    *_table("FAFED is ahead of all others (Table 2)", "FAFED", *_OTHERS),
    *_table("FAFED is ahead of FedAvg (Table 2)", "FAFED", "FedAvg"),
    *_table("FedAdam is ahead of FedAvg (Table 2)", "FedAdam", "FedAvg"),
    *_table("FedAMS is ahead of FedAvg (Table 2)", "FedAMS", "FedAvg"),
    *_table("STEM is ahead of FedAvg (Table 2)", "STEM", "FedAvg"),
    *_table("SCAFFOLD is ahead of FedAvg (Table 2)", "SCAFFOLD", "FedAvg"),
    *_table("STEM is ahead of FedAvg, larger rates", "STEM", "FedAvg", study="larger_rates"),
    *_table(
        "SCAFFOLD is ahead of FedAvg, larger rates", "SCAFFOLD", "FedAvg", study="larger_rates"
    ),
    *_table(
        "FAFED loses less of its top accuracy than FedAdam and FedAMS",
        "FAFED",
        "FedAdam",
        "FedAMS",
        measure=lost,
    ),
    Claim(
        "FAFED has the lowest perplexity (Figure 1)",
        "language_model",
        "Python's reference, letters",
        "FAFED",
        ("FedAvg", "STEM", "FedAdam", "FedAMS"),
        measure=low_perplexity,
    ),
)
