"""Files and folders are the old ones or the new ones, whatever stops their writer."""

import os
import threading
from pathlib import Path

import pytest

from fedjax_lab.machine.atomic_files import new_folder, write_atomically, write_text


class Stopped(BaseException):
    """As of a signal: no ``Exception``."""


def stop(*_):
    raise Stopped


def test_a_file_is_replaced_when_it_is_complete(tmp_path):
    file = tmp_path / "a.json"
    write_text(file, "old é")
    with write_atomically(file, "wb") as out:
        out.write(b"new")
        assert file.read_text(encoding="utf-8") == "old é"
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_error_leaves_the_old_file_alone(tmp_path):
    file = tmp_path / "a.json"
    write_text(file, "old")
    with pytest.raises(Stopped), write_atomically(file) as out:
        stop(out.write("half"))
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_two_writers_at_once_leave_the_whole_file_of_one(tmp_path):
    """With one scratch file for both, the first one's end would publish the second one's half."""
    file, first_is_done = tmp_path / "a", threading.Event()

    def slow():
        with write_atomically(file) as out:
            out.write("slow ")
            assert first_is_done.wait(60)
            out.write("slow")

    writer = threading.Thread(target=slow)
    writer.start()
    write_text(file, "fast fast")
    assert file.read_text() == "fast fast"
    first_is_done.set()
    writer.join()
    assert file.read_text() == "slow slow"
    assert os.listdir(tmp_path) == ["a"]


def test_links_are_replaced_and_not_followed(tmp_path):
    outside, link = tmp_path / "outside", tmp_path / "link"
    outside.write_text("kept")
    link.symlink_to(outside)
    write_text(link, "new")
    assert (outside.read_text(), link.read_text()) == ("kept", "new")
    assert not link.is_symlink()


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    (tmp_path / "plain folder").mkdir()
    write_text(tmp_path / "written", "")
    with new_folder(tmp_path / "folder"):
        pass
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["written"] == modes["plain"]
    assert modes["folder"] == modes["plain folder"]


def test_a_folder_appears_when_it_is_complete(tmp_path):
    folder = tmp_path / "weights"
    with pytest.raises(Stopped), new_folder(folder) as half:
        stop((half / "a").write_text("1"))
    assert os.listdir(tmp_path) == []
    folder.mkdir()  # an empty one is taken
    with new_folder(folder) as half:
        (half / "a").write_text("1")
        assert os.listdir(folder) == []
    assert os.listdir(folder) == ["a"]
    with pytest.raises(FileExistsError, match=r"folder is '.*weights', which is there and not emp"):
        new_folder(folder).__enter__()
    with pytest.raises(FileExistsError, match="folder is"):
        new_folder(folder / "a").__enter__()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_an_empty_or_a_missing_folder_is_followed(tmp_path, there):
    target, link = tmp_path / "disk", tmp_path / "link"
    if there:
        target.mkdir()
    link.symlink_to(target)
    with new_folder(link) as half:
        (half / "a").write_text("1")
    assert link.is_symlink()
    assert os.listdir(target) == ["a"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]


def test_the_working_directory_is_no_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".", "./", str(tmp_path)):
        with pytest.raises(ValueError, match=r"folder is .*, the working directory; it must be an"):
            new_folder(Path(name)).__enter__()
    assert os.listdir(tmp_path) == []
