"""Which wrapper may go around which, and why others may not."""

from fedjax_lab.round import Algorithm, check_algorithm

_PERSONAL_FIRST = (
    "which parts of the model stay with their client decides what a message is: make leaves "
    "personal first, {inner}(with_personal(...), ...)"
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
# Of the functions whose names are not with_KIND.
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
# (inner, outer) -> why not; what is said of two wrappers goes before what is said of all others.
_WHY = {
    **{
        pair: _SEVERAL_ROUNDS.format(one=one)
        for name, one in (("dp", "the sum that noise is meant for"), ("secure", "a mask"))
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
    ("personal", "personal"): "give one is_personal that holds for all leaves that are to stay",
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
    (_ANY, "personal"): _PERSONAL_FIRST,
    ("attack", _ANY): _ATTACK_LAST,
}


def name_of(wrapper: str) -> str:
    """The function of a wrapper, such as "with_dp".

    Args:
      wrapper: its entry in ``algorithm.wrappers``, such as "dp".
    """
    return _NAMES.get(wrapper, f"with_{wrapper}")


def check_order(algorithm: Algorithm, outer: str) -> None:
    """Check that a wrapper may go around a method.

    Args:
      algorithm: the method, which knows what it is wrapped in.
      outer: the wrapper's entry in ``algorithm.wrappers``, such as "dp".

    Raises:
      TypeError: ``algorithm`` is something else.
      ValueError: the composition has no meaning, or the method sends nothing.
    """
    check_algorithm(algorithm)
    if not any(phase.reduce for phase in algorithm.phases):
        raise ValueError(
            f"algorithm is {algorithm.name}, whose clients send nothing: there are no messages for "
            f"{name_of(outer)} to change."
        )
    for inner in algorithm.wrappers:
        pairs = [(inner, outer)]
        if inner != outer:
            pairs += [(_ANY, outer), (inner, _ANY)]
        why = next((_WHY[pair] for pair in pairs if pair in _WHY), None)
        if why is not None:
            why = why.format(inner=name_of(inner), outer=name_of(outer))
            raise ValueError(
                f"algorithm is {algorithm.name}: {name_of(outer)} does not go around "
                f"{name_of(inner)}; {why}."
            )
