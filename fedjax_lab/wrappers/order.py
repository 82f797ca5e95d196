"""Which wrapper may go around which, and what they share: messages that arrive one by one."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.round import Algorithm, Phase, check_algorithm
from fedjax_lab.types import Cohort, Params, PyTree

_PERSONAL_FIRST = (
    "which parts of the model stay with their client decides what a message is: make leaves "
    "personal first, {outer}(with_personal(...), ...)"
)
_ATTACK_LAST = (
    "an attacker sends what it likes, whatever was to be done to its message: attack last, "
    "with_attack({outer}(...), ...)"
)
_SUM_ALONE = "secure aggregation shows the server the sum alone, and a robust rule needs each one"
_OTHER_SENSITIVITY = (
    "the noise is meant for a sum, of which one client changes at most clip_norm; what a robust "
    "rule makes of the messages has another sensitivity"
)
_SEVERAL_ROUNDS = (
    "a server step takes messages of clients that started in several rounds, and {one} is of one "
    "round's cohort"
)
_NAMES = {
    "compression": "with_compression",
    "personal": "with_personal",
    "robust": "with_robust_aggregation",
    "dp": "with_dp",
    "secure": "with_secure_aggregation",
    "attack": "with_attack",
    "buffered": "with_buffered_aggregation",
}
_WHY = {
    **{(inner, "personal"): _PERSONAL_FIRST for inner in _NAMES if inner != "personal"},
    **{
        pair: _SEVERAL_ROUNDS.format(one=one)
        for name, one in (("dp", "the sum that noise is meant for"), ("secure", "a mask"))
        for pair in ((name, "buffered"), ("buffered", name))
    },
    ("personal", "buffered"): "what clients keep from round to round has no order in flight",
    ("buffered", "compression"): (
        "what a server step takes was compressed when its client sent it: "
        "with_buffered_aggregation(with_compression(...), ...)"
    ),
    ("buffered", "robust"): (
        "the rule is for the messages of a server step: "
        "with_buffered_aggregation(with_robust_aggregation(...), ...)"
    ),
    ("buffered", "buffered"): "messages wait in a buffer already",
    **{("attack", outer): _ATTACK_LAST for outer in _NAMES if outer != "personal"},
    ("attack", "attack"): "one attack is all that is simulated at a time",
    ("dp", "compression"): (
        "a compressor may send a longer vector than it was given, so that the clipped norm would "
        "bound nothing: with_dp(with_compression(...), ...)"
    ),
    ("secure", "compression"): (
        "masked messages are uniform numbers, of which nothing can be left out: "
        "with_secure_aggregation(with_compression(...), ...)"
    ),
    ("secure", "dp"): (
        "messages are clipped before they are masked: with_secure_aggregation(with_dp(...), ...)"
    ),
    ("secure", "secure"): "messages are masked already",
    ("dp", "dp"): "messages are clipped and noised already",
    ("robust", "robust"): "messages are combined by one rule",
    ("secure", "robust"): _SUM_ALONE,
    ("robust", "secure"): _SUM_ALONE,
    ("dp", "robust"): _OTHER_SENSITIVITY,
    ("robust", "dp"): _OTHER_SENSITIVITY,
}


def check_order(algorithm: Algorithm, outer: str) -> tuple[str, ...]:
    """Check that a wrapper may go around a method; returns its ``wrappers`` with this one.

    Args:
      algorithm: the method, which knows what it is wrapped in.
      outer: one of "compression", "personal", "robust", "dp", "secure", "attack" and
        "buffered".

    Raises:
      TypeError: ``algorithm`` is something else.
      ValueError: the composition has no meaning, or the method sends nothing.
    """
    check_algorithm(algorithm)
    if not any(phase.reduce for phase in algorithm.phases):
        raise ValueError(
            f"algorithm is {algorithm.name}, whose clients send nothing: there are no messages for "
            f"{_NAMES[outer]} to change."
        )
    for inner in algorithm.wrappers:
        if (inner, outer) in _WHY:
            why = _WHY[inner, outer].format(outer=_NAMES[inner if outer == "personal" else outer])
            raise ValueError(
                f"algorithm is {algorithm.name}: {_NAMES[outer]} does not go around "
                f"{_NAMES[inner]}; {why}."
            )
    return (*algorithm.wrappers, outer)


def refuse_stacks(algorithm: Algorithm, wrapper: str, why: str) -> None:
    """Refuse a method whose server takes the messages one by one.

    Args:
      algorithm: the method.
      wrapper: the wrapper's function, for the error.
      why: what speaks against it.

    Raises:
      ValueError: a field of a message is stacked.
    """
    fields = [name for p in algorithm.phases for name, how in p.reduce.items() if how == "stack"]
    if fields:
        raise ValueError(
            f"algorithm is {algorithm.name}, whose server works with each client's "
            f"{', '.join(fields)} by itself; {wrapper} takes methods whose server needs means and "
            f"sums only, since {why}."
        )


def refuse_step_counts(algorithm: Algorithm, wrapper: str, params: Params, server: PyTree) -> None:
    """Refuse a method whose server computes with each client's number of steps.

    Args:
      algorithm: the method.
      wrapper: the wrapper's function, for the error.
      params: the first server model.
      server: the method's first server state.

    Raises:
      ValueError: a server half depends on K_i.
    """
    one, number = jnp.ones(1), jnp.zeros((), jnp.int32)
    slot = jnp.zeros(1, jnp.int32)
    for phase in algorithm.phases:
        if not phase.reduce:
            continue
        message = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), phase.message_like(params))

        def update(num_steps, server, message, phase=phase):
            key = jax.random.key(0)
            cohort = Cohort(slot, one > 0, one, number, number + 1, 1, num_steps, key, True)
            return phase.server_update(server, message, cohort)

        traced = jax.make_jaxpr(update)(slot, server, message).jaxpr
        if any(traced.invars[0] is used for eqn in traced.eqns for used in eqn.invars):
            raise ValueError(
                f"algorithm is {algorithm.name}, whose server computes with the number of local "
                f"steps of each client, which {wrapper} does not hide."
            )


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


def select(counts: jax.Array, messages: dict) -> dict:
    """Stacked messages with zeros for those who do not count.

    Args:
      counts: bool [S].
      messages: field -> pytree [S, ...].
    """
    return jax.vmap(tree.zero_unless)(counts, messages)


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


def tag(number: int) -> np.uint32:
    """What a wrapper folds into a key; phases, steps and clients fold in small numbers.

    Args:
      number: from 1; 1 is FedPD's coin, 2 the compressed messages'.
    """
    return np.uint32(2**32 - number)
