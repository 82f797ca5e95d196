"""Wrappers in a run's settings: robust rules, privacy, secure aggregation, attacks."""

from typing import Any

from fedjax_lab.checks import check_choice
from fedjax_lab.command.settings import ClockSettings, PrivacySettings, RoundsSettings
from fedjax_lab.round import Algorithm
from fedjax_lab.wrappers.attacks import ATTACKS, with_attack
from fedjax_lab.wrappers.buffered import with_buffered_aggregation
from fedjax_lab.wrappers.ledger import check_bands
from fedjax_lab.wrappers.privacy import with_dp
from fedjax_lab.wrappers.robust import with_robust_aggregation
from fedjax_lab.wrappers.rules import parse_rule
from fedjax_lab.wrappers.secure import check_neighbours, with_secure_aggregation

_FORM = "NAME:SHARE or NAME:SHARE:STRENGTH (label_flip:SHARE:CLASSES)"
# Of two settings, the first one needs the second.
_NEEDS = (
    ("dp_clip_norm", "dp_noise_multiplier"),
    ("dp_noise_multiplier", "dp_clip_norm"),
    ("dp_delta", "dp_clip_norm"),
    ("dp_adaptive_quantile", "dp_clip_norm"),
    ("dp_noise_bands", "dp_clip_norm"),
    ("secure_bits", "secure_clip"),
    ("secure_clip", "secure_bits"),
    ("secure_neighbours", "secure_bits"),
)


def check_guards(privacy: PrivacySettings, rounds: RoundsSettings) -> None:
    """Check the settings of the wrappers, whose single ranges are checked.

    Args:
      privacy: the settings.
      rounds: sampling and weights of the clients.

    Raises:
      TypeError, ValueError: a setting is unknown, or incompatible with another.
    """
    for name, other in _NEEDS:
        if getattr(privacy, name) is not None and getattr(privacy, other) is None:
            raise ValueError(f"{name} is {getattr(privacy, name)}; it requires {other}.")
    if privacy.dp_noise_multiplier is not None and rounds.weights != "uniform":
        raise ValueError(
            f"weights is {rounds.weights!r} and dp_clip_norm {privacy.dp_clip_norm}; with "
            "privacy every client counts once: weights must be 'uniform'."
        )
    if privacy.dp_noise_bands is not None:
        check_bands(privacy.dp_noise_bands, rounds.sampling)
    if privacy.robust_rule is not None:
        parse_rule(privacy.robust_rule)
    if privacy.secure_neighbours is not None:
        check_neighbours(privacy.secure_neighbours, "secure_neighbours")
    if privacy.attack is not None:
        parse_attack(privacy.attack)


def parse_attack(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a text such as "sign_flip:0.2:5" into (attack, arguments of ``with_attack``).

    Args:
      text: name of the attack, share of attacking clients, and strength (for label_flip, the number
        of classes).

    Raises:
      ValueError: it has another form, or the attack is unknown.
    """
    name, *given = text.split(":")
    check_choice("attack", name, ATTACKS)
    try:
        share, *rest = map(float, given)
        if len(rest) > 1:
            raise ValueError
        strength = rest[0] if rest else None
        if name == "label_flip":
            if strength is None or strength != int(strength):
                raise ValueError
            return name, {"share": share, "num_classes": int(strength)}
    except (OverflowError, ValueError):  # the former of an infinite number of classes
        raise ValueError(f"attack is {text!r}; it must be of the form {_FORM}.") from None
    return name, {"share": share, "strength": strength}


def with_guards(
    algorithm: Algorithm, privacy: PrivacySettings, rounds: RoundsSettings, clock: ClockSettings
) -> Algorithm:
    """Wrap the method as the settings request, with the attack outside all others.

    Args:
      algorithm: the method, with its compression.
      privacy, rounds, clock: the settings, of which ``dp_clip_norm`` and ``dp_noise_multiplier``
        may be traced.

    Raises:
      TypeError, ValueError: as the wrappers.
    """
    if privacy.robust_rule is not None:
        algorithm = with_robust_aggregation(algorithm, privacy.robust_rule)
    if privacy.dp_clip_norm is not None:
        assert privacy.dp_noise_multiplier is not None  # checked
        algorithm = with_dp(
            algorithm,
            privacy.dp_clip_norm,
            privacy.dp_noise_multiplier,
            privacy.dp_delta,
            privacy.dp_adaptive_quantile,
            privacy.dp_noise_bands or 1,
        )
    if privacy.secure_bits is not None:
        assert privacy.secure_clip is not None  # checked
        algorithm = with_secure_aggregation(
            algorithm, privacy.secure_bits, privacy.secure_clip, privacy.secure_neighbours
        )
    if clock.concurrency is not None:
        algorithm = with_buffered_aggregation(algorithm, rounds.cohort_size, clock.concurrency)
    if privacy.attack is not None:
        name, arguments = parse_attack(privacy.attack)
        algorithm = with_attack(algorithm, name, seed=rounds.seed, **arguments)
    return algorithm
