"""Helpers of wrappers that need the message of each client.

Axes: S slots of the cohort.
"""

import jax

from fedjax_lab import tree
from fedjax_lab.round import Phase
from fedjax_lab.types import Cohort, PyTree


def stack_all(phase: Phase) -> Phase:
    """Convert a phase so that all fields of its messages are stacked [S, ...].

    Args:
      phase: any phase.
    """
    return phase._replace(reduce=dict.fromkeys(phase.reduce, "stack"))


def who_counts(messages: dict, cohort: Cohort) -> jax.Array:
    """Select the participants with a weight above 0 and a finite message: bool [S].

    Args:
      messages: stacked messages, field -> pytree [S, ...].
      cohort: cohort of the round.
    """
    return cohort.participates & (cohort.weights > 0) & jax.vmap(tree.all_finite)(messages)


def select(counts: jax.Array, messages: PyTree) -> PyTree:
    """Replace the messages of clients that do not count by zeros.

    Args:
      counts: bool [S].
      messages: pytree [S, ...].
    """
    return jax.vmap(tree.zero_unless)(counts, messages)


def reduce_messages(reduce: dict[str, str], messages: dict, cohort: Cohort) -> dict:
    """Aggregate stacked messages as a phase's server half expects.

    Args:
      reduce: field -> "mean", "sum" or "stack".
      messages: stacked messages, field -> pytree [S, ...].
      cohort: cohort of the round.
    """
    coefficients = {
        "mean": cohort.weights,
        "sum": cohort.participates.astype(cohort.weights.dtype),
    }

    def total(name: str, field: PyTree) -> PyTree:
        if reduce[name] == "stack":
            return select(cohort.participates, field)
        factors = coefficients[reduce[name]]
        return tree.weighted_sum(select(factors > 0, field), factors)

    return {name: total(name, field) for name, field in messages.items()}
