"""Robust aggregation around any method: some of a cohort's messages may be anything.

The rules and their papers: ``fedjax_lab.wrappers.rules``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.checks import check_choice
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Cohort, PyTree
from fedjax_lab.wrappers.frame import Frame
from fedjax_lab.wrappers.rules import Rule, parse_rule
from fedjax_lab.wrappers.stacked import reduce_messages, select, stack_all, who_counts

# (messages, field -> pytree [S, ...]; weights [S]) -> the message that stands for all of them
RuleFn = Callable[[dict[str, PyTree], jax.Array], dict[str, PyTree]]
SCOPES = ("global", "per_field", "per_leaf")


@suggest_keywords
def with_robust_aggregation(
    algorithm: Algorithm, rule: str | RuleFn, *, scope: str = "global"
) -> Algorithm:
    """The same method whose server combines the messages with a robust rule.

    =======================  ============================================================
    rule                     what the server takes for the mean
    =======================  ============================================================
    ``median``               of each number the median
    ``trimmed_mean:SHARE``   of each number the mean without the floor(SHARE n) smallest and as
                             many of the largest; for n of 1 / SHARE at least
    ``krum:F``               the message with the least squared distances to its n - F - 2 nearest
    ``multi_krum:F:M``       the mean of the M best by that score
    ``geometric_median``     the point with the least weighted sum of distances to the messages
    ``norm_clip:C``          the weighted mean of the messages, shortened to a norm of C
    a function               (messages, weights) -> message, see below
    =======================  ============================================================

    n counts the clients that take part, with a weight above 0 and finite numbers; no others
    reach a rule. Median, trimmed mean and Krum give each of them one vote, since a weight is what
    a client says of itself; the geometric median and ``norm_clip`` take the batch's weights.

    Fields that a server averages get the result itself. Those that it sums over the cohort, such
    as SCAFFOLD's changes of control variates, which it divides by N, get n times the result (in
    ``norm_clip``, the sum of the shortened messages). The server's sums over rounds then no longer
    equal those of the clients' rows, and what a rule errs in one round stays in them.

    Krum, multi-Krum and the trimmed mean need so many clients. A cohort of fewer slots is an error;
    where fewer count because some are absent, the rule takes those that there are, bears fewer
    attackers than it says, and the metric ``too_few_for_rule`` is 1 (in rows: the share of the
    rounds).

    First estimates (FAFED, STEM) pass the rule as well: they are taken in the first round, not by
    ``init``. What a server reads beside the messages, such as FedNova's K_i, is taken as true.

    Memory: all messages of a cohort are kept, S times one message, where the plain method sums
    them up as they come. Median and trimmed mean work on 2 million numbers at a time.

    Args:
      algorithm: any method whose server needs means and sums; with ``norm_clip``, any method.
      rule: text, or a function of the stacked messages (field -> pytree [S, ...], with zeros for
        those who do not count) and weights [S] (adding up to 1, 0 for those who do not count),
        which returns a message: the same without the leading axis.
      scope: what distances and norms are taken over: "global": a message as one vector, with all
        its fields; "per_field": each field alone; "per_leaf": each array alone. It makes no
        difference to median and trimmed mean, and a function sees to it itself.

    Raises:
      TypeError: the rule is neither text nor a function.
      ValueError: the rule or the scope is unknown, a number in the rule is out of range, the
        method's server works with single messages, or the wrappers' order has no meaning; or,
        when the round is traced, the cohort is too small for the rule.
    """
    frame = Frame(algorithm, "robust")
    check_choice("scope", scope, SCOPES)
    chosen = rule if callable(rule) else parse_rule(rule)
    if not (isinstance(chosen, Rule) and chosen.factors):
        frame.refuse_stacks("what stands for all of them cannot stand for each")
    text = chosen.text if isinstance(chosen, Rule) else getattr(rule, "__qualname__", "function")

    return frame.wrap(
        text.split(":")[0],
        lambda phase, place: _robust(algorithm.name, phase, chosen, scope),
        hyperparameters={"rule": text, "rule_scope": scope},
    )


def _robust(name: str, phase: Phase, rule: Rule | RuleFn, scope: str) -> Phase:
    """The phase with another aggregation."""

    def server_update(server, messages, cohort):
        messages = {field: messages[field] for field in phase.reduce}
        counts = who_counts(messages, cohort)
        messages = select(counts, messages)
        if isinstance(rule, Rule):
            _check_cohort(name, rule, counts.shape[0])
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
    """The fields as the method's server expects them, by one of our rules."""
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
    """``function`` of all fields together, of each, or of each array."""
    if scope == "global":
        return function(messages)
    if scope == "per_field":
        return {name: function(field) for name, field in messages.items()}
    return jax.tree.map(function, messages)


def _sums(reduce: dict[str, str], combined: dict, counts: jax.Array) -> dict:
    """n times those fields that the server expects a sum of."""
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
            f"rule returned arrays of (shape, dtype) {found}; of these messages they must be "
            f"{wanted}."
        )
    return combined


def _weights(cohort: Cohort, counts: jax.Array) -> jax.Array:
    weights = jnp.where(counts, cohort.weights, 0)
    return tree.safe_divide(weights, weights.sum())


def _check_cohort(name: str, rule: Rule, slots: int) -> None:
    if slots < rule.fewest:
        raise ValueError(
            f"rule is {rule.text!r}; {name} has a cohort of {slots}, and it needs {rule.fewest}: "
            "2 F + 3 for Krum, F + M for multi-Krum, and 1 / SHARE for a trimmed mean, which cuts "
            "nothing of fewer."
        )
