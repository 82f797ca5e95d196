"""The chapter of a report on settings: those that differ, those in common, and versions."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_lab.estimates import NOTHING
from fedjax_lab.markdown import Cells, code, inert, markdown_table
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.sections import runs_of
from fedjax_lab.report.settings import names_that_differ, show
from fedjax_lab.report.statistics import PERPLEXITY

# What a settings table leaves out: values that nobody chose, ...
_DEFAULTS = {
    **dict.fromkeys(("client_map", "client_store", "lowering"), "auto"),
    **{"client_lr_schedule": "constant", "compute_dtype": "float32", "on_nonfinite": "exclude"},
    **{"sampling": "without_replacement", "over_selection": 1.0, "test_split": "clients:0.2"},
}
# ... and settings that have no effect without another one, or on other data.
_NEEDS = {
    **{"error_feedback": "compressor", "step_time": "time_budget"},
    **{"over_selection": "times", "test_split": "client"},
}
_OF_TEXT = ("tokens", "sequence_length", "vocabulary_size")
_COLUMNS = 3  # of names and values, side by side


def settings_chapter(groups: Sequence[Group]) -> list[str]:
    """Format differing settings as a table with a row for each group, then common settings."""
    settings = [group.runs[0].settings for group in groups]
    differ = names_that_differ(settings)
    own = [{name: value for name, value in one.items() if name in differ} for one in settings]
    common = {name: value for name, value in settings[0].items() if name not in differ}
    common = _chosen(common, groups[0].runs[0])
    parts = []
    if len(groups) > 1 and any(own):
        rows = [[inert(g.label), _listed(values)] for g, values in zip(groups, own, strict=True)]
        parts += [
            "What differs:",
            markdown_table([["method", "its own settings"], *rows], text=True),
        ]
    if common:
        parts += ["Common to all:" if parts else "All of them:"]
        parts += [markdown_table(_in_columns(common), text=True)]
    versions = [run.config.get("versions", {}) for run in runs_of(groups)]
    distinct = [v for i, v in enumerate(versions) if v not in versions[:i]]
    if len(distinct) > 1:
        parts.append("**The runs were made with different versions:**")
    parts += [f"Versions: {_listed(v)}." for v in distinct if v]
    return parts


def _chosen(settings: Mapping[str, Any], of: Run) -> dict[str, Any]:
    """Return the settings without those that are off, at a default, or of no effect on the run.

    A hyperparameter of the method is always kept.
    """
    options = of.config.get("run_config", {}).get("option", {})
    own = {*of.config.get("hyperparameters", {}), *options}
    is_text = PERPLEXITY in of.names

    def is_shown(name: str, value: Any) -> bool:
        if name in own:
            return True
        if name == "data_hash" or (name in _OF_TEXT and not is_text):
            return False
        has_effect = name not in _NEEDS or of.settings.get(_NEEDS[name])
        return bool(value) and value != _DEFAULTS.get(name) and bool(has_effect)

    return {name: value for name, value in settings.items() if is_shown(name, value)}


def _listed(values: dict[str, Any]) -> str:
    shown = [f"{inert(name)} {code(show(value))}" for name, value in values.items()]
    return ", ".join(shown) or NOTHING


def _in_columns(values: dict[str, Any]) -> Cells:
    """Format names and values in several columns, to be read downwards."""
    cells = [[inert(name), code(show(value))] for name, value in sorted(values.items())]
    height = -(-len(cells) // _COLUMNS)
    cells += [["", ""]] * (-len(cells) % height)
    rows = [[text for cell in cells[row::height] for text in cell] for row in range(height)]
    return [["setting", "value"] * (len(cells) // height), *rows]
