"""The progress bar on a terminal, lines elsewhere, nothing if it is not wanted."""

import re
import sys

import pytest

from fedjax_lab.simulation.loggers import Progress


def show(enabled=True):
    bar = Progress("fedavg", rounds=8, enabled=enabled)
    bar.go_on_from(4)
    bar.update(6, {"loss": 1.25})
    bar.update(7, {"loss": 1.125})
    bar.update(8, {"loss": 0.5, "accuracy": 0.75})
    bar.close()


def test_lines_in_a_log(capsys):
    show()
    out, err = capsys.readouterr()
    assert out == ""
    first, last = err.splitlines()  # within ten seconds only the first and the last
    assert re.fullmatch(r"fedavg: round 6/8  \d+\.\d rounds/s  \d+ s left  loss 1\.250", first)
    assert last.startswith("fedavg: round 8/8 ")
    assert last.endswith("loss 0.5000  accuracy 0.7500")


@pytest.mark.parametrize("colours", [True, False])
def test_a_bar_on_a_terminal(capsys, monkeypatch, colours):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    show()
    out, err = capsys.readouterr()
    assert out == ""
    assert "8/8" in err
    assert "accuracy 0.7500" in err
    assert bool(re.search(r"\x1b\[(\d+;)*[34]\d", err)) == colours


def test_what_does_not_fit_beside_the_bar_is_left_out(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().err)
    last = re.split(r"[\r\n]+", shown.strip())[-1]
    assert "8/8" in last
    assert "loss 0.5000" in last
    assert "accuracy" not in last
    assert "…" not in last


def test_silence(capsys, monkeypatch):
    show(enabled=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show(enabled=False)
    assert capsys.readouterr() == ("", "")
