"""The allowed orders of wrappers, and the reasons against others."""

from fedjax_lab.round import Algorithm, check_algorithm

_PERSONAL_FIRST = (
    "personal leaves determine what a message contains: apply with_personal first, "
    "{inner}(with_personal(...), ...)"
)
_ATTACK_LAST = (
    "an attacker does not apply other wrappers to its message: attack last, "
    "with_attack({outer}(...), ...)"
)
_SUM_ALONE = (
    "secure aggregation shows the server only the sum, but a robust rule needs each message"
)
_OTHER_SENSITIVITY = (
    "the noise is calibrated for a sum, which one client changes by at most clip_norm; the result "
    "of a robust rule has another sensitivity"
)
_SEVERAL_ROUNDS = (
    "a server step uses messages of clients that started in several rounds, and {one} belongs to "
    "the cohort of one round"
)
# Functions whose names are not with_KIND.
_NAMES = {
    "robust": "with_robust_aggregation",
    "secure": "with_secure_aggregation",
    "buffered": "with_buffered_aggregation",
    "padded_ranks": "with_ranks",
}
_RANKS = ("ranks", "padded_ranks")
_PADDED_IN_SECRET = (
    "what the server pads depends on who took part, and no noise hides that: "
    "with_ranks(..., padded='changes')"
)
_ANY = "any other"
# (inner, outer) -> reason; the entry of a pair takes precedence over general ones.
_WHY = {
    **{
        pair: _SEVERAL_ROUNDS.format(one=one)
        for name, one in (("dp", "the sum that gets noise"), ("secure", "a mask"))
        for pair in ((name, "buffered"), ("buffered", name))
    },
    **{
        pair: why
        for ranks in _RANKS
        for pair, why in {
            ("personal", ranks): "ranks are those of adapters that all clients share",
            ("buffered", ranks): _SEVERAL_ROUNDS.format(one="what clients do not hold"),
            (ranks, "buffered"): _SEVERAL_ROUNDS.format(one="what clients do not hold"),
            ("secure", ranks): "a mask that is truncated cancels nothing: truncate first",
            **{(inner, ranks): "clients have a rank already" for inner in _RANKS},
        }.items()
    },
    ("dp", "padded_ranks"): _PADDED_IN_SECRET,
    ("padded_ranks", "dp"): _PADDED_IN_SECRET,
    ("padded_ranks", "robust"): (
        "the rule must combine the adapters as the server pads them: "
        "with_ranks(with_robust_aggregation(...), ...)"
    ),
    ("personal", "personal"): "use one is_personal for all personal leaves",
    ("personal", "buffered"): "the state of clients in flight is not defined",
    ("buffered", "compression"): (
        "messages are compressed when a client sends them, before they wait in the buffer: "
        "with_buffered_aggregation(with_compression(...), ...)"
    ),
    ("buffered", "robust"): (
        "the rule must combine the messages of a server step: "
        "with_buffered_aggregation(with_robust_aggregation(...), ...)"
    ),
    ("buffered", "buffered"): "messages are buffered already",
    ("attack", "attack"): "only one attack can be simulated",
    ("dp", "compression"): (
        "compression may increase the norm of a clipped message: "
        "with_dp(with_compression(...), ...)"
    ),
    ("secure", "compression"): (
        "masked messages are uniform numbers, which cannot be compressed: "
        "with_secure_aggregation(with_compression(...), ...)"
    ),
    ("secure", "dp"): (
        "messages must be clipped before they are masked: "
        "with_secure_aggregation(with_dp(...), ...)"
    ),
    ("secure", "secure"): "messages are masked already",
    ("dp", "dp"): "messages are clipped and noised already",
    ("robust", "robust"): "messages are combined by a rule already",
    ("secure", "robust"): _SUM_ALONE,
    ("robust", "secure"): _SUM_ALONE,
    ("dp", "robust"): _OTHER_SENSITIVITY,
    ("robust", "dp"): _OTHER_SENSITIVITY,
    (_ANY, "personal"): _PERSONAL_FIRST,
    ("attack", _ANY): _ATTACK_LAST,
    ("attack", "update_metrics"): None,  # it measures what attackers send
    ("secure", "update_metrics"): "masked messages are uniform numbers, which say nothing",
    ("update_metrics", "update_metrics"): "updates are measured already",
    ("update_metrics", _ANY): (
        "it measures what clients send: apply it last, with_update_metrics({outer}(...), ...)"
    ),
}


def name_of(wrapper: str) -> str:
    """Return the name of a wrapper's function, such as "with_dp".

    Args:
      wrapper: name of the wrapper in ``algorithm.wrappers``, such as "dp".
    """
    return _NAMES.get(wrapper, f"with_{wrapper}")


def check_order(algorithm: Algorithm, outer: str) -> None:
    """Check that a wrapper may be applied to a method.

    Args:
      outer: name of the new wrapper in ``algorithm.wrappers``, such as "dp".

    Raises:
      TypeError: ``algorithm`` is no ``Algorithm``.
      ValueError: the composition has no meaning, or the method sends no messages.
    """
    check_algorithm(algorithm)
    if not any(phase.reduce for phase in algorithm.phases):
        raise ValueError(
            f"algorithm is {algorithm.name}, whose clients send no messages for {name_of(outer)} "
            "to change."
        )
    for inner in algorithm.wrappers:
        pairs = [(inner, outer)]
        if inner != outer:
            pairs += [(_ANY, outer), (inner, _ANY)]
        why = next((_WHY[pair] for pair in pairs if pair in _WHY), None)
        if why is not None:
            why = why.format(inner=name_of(inner), outer=name_of(outer))
            raise ValueError(
                f"algorithm is {algorithm.name}: {name_of(outer)} cannot wrap "
                f"{name_of(inner)}; {why}."
            )
