"""Quadratic programs that were not solved are said: by the run, and by its report."""

import warnings

import numpy as np
import pytest

from fedjax_lab.report import summary_table
from fedjax_lab.report.cells import accuracy_table, run_table
from fedjax_lab.simulation.divergence import Watch
from tests.report.by_hand import groups_of, write_run


def test_a_run_says_once_that_its_programs_were_not_solved():
    watch = Watch("gradma_s", "exclude")

    def look(first, residuals):
        """What is said of a chunk whose rounds have these residuals."""
        metrics = {"participants": np.ones(3), "client_qp_residual": np.asarray(residuals)}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert watch.look(first, metrics, True) == (3, False)
        return [str(one.message) for one in told]

    assert look(0, [1e-3, np.nan, 1e-5]) == []
    (said,) = look(3, [1e-5, 2e-3, 5e14])
    expected = "in round 5 of gradma_s client_qp_residual is 5e+14, above 0.001: its quadratic"
    assert said.startswith(expected)
    assert look(6, [1.0, 1.0, 1.0]) == []


def test_a_report_marks_runs_whose_programs_were_not_solved(tmp_path):
    bad, good = ({"client_qp_residual": largest} for largest in (0.01, 0.001))  # over the round
    write_run(tmp_path / "bad", [0.1, 0.2], algorithm="gradma_w", more=bad)
    write_run(tmp_path / "good", [0.1, 0.2], algorithm="gradma", more=good)
    groups = groups_of(tmp_path)
    assert [row[0] for row in accuracy_table(groups)[1:]] == ["gradma_w †", "gradma"]
    assert [row[4] for row in run_table(groups)[1:]] == ["10 † residual 0.002", "10"]
    assert "†: quadratic programs of the method were not solved" in summary_table(groups)
    assert "†" not in summary_table(groups[1:])


@pytest.mark.parametrize(("value", "is_said"), [(None, False), (1e-3, False), (1.01e-3, True)])
def test_the_bound_is_a_thousandth(tmp_path, value, is_said):
    run_dir = write_run(tmp_path / "a", [0.5])
    text = (run_dir / "metrics.jsonl").read_text().replace("}", ', "server_qp_residual": X}')
    shown = "null" if value is None else str(value)
    (run_dir / "metrics.jsonl").write_text(text.replace("X", shown))
    assert ("†" in accuracy_table(groups_of(run_dir))[1][0]) == is_said
