"""What the paper of CFedAvg says of its figures. It has no published code."""

from experiments.studies.claims import Claim

_PARTITIONS = {p: f"classes_per_client:{p}" for p in (10, 5, 2, 1)}


def _figure(text: str, p: int, ahead: str, *of: str, alike: bool = False) -> Claim:
    return Claim(f"{text}, p = {p} (Figure 1)", "figure_1", _PARTITIONS[p], ahead, of, alike)


CLAIMS = (
    *(
        _figure("Top-k 0.9 is as good as FedAvg", p, "Top-k 0.9", "FedAvg", alike=True)
        for p in (10, 1)
    ),
    *(
        _figure("Top-k 0.99 is as good as FedAvg", p, "Top-k 0.99", "FedAvg", alike=True)
        for p in (10, 1)
    ),
    *(
        _figure("Error feedback helps top-k 0.99", p, "Top-k 0.99", "Top-k 0.99, no EF")
        for p in (10, 1)
    ),
    *(
        _figure("Top-k 0.99 is ahead of random dropping", p, "Top-k 0.99", "RD 0.99")
        for p in (10, 1)
    ),
    _figure("Top-k 0.9 is ahead of 0.99", 1, "Top-k 0.9", "Top-k 0.99"),
    _figure("Random dropping at 0.9 is ahead of 0.99", 1, "RD 0.9", "RD 0.99"),
    Claim(
        "For the traffic of FedAvg with one local step, top-k 0.99 with ten is ahead (Figure 2)",
        "figure_2",
        "classes_per_client:5",
        "Top-k 0.99",
        ("FedAvg, one local step",),
    ),
)
