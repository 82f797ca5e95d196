"""Messages that arrive one by one: what wrappers share that look at each client's.

Axes: S slots of the cohort.
"""

import jax

from fedjax_lab import tree
from fedjax_lab.round import Phase
from fedjax_lab.types import Cohort, PyTree


def stack_all(phase: Phase) -> Phase:
    """The phase with all fields stacked [S, ...] on their way to the server.

    Args:
      phase: any phase.
    """
    return phase._replace(reduce=dict.fromkeys(phase.reduce, "stack"))


def who_counts(messages: dict, cohort: Cohort) -> jax.Array:
    """bool [S]: who takes part, has a weight above 0 and sent finite numbers.

    Args:
      messages: stacked, field -> pytree [S, ...].
      cohort: the round's.
    """
    return cohort.participates & (cohort.weights > 0) & jax.vmap(tree.all_finite)(messages)


def select(counts: jax.Array, messages: PyTree) -> PyTree:
    """Stacked messages with zeros for those who do not count.

    Args:
      counts: bool [S].
      messages: pytree [S, ...].
    """
    return jax.vmap(tree.zero_unless)(counts, messages)


def along(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """A number for each client, shaped so that it goes with all numbers of its leaf.

    Args:
      values: [S].
      leaf: [S, ...].

    Returns:
      [S, 1, ...], with as many axes as the leaf.
    """
    return values.reshape(-1, *(1,) * (leaf.ndim - 1))


def reduce_messages(reduce: dict[str, str], messages: dict, cohort: Cohort) -> dict:
    """What a phase's server half expects of messages that arrived one by one.

    Args:
      reduce: field -> "mean", "sum" or "stack".
      messages: stacked, field -> pytree [S, ...].
      cohort: the round's.
    """
    messages = select(cohort.participates, messages)
    coefficients = {
        "mean": cohort.weights,
        "sum": cohort.participates.astype(cohort.weights.dtype),
    }
    return {
        name: field if reduce[name] == "stack" else _total(field, coefficients[reduce[name]])
        for name, field in messages.items()
    }


def _total(field: PyTree, coefficients: jax.Array) -> PyTree:
    return tree.weighted_sum(select(coefficients > 0, field), coefficients)
