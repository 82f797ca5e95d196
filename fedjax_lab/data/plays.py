"""Plays as Project Gutenberg's plain texts have them: who speaks, and what.

A paragraph begins with the name of its speaker on a line of its own, or at the beginning of a line.
Stage directions stand in brackets. Acts and scenes have headings.
"""

import re
from collections import Counter
from typing import NamedTuple

_ACT = re.compile(r"(ACT|Act) (I|1|FIRST)\b")
_BEGIN = re.compile(r"(THE )?(PROLOGUE|INDUCTION)\b|(ACT|Act) ")
_HEADING = re.compile(r"(ACT|SCENE|Act|Scene)\b|EPILOGUE\.?$")
_DIRECTION = re.compile(r"[\[{][^\[\]{}]*[\]}]")
_BRACKET = re.compile(r"[\[{\]}]")
_UNBRACKETED = re.compile(r"(Re-enter|Enter|Exit|Exeunt|Flourish|Alarum)\b")
_SONG = re.compile(r"(SONG|Song)\.?$")
# "KING. Ay, that is study's reward.", but not "MRS. FORD."
_IN_LINE = re.compile(r"(?![IVXL]+\.)([A-Z][A-Z' ]+)\.\s+(\S.*[a-z].*)")
_NUMERAL = re.compile(r"[IVXL]+\.?$")  # of a stanza
_LONGEST_NAME = 40

# What is no speech, by kind.
DIRECTIONS, NAMES = "stage directions", "names of speakers"
HEADINGS, UNKNOWN = "front matter and headings", "text without a speaker"


class Play(NamedTuple):
    """The speeches of a play.

    Attributes:
      title: its first line.
      speeches: (speaker, speech), in order. Speakers are in capitals; lines of verse are separated
        by a newline.
      left_out: number of characters of what is no speech, by kind.
    """

    title: str
    speeches: tuple[tuple[str, str], ...]
    left_out: Counter[str]


def read_play(text: str) -> Play | None:
    """Read a play; None for a text without acts, such as a poem.

    A play names its speakers in one of three ways, and the one that most paragraphs begin with
    counts: "KING.", "King." or "KING". Where a name of the play is written in another of the three,
    it counts, too. A paragraph without a speaker continues the speech before it, unless a heading
    stands between them.

    Args:
      text: the play, from its title on.
    """
    whole = "\n".join(" ".join(line.split()) for line in text.splitlines())
    paragraphs = [p.strip("\n") for p in re.split(r"\n{2,}", whole) if p.strip()]
    if not any(map(_ACT.match, paragraphs)):
        return None
    begin = next(i for i, p in enumerate(paragraphs) if _BEGIN.match(p))
    left_out = Counter({HEADINGS: sum(map(len, paragraphs[:begin]))})
    spoken = [_without_directions(p) for p in paragraphs[begin:]]
    left_out[DIRECTIONS] = sum(map(len, paragraphs[begin:])) - sum(map(len, spoken))
    spoken = [p for p in spoken if p]
    name_of = max(_STYLES, key=lambda style: sum(style(p.split("\n")[0]) != "" for p in spoken))
    names = {_name(name_of(p.split("\n")[0])) for p in spoken} - {""}
    speeches: list[tuple[str, list[str]]] = []
    speaker = ""
    for paragraph in spoken:
        lines = paragraph.split("\n")
        if _HEADING.match(paragraph):
            speaker, lines = "", []
            left_out[HEADINGS] += len(paragraph)
        for place, line in enumerate(lines):
            # Only capitals tell a name from a short line of verse within a paragraph.
            name = name_of(line) if place == 0 or name_of is _in_capitals else ""
            if not name and _name(line) in names and (place == 0 or _is_capital(line)):
                name = line
            in_line = _IN_LINE.match(line) if place == 0 and name_of is _in_capitals else None
            if in_line:
                name, line = in_line[1], in_line[2]
            if name:
                speaker = _name(name)
                speeches.append((speaker, []))
                left_out[NAMES] += len(name)
            if speaker and (in_line or not name):
                speeches[-1][1].append(line)
            elif not speaker:
                left_out[UNKNOWN] += len(line)
    found = ((speaker, "\n".join(lines)) for speaker, lines in speeches)
    title = paragraphs[0].split("\n")[0].strip()
    return Play(title, tuple(speech for speech in found if speech[1]), left_out)


def _name(line: str) -> str:
    return " ".join(line.rstrip(".").upper().split())


def _without_directions(paragraph: str) -> str:
    """Remove stage directions, also those without one of their brackets."""
    while _DIRECTION.search(paragraph):  # the inner ones first
        paragraph = _DIRECTION.sub("", paragraph)
    if paragraph.lstrip()[:1] in ("[", "{") or _UNBRACKETED.match(paragraph.lstrip()):
        return ""
    lines = []
    for line in paragraph.split("\n"):
        if _BRACKET.search(line):
            line = re.split(r"[\[{]", re.split(r"[\]}]", line)[-1])[0]
        lines.append(" ".join(line.split()))
    return "\n".join(line for line in lines if line and not _SONG.match(line))


def _in_capitals(line: str) -> str:
    """Return the line if it is a name such as "KING." or "DUKE and SENATORS.", or ""."""
    return line if line.endswith(".") and _is_capital(line) and not _NUMERAL.match(line) else ""


def _in_capitals_alone(line: str) -> str:
    return line if not line.endswith(".") and _is_capital(line) and not _NUMERAL.match(line) else ""


def _is_capital(line: str) -> bool:
    letters = [letter for letter in line if letter.isalpha()]
    share = sum(map(str.isupper, letters)) / max(1, len(letters))
    is_short = len(letters) > 1 and len(line) <= _LONGEST_NAME
    return is_short and share > 0.6 and not re.search(r"[!?:;]", line)


def _as_title(line: str) -> str:
    words = [] if _is_capital(line) else line.rstrip(".").split()
    is_name = all(word[0].isupper() or word[0].isdigit() or word in ("and", "of") for word in words)
    is_plain = line.endswith(".") and not re.search(r"[,!?:;]", line)
    return line if words and is_name and is_plain and len(line) <= _LONGEST_NAME else ""


_STYLES = (_in_capitals, _as_title, _in_capitals_alone)
