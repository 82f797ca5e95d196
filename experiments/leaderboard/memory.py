"""What GradMA-S owes to its memory: the leaderboard's point with memories of three sizes.

    python -m experiments.leaderboard.memory

It prints the score of the stored cell's point with a memory of all clients, of one cohort, and of
nobody, with the seeds of the cell. Nothing is tuned again. docs/leaderboard.md quotes the table.
"""

import dataclasses

from experiments.leaderboard.cells import RESULTS, final_runs, load
from experiments.leaderboard.methods import METHODS
from experiments.leaderboard.scores import rows_of
from experiments.leaderboard.tasks import TASKS, Task, problem
from fedjax_lab.estimates import NOTHING, format_estimate
from fedjax_lab.markdown import markdown_table

NAME, SHOWN = "gradma_s", ("skew-0.1", "skew-0.01", "unequal")


def scores(name: str, task: Task) -> list[str]:
    """Return the scores with a memory of all clients, of one cohort, and of nobody.

    Args:
      name, task: the task.
    """
    given, cell = problem(task), load(RESULTS, name)[NAME]
    found = []
    for size in (task.num_clients, task.schedule["cohort_size"], 0):
        method = dataclasses.replace(METHODS[NAME], fixed={"memory_size": size})
        runs = final_runs(method, cell["chosen"], task, given, task.rounds)
        score = rows_of(task, {NAME: {**cell, **runs}})[NAME].score
        found.append(NOTHING if score is None else format_estimate(score, 2))
    return found


def main() -> None:
    """Print the table."""
    table = [["task", "all clients", "one cohort", "none"]]
    table += [[name, *scores(name, TASKS[name])] for name in SHOWN]
    print(markdown_table(table))


if __name__ == "__main__":
    main()
