"""The leaderboard's cells on the pairs of methods that a paper's claims compare."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.leaderboard.cells import RESULTS, load
from experiments.leaderboard.scores import difference, tails_of
from experiments.leaderboard.tasks import TASKS
from experiments.studies.claims import Claim
from experiments.studies.measures import ACCURACY
from experiments.studies.verdicts import CONTRADICTED, SHOWS, ahead
from fedjax_lab.estimates import NOTHING, format_estimate
from fedjax_lab.markdown import markdown_table

_ROWS = {"fedadmm": "fedadmm W"}  # of the methods that have another name there
_PUBLISHED = {"fedspeed": "fedspeed all"}  # rows that run a method as its code does


def section(claims: Iterable[Claim], folder: Path = RESULTS) -> list[str]:
    """Return Markdown: the difference of each pair of a paper's claims on each task.

    Args:
      claims: of the paper.
      folder: folder of the leaderboard's results.
    """
    tails = {name: tails_of(load(folder, name)) for name in TASKS}
    known = {method for scores in tails.values() for method in scores}
    pairs = list(dict.fromkeys(pair for claim in claims for pair in _pairs(claim, known)))
    if not pairs:
        return []
    rows = [["ahead of", *TASKS, "shows", "contradicted"]]
    for method, rivals in pairs:
        cells, said = [], []
        for scores in tails.values():
            run = [name for name in rivals if name in scores]
            if method not in scores or not run:
                cells.append(NOTHING)
                continue
            best = max(run, key=lambda name: sum(scores[name]))
            found = difference(scores[method], scores[best])
            said.append(ahead(found).verdict)
            cells.append(format_estimate(found, 2))
        counts = [str(said.count(verdict)) for verdict in (SHOWS, CONTRADICTED)]
        of = rivals[0] if len(rivals) == 1 else f"the best of {', '.join(rivals)}"
        rows.append([f"{method}: {of}", *cells, *counts])
    return [
        "### Beside the leaderboard",
        "The same pairs on [the leaderboard's tasks](../../docs/leaderboard.md), where all methods "
        "are tuned with equal budgets: paired differences of the mean over the last tenth of the "
        "rounds with 95 % intervals, in points of accuracy, on `convex` in decimal digits. Of "
        "several rivals, the best one of the task counts. The last columns count the tasks whose "
        "interval lies above 0, and below."
        + "".join(
            f" `{row}` is the method as its code runs it."
            for row in _PUBLISHED.values()
            if row in dict(pairs)
        ),
        markdown_table(rows),
    ]


def _pairs(claim: Claim, known: set[str]) -> list[tuple[str, Sequence[str]]]:
    """What a claim that is on accuracy alone compares, by the leaderboard's names."""
    if claim.measure != ACCURACY or claim.alike or claim.since or claim.by:
        return []
    names = [re.sub(r"\W", "_", name.lower()) for name in (claim.ahead, *claim.of)]
    method, *rivals = (_ROWS.get(name, name) for name in names)
    if not {method, *rivals} <= known:
        return []
    return [(name, tuple(rivals)) for name in (method, _PUBLISHED.get(method)) if name]
