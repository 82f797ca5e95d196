"""Whether each number in a discussion stands in the results of its page.

    python -m experiments.studies.numbers

A number is found if the page above the discussion has one that rounds to it, with at least as many
decimals; "a ± b" is found as a pair. What a page does not print is listed in ``ELSEWHERE``, with
where it is from.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.studies.report import DISCUSSION, RESULTS

ROOT = Path(__file__).parents[1]
PAGES = ("catalogue", "cfedavg", "fafed", "fedspeed", "fedswa", "gradma")
_OLD_RUNS = "three runs of before the protocol, whose curves are not stored"
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "catalogue": {
        "110": "the last round of a diverged run, in results/stale_controls.json",
        "600": "renewals: rounds times clients that renew",
        "1100": "renewals: rounds times clients that renew",
        "2000": "renewals: rounds times clients that renew",
        "0.6": "share of the last layer, 1,010 of 178,110 parameters, in percent",
        "1010": "parameters of the last layer, 100 x 10 + 10",
        "178110": "parameters of the MLP 784-200-100-10",
        **dict.fromkeys(
            ("1.9 ± 1.4", "1.9", "1.1 ± 1.6", "1.1", "0.7 ± 1.7"),
            "differences from clients who train alone; the table has those from the best",
        ),
    },
    "fafed": {
        "360": "digits in the test set",
        "12.5": "the best validation accuracy that tuning saw, in results/cifar10.json",
    },
    "gradma": {
        "52.6": _OLD_RUNS,
        "50.0": _OLD_RUNS,
        "6000": "the largest client's examples, in the partition's figure",
    },
}
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_PAIR = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?) ± (\d[\d,]*(?:\.\d+)?)")


def missing(page: str, discussion: str, elsewhere: Sequence[str] = ()) -> list[str]:
    """Return the numbers and pairs of a discussion that its page does not have.

    Args:
      page: Markdown of the results, without the discussion.
      discussion: Markdown.
      elsewhere: numbers and pairs that need not be there.
    """
    numbers = [(each,) for each in map(_plain, _NUMBER.findall(page))]
    pairs = [tuple(map(_plain, pair)) for pair in _PAIR.findall(page)]
    said = [(each,) for each in map(_plain, _NUMBER.findall(discussion))]
    said_pairs = [tuple(map(_plain, pair)) for pair in _PAIR.findall(discussion)]
    lost = [each for each in said if not _is_among(each, numbers)]
    lost += [each for each in said_pairs if not _is_among(each, pairs)]
    told = [" ± ".join(each) for each in dict.fromkeys(lost)]
    return [each for each in told if each not in elsewhere]


def _plain(number: str) -> str:
    return number.rstrip(",").replace(",", "")


def _is_among(said: Sequence[str], printed: Sequence[Sequence[str]]) -> bool:
    return any(all(map(_rounds_to, one, said)) for one in printed)


def _rounds_to(printed: str, said: str) -> bool:
    decimals = len(said.partition(".")[2])
    close = abs(float(printed) - float(said)) <= 0.5 * 10**-decimals + 1e-9
    return close and len(printed.partition(".")[2]) >= decimals


def check(paper: str) -> list[str]:
    """Return what a paper's discussion says and its RESULTS.md does not.

    Args:
      paper: its folder.
    """
    discussion = (ROOT / paper / DISCUSSION).read_text(encoding="utf-8").strip()
    page, found, _ = (ROOT / paper / RESULTS).read_text(encoding="utf-8").partition(discussion)
    if not found:
        return [f"{RESULTS} does not end with {DISCUSSION}"]
    return missing(page, discussion, tuple(ELSEWHERE.get(paper, {})))


def main() -> None:
    """Print the numbers that are missing; exit with 1 if there are any."""
    lost = {paper: check(paper) for paper in PAGES}
    for paper, numbers in lost.items():
        print(f"{paper}: {', '.join(numbers) or 'all numbers are in the results'}")
    if any(lost.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
