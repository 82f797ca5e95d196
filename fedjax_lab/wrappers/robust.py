"""Robust aggregation, which tolerates arbitrary messages from some clients.

The rules and their papers: ``fedjax_lab.wrappers.rules``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.checks import check_choice
from fedjax_lab.descriptions import describe
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Cohort, PyTree
from fedjax_lab.wrappers.base import Wrapper
from fedjax_lab.wrappers.client_messages import reduce_messages, select, stack_all, who_counts
from fedjax_lab.wrappers.rules import Rule, check_cohort, parse_rule

# (messages, field -> pytree [S, ...]; weights [S]) -> aggregated message
RuleFn = Callable[[dict[str, PyTree], jax.Array], dict[str, PyTree]]
SCOPES = ("global", "per_field", "per_leaf")


@suggest_keywords
def with_robust_aggregation(
    algorithm: Algorithm, rule: str | RuleFn, *, scope: str = "global"
) -> Algorithm:
    """Replace the mean in a method's aggregation by a robust rule.

    =======================  ============================================================
    rule                     result in place of the mean
    =======================  ============================================================
    ``median``               median of each number
    ``trimmed_mean:SHARE``   mean of each number without the floor(SHARE n) smallest and as many
                             of the largest values; requires n of at least 1 / SHARE
    ``krum:F``               the message with the smallest sum of squared distances to its
                             n - F - 2 nearest others
    ``multi_krum:F:M``       mean of the M best messages by that score
    ``geometric_median``     the point with the smallest weighted sum of distances to the messages
    ``norm_clip:C``          weighted mean of the messages, each clipped to norm C
    a function               (messages, weights) -> message, see below
    =======================  ============================================================

    n is the number of participating clients with a weight above 0 and finite numbers; others do not
    count. Median, trimmed mean and Krum give each of these clients one vote, because weights are
    reported by the clients themselves. The geometric median and ``norm_clip`` use the batch's
    weights.

    In fields that a server averages, the mean is replaced by the result. In fields that it sums
    over the cohort, such as SCAFFOLD's changes of control variates, the sum is replaced by n times
    the result (with ``norm_clip``, by the sum of the clipped messages). The server's sums over
    rounds then differ from those of the clients' rows, and an error of the rule in one round
    remains in them.

    Krum, multi-Krum and the trimmed mean need a minimum number of clients. A cohort with fewer
    slots is an error. If fewer clients participate, the rule uses these clients and tolerates fewer
    attackers than stated. The metric ``too_few_for_rule`` is then 1; in rows, it is the share of
    such rounds.

    First estimates (FAFED, STEM) are aggregated with the rule, too; they are computed in the first
    round, not by ``init``. Other values that a server uses, such as FedNova's K_i, are trusted.

    Memory: all messages of a cohort are in memory, S times one message, while the plain method adds
    them up one by one. Median and trimmed mean work on 2 million numbers at a time.

    Source: ``fedjax_lab.wrappers.rules`` names the paper of each rule.

    Args:
      algorithm: a method whose server needs only means and sums; with ``norm_clip``, any method.
      rule: text, or a function of the stacked messages (field -> pytree [S, ...], zeros for clients
        that do not count) and weights [S] (adding up to 1, 0 for clients that do not count), which
        returns a message without the leading axis.
      scope: vectors for which distances and norms are computed: "global": a message with all its
        fields; "per_field": each field; "per_leaf": each array. It has no effect on median and
        trimmed mean, and is ignored for a function.

    Raises:
      TypeError: the rule is neither text nor a function.
      ValueError: the rule or the scope is unknown; a number in the rule is out of range; the server
        needs single messages; the order of wrappers has no meaning; or (when the round is traced)
        the cohort is too small for the rule.
    """
    wrapper = Wrapper(algorithm, "robust")
    check_choice("scope", scope, SCOPES)
    chosen = rule if callable(rule) else parse_rule(rule)
    if not (isinstance(chosen, Rule) and chosen.factors):
        wrapper.refuse_stacks("what stands for all of them cannot stand for each")
    text = chosen.text if isinstance(chosen, Rule) else getattr(rule, "__qualname__", "function")
    recorded = text if isinstance(chosen, Rule) else describe(rule)

    return wrapper.wrap(
        text.split(":")[0],
        lambda phase, place: _robust(algorithm.name, phase, chosen, scope),
        needs_floats=True,
        hyperparameters={"rule": recorded, "rule_scope": scope},
    )


def _robust(name: str, phase: Phase, rule: Rule | RuleFn, scope: str) -> Phase:
    """Wrap a phase so that its messages are aggregated with a rule."""

    def server_update(server, messages, cohort):
        counts = who_counts(messages, cohort)
        messages = select(counts, messages)
        if isinstance(rule, Rule):
            check_cohort(name, rule, counts.shape[0])
            combined = _combine(rule, phase.reduce, messages, cohort, counts, scope)
        else:
            combined = _sums(phase.reduce, _by_function(rule, messages, cohort, counts), counts)
        inner, metrics = phase.server_update(server, combined, cohort)
        if isinstance(rule, Rule) and rule.fewest > 1:
            short = counts.sum() < rule.fewest
            metrics = {**metrics, "too_few_for_rule": short.astype(cohort.weights.dtype)}
        return inner, metrics

    return stack_all(phase)._replace(server_update=server_update)


def _combine(rule, reduce, messages, cohort: Cohort, counts, scope) -> dict:
    """Aggregate the messages with one of the built-in rules, as the method's server expects."""
    if rule.factors:

        def shorten(group):
            return tree.scale_rows(group, rule.factors(group))

        scaled = _in_groups(shorten, messages, scope)
        weights = _weights(cohort, counts)
        return reduce_messages(
            reduce, scaled, cohort._replace(weights=weights, participates=counts)
        )
    if rule.entrywise:
        combined = jax.tree.map(lambda leaf: rule.entrywise(leaf, counts), messages)
    else:
        weights = _weights(cohort, counts)

        def mix(group):
            return tree.weighted_sum(group, rule.shares(group, weights, counts))

        combined = _in_groups(mix, messages, scope)
    return _sums(reduce, combined, counts)


def _in_groups(function: Callable[[PyTree], PyTree], messages: dict, scope: str) -> dict:
    """Apply a function to all fields together, to each field, or to each array."""
    if scope == "global":
        return function(messages)
    if scope == "per_field":
        return {
            name: function(field) if jax.tree.leaves(field) else field
            for name, field in messages.items()
        }
    return jax.tree.map(function, messages)


def _sums(reduce: dict[str, str], combined: dict, counts: jax.Array) -> dict:
    """Multiply by n the fields that the server expects as sums."""
    return {
        name: tree.scale(field, counts.sum()) if reduce[name] == "sum" else field
        for name, field in combined.items()
    }


def _by_function(rule: RuleFn, messages: dict, cohort: Cohort, counts: jax.Array) -> dict:
    combined = rule(messages, _weights(cohort, counts))
    wanted = jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype), messages)
    found = jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), combined)
    if found != wanted:
        raise ValueError(
            f"rule returned arrays of (shape, dtype) {found}; for these messages they must be "
            f"{wanted}."
        )
    return combined


def _weights(cohort: Cohort, counts: jax.Array) -> jax.Array:
    weights = jnp.where(counts, cohort.weights, 0)
    return tree.safe_divide(weights, weights.sum())
