"""How many claims of each paper show: the table of docs/papers_and_codes.md.

    python -m experiments.studies.summary

writes it from the kept results.
"""

import functools
import importlib
from pathlib import Path

from experiments.studies.claims import Judged, chance_note, judge, level_note, tail_note
from experiments.studies.verdicts import (
    AT_SCALE,
    CONTRADICTED,
    DEPENDS,
    SHOWS,
    UNDECIDED,
    WAYS,
    one_way,
)
from fedjax_lab.estimates import NOTHING
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import markdown_table

PAPERS = {
    "gradma": "GradMA",
    "fedswa": "FedSWA, FedMoSWA",
    "cfedavg": "CFedAvg",
    "fafed": "FAFED",
    "fedspeed": "FedSpeed",
}
_ONE_WAY = "contradicted one way"
KINDS = (
    SHOWS,
    *(one_way(SHOWS, way) for way in reversed(WAYS)),
    DEPENDS,
    UNDECIDED,
    AT_SCALE,
    _ONE_WAY,
    CONTRADICTED,
)
_ROOT = Path(__file__).parents[1]
PAGE = _ROOT.parent / "docs" / "papers_and_codes.md"
BEGIN, END = "<!-- claims -->\n", "\n<!-- /claims -->"


@functools.cache
def judged_of(paper: str) -> list[Judged]:
    """Return all claims of a paper with their verdicts.

    Args:
      paper: its folder.
    """
    claims = importlib.import_module(f"experiments.{paper}.claims").CLAIMS
    studies = importlib.import_module(f"experiments.{paper}.__main__").STUDIES
    return judge(claims, studies, _ROOT / paper)


def summary() -> str:
    """Return Markdown: how many claims of each paper show, and how many would by chance."""
    rows = [["paper", "claims", *KINDS]]
    everything = []
    for paper, name in PAPERS.items():
        judged = judged_of(paper)
        rows.append([name, *_counts(judged)])
        everything += judged
    rows.append(["all", *_counts(everything)])
    notes = (chance_note(everything), level_note(everything), tail_note(everything))
    return f"{markdown_table(rows)}\n\n{' '.join(filter(None, notes))}"


def _counts(judged: list[Judged]) -> list[str]:
    one_sided = {one_way(CONTRADICTED, way) for way in WAYS}
    found = [one.verdict for one in judged if one.verdict != NOTHING]
    found = [_ONE_WAY if verdict in one_sided else verdict for verdict in found]
    return [str(len(found)), *(str(found.count(kind)) for kind in KINDS)]


def main() -> None:
    """Write the summary where the page has a place for it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(PAGE, f"{before}{BEGIN}{summary()}{END}{after}")
    print(PAGE)


if __name__ == "__main__":
    main()
