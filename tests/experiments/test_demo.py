"""Ctrl-C ends both processes of the demo, and the same command goes on from there."""

import os
import signal
import subprocess
import sys

import pytest

from fedjax_lab.report import load_runs

SHORT = """
import sys
from pathlib import Path
from experiments.demo import main
if __name__ == "__main__":
    main(Path(sys.argv[1]), rounds=2)
"""


def start(folder):
    """A demo of two rounds, in a process group of its own as a terminal starts one."""
    return subprocess.Popen(
        [sys.executable, "-c", SHORT, str(folder / "runs")],
        env={**os.environ, "FEDJAX_LAB_PROGRAMS": str(folder / "programs")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def interrupt(demo, at):
    """Press Ctrl-C when the demo says something; returns what it says then."""
    assert any(line.startswith(at) for line in demo.stdout)
    os.killpg(demo.pid, signal.SIGINT)
    said, _ = demo.communicate(timeout=120)  # until neither process holds the pipe
    assert demo.returncode == 1
    return said


@pytest.mark.methods
def test_an_interrupted_demo_goes_on(tmp_path):
    for at in ("gradma, seed 0", "fedavg, seed 1"):
        said = interrupt(start(tmp_path), at)
        assert "Stopped early" in said
        assert "Traceback" not in said, said
    finished = tmp_path / "runs" / "fedavg-seed0" / "metrics.jsonl"
    before = finished.read_bytes()
    demo = start(tmp_path)
    said, _ = demo.communicate(timeout=300)
    assert demo.returncode == 0, said
    assert (tmp_path / "runs" / "report" / "report.md").exists()
    runs = load_runs(sorted(tmp_path.glob("runs/*-seed?")))
    assert len(runs) == 9
    assert all(run.finished for run in runs)
    assert finished.read_bytes() == before  # with the seconds of its own run
