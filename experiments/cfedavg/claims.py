"""What the paper of CFedAvg says of its figures. It has no published code."""

from experiments.studies.claims import Claim
from experiments.studies.measures import ERROR_GROWTH, ERROR_MEMORY, SMOOTHNESS, TRAINING_LOSS

_PARTITIONS = {p: f"classes_per_client:{p}" for p in (10, 5, 2, 1)}
_SERIES = (
    ("Top-k 0.9 is as good as FedAvg", "Top-k 0.9", "FedAvg", True),
    ("Top-k 0.99 is as good as FedAvg", "Top-k 0.99", "FedAvg", True),
    ("Error feedback helps top-k 0.99", "Top-k 0.99", "Top-k 0.99, no EF", False),
    ("Error feedback helps random dropping at 0.99", "RD 0.99", "RD 0.99, no EF", False),
    ("Top-k 0.99 is ahead of random dropping", "Top-k 0.99", "RD 0.99", False),
    ("Random dropping at 0.9 is ahead of 0.99", "RD 0.9", "RD 0.99", False),
)


# Of random dropping by arithmetic: e <- (1 - mask)(e + g), with a mask of mean 1 - rate.
_MANY_TIMES = {
    "RD 0.9": "independent changes make it 9 times the change here, and equal ones 171",
    "RD 0.99": "independent changes make it 99 times the change here, and equal ones 19,701",
    "Top-k 0.99": "not known",
}
_LEVEL = {
    ("Top-k 0.99", 10): "not known",
    ("Top-k 0.99", 1): "not known",
    ("RD 0.99", 10): "not known; it grows where clients have fewer classes",
}


def _figure(text: str, p: int, ahead: str, *of: str, alike: bool = False, **more) -> Claim:
    place = f"{text}, p = {p} (Figure 1)"
    return Claim(place, "figure_1", _PARTITIONS[p], ahead, of, alike, **more)


_WHY = {
    ("Top-k 0.99 is as good as FedAvg", 2): "the rate is too high for this skew: at 0.9 the "
    "claim shows",
    ("Top-k 0.99 is as good as FedAvg", 1): "the rate is too high for this skew: at 0.9 the claim "
    "shows",
}


def _memory(text: str, p: int, ahead: str, of: str, **more) -> Claim:
    return Claim(
        f"{text}, p = {p} (Figures 3, 8 and 9)", "figure_1", _PARTITIONS[p], ahead, (of,), **more
    )


# A method without error feedback has no residual, and stands for 0.
_MEMORY = (
    *(
        _memory(
            f"The residual of {name} is at most ten times the change",
            p,
            name,
            f"{name}, no EF",
            measure=ERROR_MEMORY,
            by=-10.0,
            why=_MANY_TIMES.get(name, ""),
        )
        for name in ("Top-k 0.9", "Top-k 0.99", "RD 0.9", "RD 0.99")
        for p in (10, 1)
    ),
    *(
        _memory(
            f"The residual is larger, against the change, for {name} at 0.99 than at 0.9",
            p,
            f"{name} 0.9",
            f"{name} 0.99",
            measure=ERROR_MEMORY,
        )
        for name in ("Top-k", "RD")
        for p in (10, 1)
    ),
    *(
        _memory(
            f"The residual of {name} is bounded: in the second half it grows by at most a quarter",
            p,
            name,
            f"{name}, no EF",
            measure=ERROR_GROWTH,
            by=-25.0,
        )
        for name in ("Top-k 0.9", "RD 0.9")
        for p in (10, 1)
    ),
    *(
        _memory(
            f"The residual of {name} goes on growing: in the second half by more than a quarter",
            p,
            f"{name}, no EF",
            name,
            measure=ERROR_GROWTH,
            by=25.0,
            why=_LEVEL.get((name, p), ""),
        )
        for name in ("Top-k 0.99", "RD 0.99")
        for p in (10, 1)
    ),
    *(
        Claim(
            f"Label skew enlarges the residual of {name}, against the change: p = 1 against 10 "
            "(Figures 8 and 9)",
            "figure_1",
            _PARTITIONS[10],
            name,
            (f"{name}, no EF",),
            measure=ERROR_MEMORY,
            since=_PARTITIONS[1],
        )
        for name in ("Top-k 0.9", "Top-k 0.99", "RD 0.9", "RD 0.99")
    ),
)

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
    *_MEMORY,
)
