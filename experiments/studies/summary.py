"""How many claims of each paper show: the table of docs/papers_and_codes.md.

    python -m experiments.studies.summary

writes it from the kept results.
"""

import importlib
from pathlib import Path

from experiments.studies.claims import FAILS, OPEN, SHOWS, judge
from fedjax_lab.estimates import markdown_table
from fedjax_lab.machine.files import write_text

PAPERS = {
    "gradma": "GradMA",
    "fedswa": "FedSWA, FedMoSWA",
    "cfedavg": "CFedAvg",
    "fafed": "FAFED",
    "fedspeed": "FedSpeed",
}
_ROOT = Path(__file__).parents[1]
PAGE = _ROOT.parent / "docs" / "papers_and_codes.md"
BEGIN, END = "<!-- claims -->\n", "\n<!-- /claims -->"


def summary() -> str:
    """Markdown: how many claims of each paper show, as written and as published."""
    kinds = (SHOWS, f"{SHOWS} only as published", f"{SHOWS} only as written", OPEN, FAILS)
    rows = [["paper", "claims", *kinds]]
    for paper, name in PAPERS.items():
        claims = importlib.import_module(f"experiments.{paper}.claims").CLAIMS
        studies = importlib.import_module(f"experiments.{paper}.__main__").STUDIES
        found = [row[-1] for row in judge(claims, studies, _ROOT / paper)]
        rows.append([name, str(len(found)), *(str(found.count(kind)) for kind in kinds)])
    return markdown_table(rows)


def main() -> None:
    """Write the summary where the page has a place for it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(PAGE, f"{before}{BEGIN}{summary()}{END}{after}")
    print(PAGE)


if __name__ == "__main__":
    main()
