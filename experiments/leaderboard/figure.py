"""The figure of the leaderboard: methods by tasks, coloured by the gap."""

import html
from collections.abc import Mapping, Sequence

from experiments.leaderboard.methods import METHODS
from experiments.leaderboard.scores import Row
from experiments.leaderboard.tasks import TASKS

_LEFT, _TOP, _WIDTH, _HEIGHT = 150, 44, 84, 18
_NEAR, _FAR = (255, 247, 188), (102, 37, 6)  # ColorBrewer's YlOrBr, lightness falls all the way
_INK = "#777"  # readable on a light and on a dark page
_SCALES = {"%": 5.0, "digits": 2.0}


def heat_map(found: Mapping[str, Mapping[str, Row]], names: Sequence[str]) -> str:
    """Return an SVG: methods down, tasks across, sorted by the mean of the gaps.

    Args:
      found: task -> method -> row.
      names: all methods.
    """
    run = [name for name in names if any(name in rows for rows in found.values())]
    shades = {name: _shades(found, name) for name in run}

    def place(name: str) -> tuple[int, float]:
        given = [shade for shade in shades[name].values() if shade is not None]
        return -len(given), sum(given) / max(len(given), 1)

    run.sort(key=place)
    width, height = _LEFT + _WIDTH * len(found), _TOP + _HEIGHT * len(run)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">'
    ]
    for column, name in enumerate(found):
        lines.append(_text(_LEFT + _WIDTH * (column + 0.5), _TOP - 8, "middle", name))
    for line, method in enumerate(run):
        down = _TOP + _HEIGHT * line
        lines.append(_text(_LEFT - 8, down + 13, "end", method))
        lines += [
            _cell(_LEFT + _WIDTH * column, down, name, method, rows, shades[method][name])
            for column, (name, rows) in enumerate(found.items())
        ]
    return "\n".join([*filter(None, lines), "</svg>\n"])


def _shades(found: Mapping[str, Mapping[str, Row]], method: str) -> dict[str, float | None]:
    """Task -> how dark, from 0 to 1; None: there is no score."""
    shades: dict[str, float | None] = {}
    for name, rows in found.items():
        gap = rows[method].gap if method in rows else None
        shades[name] = None if gap is None else min(gap.mean / _SCALES[TASKS[name].unit], 1.0)
    return shades


def _cell(across, down, task, method, rows, shade) -> str:
    if method not in rows:
        known = METHODS.get(method)
        fits = known is None or known.refused(TASKS[task]) is None
        return "" if fits else _text(across + _WIDTH / 2, down + 13, "middle", "·")
    row = rows[method]
    shade = 1.0 if shade is None else shade
    colour = ",".join(str(round(a + shade * (b - a))) for a, b in zip(_NEAR, _FAR, strict=True))
    said = "diverged" if row.gap is None else "best" if row.is_best else f"{row.gap.mean:.2f}"
    box = (
        f'<rect x="{across + 1}" y="{down + 1}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" '
        f'style="fill:rgb({colour})"/>'
    )
    ink = "white" if shade > 0.5 else "black"
    label = _text(across + _WIDTH / 2, down + 13, "middle", said)
    label = label.replace("<text ", f'<text style="fill:{ink}" ')
    return box + label


def _text(across: float, down: float, side: str, said: str) -> str:
    return f'<text x="{across:g}" y="{down:g}" text-anchor="{side}">{html.escape(said)}</text>'
