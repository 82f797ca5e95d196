"""Reports on run directories: Markdown tables with intervals over seeds, and figures."""

from fedjax_lab.estimates import Estimate, estimate
from fedjax_lab.report.plot import plot
from fedjax_lab.report.runs import Group, Run, group_runs, load_runs
from fedjax_lab.report.tables import default_target, summary_table
from fedjax_lab.report.write import default_folder, write_report

__all__ = [
    "Estimate",
    "Group",
    "Run",
    "default_folder",
    "default_target",
    "estimate",
    "group_runs",
    "load_runs",
    "plot",
    "summary_table",
    "write_report",
]
