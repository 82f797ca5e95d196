"""What FedSWA's and FedSpeed's papers claim of generalisation, decided by cells of one task.

The claims were written before the cells were run. In the task, FedAvg's training accuracy was
required to be at least 10 points above its test accuracy. The rules are those of the studies
(experiments/PROTOCOL.md): the paired difference over the seeds, by top and by tail.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.leaderboard.scores import tails_of
from experiments.studies.verdicts import UNDECIDED, ahead, both_measures
from fedjax_lab.estimates import NOTHING, Estimate, estimate

TASK = "few-data-decay"
LEAST_GAP = 10.0  # FedAvg's training less test accuracy, in points


@dataclasses.dataclass(frozen=True)
class Claim:
    """A method is ahead of others, of which the best counts.

    Attributes:
      text: the claim.
      ahead: the method.
      of: its rivals.
      is_gap: whether the smaller lead of training over test accuracy is said to be its advantage,
        and not the test accuracy.
      why: why it is contradicted, in a sentence that says what was measured.
    """

    text: str
    ahead: str
    of: tuple[str, ...]
    is_gap: bool = False
    why: str = ""


_RIVALS = (
    *("fedavg", "feddyn", "scaffold", "fedsam", "mofedsam", "fedlesam", "fedasam", "fedacg"),
    "fedswa",
)
_SPEED_RIVALS = ("fedavg", "fedadam", "scaffold", "fedcm", "feddyn")
_COHORT = (
    "the server averages the duals of the cohort; with those of all clients the gap is smaller"
)
_SEARCH = (
    "the search, which has 20 points for four hyperparameters: with 58 its tail is level with "
    "FedAvg's, and still behind SCAFFOLD's"
)
_FITS = "it fits the training images better, and its test accuracy is lower"
CLAIMS = (
    Claim("FedSWA is ahead of FedAvg (FedSWA, Tables 2, 3)", "fedswa", ("fedavg",)),
    Claim("FedSWA is ahead of FedSAM (FedSWA, Tables 2, 3)", "fedswa", ("fedsam",)),
    Claim("FedAvg is ahead of FedSAM (FedSWA, Tables 2, 3)", "fedavg", ("fedsam",)),
    Claim("FedMoSWA is ahead of FedAvg (FedSWA, Tables 2, 3)", "fedmoswa", ("fedavg",)),
    Claim(
        "FedMoSWA is ahead of SCAFFOLD (FedSWA, Tables 2, 3)",
        "fedmoswa",
        ("scaffold",),
        why="not known",
    ),
    Claim(
        "FedMoSWA is ahead of its nine rivals (FedSWA, Tables 2, 3)",
        "fedmoswa",
        _RIVALS,
        why="not known; SCAFFOLD has the best top and tail",
    ),
    Claim("FedMo is ahead of FedAvg (FedSWA, Table 6)", "fedmo", ("fedavg",)),
    Claim("FedMoSWA is ahead of its parts (FedSWA, Table 6)", "fedmoswa", ("fedmo", "fedswa")),
    Claim("FedSWA generalizes better than FedSAM (FedSWA, Table 1)", "fedswa", ("fedsam",), True),
    Claim(
        "FedMoSWA generalizes better than FedSAM (FedSWA, Table 1)",
        "fedmoswa",
        ("fedsam",),
        is_gap=True,
        why="it fits the training images better by more than it does the test images",
    ),
    *(
        claim
        for name, way, why in (
            ("fedspeed", "as written", _COHORT),
            ("fedspeed all", "as published", _SEARCH),
        )
        for claim in (
            Claim(
                f"FedSpeed is ahead of FedAvg, {way} (FedSpeed, Table 4.4)",
                name,
                ("fedavg",),
                why=why,
            ),
            Claim(
                f"FedSpeed is ahead of all others, {way} (FedSpeed, Table 4.4)",
                name,
                _SPEED_RIVALS,
                why=why,
            ),
            Claim(
                f"FedSpeed generalizes better than FedAvg, {way}",
                name,
                ("fedavg",),
                is_gap=True,
                why="" if name == "fedspeed" else _FITS,
            ),
        )
    ),
)


def decided(cells: Mapping[str, Mapping[str, Any]]) -> list[tuple[Claim, str, str, str]]:
    """Return (claim, what the top says, what the tail says, verdict) of each claim.

    A claim is left out while a method that it names has no finite cell.

    Args:
      cells: method -> stored cell of the task.
    """
    tails = tails_of(cells)
    found = []
    for claim in CLAIMS:
        if not {claim.ahead, *claim.of} <= set(tails):
            continue
        if claim.is_gap:
            leads = {name: _leads(cells[name]) for name in (claim.ahead, *claim.of)}
            said = ahead(estimate(_from_best({n: [-v for v in leads[n]] for n in leads}, claim)))
            found.append((claim, str(said), "-", said.verdict))
            continue
        tops = {n: [max(run["scores"]) for run in cells[n]["runs"]] for n in tails}
        each = [_from_best(values, claim) for values in (tops, tails)]
        top, tail = (ahead(estimate(values)) for values in each)
        change = estimate([a - b for a, b in zip(*each, strict=True)])
        verdict = both_measures(top, tail, change)
        if verdict == NOTHING:  # a search chose the point at which the method is its rival
            found.append((claim, "the same runs", "the same runs", UNDECIDED))
        else:
            found.append((claim, str(top), str(tail), verdict))
    return found


def lead(cell: Mapping[str, Any]) -> Estimate:
    """Return training less test accuracy after the last round, in points.

    Args:
      cell: stored cell.
    """
    return estimate(_leads(cell))


def _leads(cell: Mapping[str, Any]) -> list[float]:
    return [run["train"] - run["scores"][-1] for run in cell["runs"]]


def _from_best(values: Mapping[str, list[float]], claim: Claim) -> list[float]:
    best = max(claim.of, key=lambda name: sum(values[name]))
    return [a - b for a, b in zip(values[claim.ahead], values[best], strict=True)]
