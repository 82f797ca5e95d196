"""What the paper of CFedAvg says of its figures. It has no published code."""

from experiments.studies.claims import Claim
from experiments.studies.measures import SMOOTHNESS, TRAINING_LOSS

_PARTITIONS = {p: f"classes_per_client:{p}" for p in (10, 5, 2, 1)}
_SERIES = (
    ("Top-k 0.9 is as good as FedAvg", "Top-k 0.9", "FedAvg", True),
    ("Top-k 0.99 is as good as FedAvg", "Top-k 0.99", "FedAvg", True),
    ("Error feedback helps top-k 0.99", "Top-k 0.99", "Top-k 0.99, no EF", False),
    ("Error feedback helps random dropping at 0.99", "RD 0.99", "RD 0.99, no EF", False),
    ("Top-k 0.99 is ahead of random dropping", "Top-k 0.99", "RD 0.99", False),
    ("Random dropping at 0.9 is ahead of 0.99", "RD 0.9", "RD 0.99", False),
)


def _figure(text: str, p: int, ahead: str, *of: str, alike: bool = False, **more) -> Claim:
    place = f"{text}, p = {p} (Figure 1)"
    return Claim(place, "figure_1", _PARTITIONS[p], ahead, of, alike, **more)


_WHY = {
    ("Top-k 0.99 is as good as FedAvg", 2): "the rate is too high for this skew: at 0.9 the "
    "claim shows",
    ("Top-k 0.99 is as good as FedAvg", 1): "the rate is too high for this skew: at 0.9 the claim "
    "shows",
}

CLAIMS = (
    *(
        _figure(text, p, a, b, alike=alike, why=_WHY.get((text, p), ""))
        for text, a, b, alike in _SERIES
        for p in _PARTITIONS
    ),
    _figure("Top-k 0.9 is ahead of 0.99", 1, "Top-k 0.9", "Top-k 0.99"),
    *(
        _figure(
            f"Error feedback gains more than at p = 10: {name}",
            1,
            name,
            f"{name}, no EF",
            since=_PARTITIONS[10],
        )
        for name in ("Top-k 0.99", "RD 0.99")
    ),
    *(
        _figure(
            f"{name} has a smoother curve than FedAvg",
            1,
            name,
            "FedAvg",
            measure=SMOOTHNESS,
            why="not known",
        )
        for name in ("Top-k 0.99", "RD 0.9")
    ),
    *(
        _figure(
            "Top-k 0.99 has a lower training loss than random dropping",
            p,
            "Top-k 0.99",
            "RD 0.99",
            measure=TRAINING_LOSS,
        )
        for p in (10, 1)
    ),
    Claim(
        "For the traffic of FedAvg with one local step, top-k 0.99 with ten is ahead (Figure 2)",
        "figure_2",
        "classes_per_client:5",
        "Top-k 0.99",
        ("FedAvg, one local step",),
    ),
)
