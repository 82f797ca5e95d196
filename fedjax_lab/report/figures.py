"""The figures of a report on run directories."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_lab.markdown import code
from fedjax_lab.report.curves import (
    DRIFT,
    ERROR_MEMORY,
    ERRORS,
    GLOBAL_MODEL,
    LOSSES,
    OWN_ERRORS,
    PERPLEXITIES,
    UPDATES,
    Measure,
    accuracy_figure,
    has,
    measure_of,
    metric_figure,
    panels_note,
    panels_of,
    ranking_figure,
    spread_note,
)
from fedjax_lab.report.distribution import client_scores, clients_figure
from fedjax_lab.report.partition_figure import partition_figure
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.sections import runs_of, score_of
from fedjax_lab.report.statistics import ACCURACY, ERROR, PERPLEXITY
from fedjax_lab.report.style import at_print_size, save
from fedjax_lab.report.surfaces import surface_figure

MOST_CURVES = 14  # more cannot be told apart
# What runs may be scored by without a figure of it.
_FIGURED = ("", ACCURACY, ERROR, PERPLEXITY, "loss", "test_loss")


def write_figures(
    groups: Sequence[Group], folder: Path, prefix: str = "", form: str = "png"
) -> list[tuple[str, str]]:
    """Write the PNG files and return (file name, caption) of each.

    Args:
      form: "pdf" or "svg" also writes each figure as vectors, at its size in print.

    Raises:
      ImportError: matplotlib is missing.
    """
    written = []

    def add(figure: Any, name: str, caption: str) -> None:
        name = f"{prefix}{name}"
        save(figure, folder / name)
        if form != "png":
            save(at_print_size(figure), (folder / name).with_suffix(f".{form}"))
        written.append((name, caption))

    def add_metrics(measures: Sequence[Measure], name: str, caption: str) -> None:
        if shown := panels_of(groups, measures):
            add(metric_figure(shown), name, f"{caption}{panels_note(shown)}")

    score = score_of(runs_of(groups))
    compared = measure_of(score)
    if score.is_accuracy and has(groups, compared):
        what = compared.label.removesuffix(score.unit)
        if len(groups) > MOST_CURVES:
            caption = f"Top {what}: mean, 95 % interval, and the single seeds as ticks."
            add(ranking_figure(groups), "ranking.png", caption)
        caption = f"{what.capitalize()} against rounds, bytes sent and gradients taken."
        add(accuracy_figure(groups), "accuracy.png", f"{caption}{spread_note(groups)}")
    elif score.metric not in _FIGURED:
        add_metrics([compared], "score.png", f"{code(score.name)} against rounds.")
    if any(map(client_scores, runs_of(groups))):
        caption = (
            "Scores of the last model on each client's own test examples, the worst client first"
            f"{' (thick lines: the clients of all seeds)' if spread_note(groups) else ''}. "
            "`clients.csv` has the numbers."
        )
        add(clients_figure(groups), "clients.png", caption)
    if score.is_own:
        caption = "Test accuracy of the global model against rounds."
        add_metrics([GLOBAL_MODEL], "global_model.png", caption)
    own = "Mean squared error of the own models on the clients' test examples against rounds."
    add_metrics([OWN_ERRORS], "own_error.png", own)
    add_metrics([ERRORS], "error.png", "Mean squared error of the test set against rounds.")
    add_metrics([PERPLEXITIES], "perplexity.png", "Perplexity of the test set against rounds.")
    add_metrics(LOSSES, "loss.png", "Loss against rounds.")
    drift = "How far local models y get from the server's x in a round."
    add_metrics([DRIFT], "drift.png", drift)
    updates = "What clients send in a round, means over the participants (`with_update_metrics`)."
    add_metrics(UPDATES, "updates.png", updates)
    errors = "Compressed messages: what is kept for later, what was to be sent, and what was sent."
    add_metrics(ERROR_MEMORY, "error_memory.png", errors)
    for number, run in enumerate(_distinct_partitions(groups)):
        spec, seed = run.partition["spec"], run.partition["seed"]
        figure = partition_figure(run.partition["label_histogram"])
        caption = f"Partition {code(spec)} drawn with seed {seed}: who holds which labels."
        add(figure, f"partition{number or ''}.png", caption)
    landscapes = landscapes_of(groups)
    if landscapes:
        caption = (
            "Training loss on a plane through the last model (the cross), with the largest "
            "eigenvalues λ of its Hessian."
        )
        add(surface_figure(landscapes), "landscape.png", caption)
    return written


def landscapes_of(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Return label -> landscape of the first run of the group that has one."""
    found = {group.label: [r.landscape for r in group.runs if r.landscape] for group in groups}
    return {label: landscapes[0] for label, landscapes in found.items() if landscapes}


def _distinct_partitions(groups: Sequence[Group]) -> list[Run]:
    """Return a run for each scheme and number of clients, at most four."""
    found: dict[Any, Run] = {}
    for run in runs_of(groups):
        if run.partition.get("label_histogram"):
            scheme = run.settings.get("dataset"), run.settings.get("partition")
            found.setdefault((scheme, run.config.get("num_clients")), run)
    return list(found.values())[:4]
