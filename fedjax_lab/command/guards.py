"""Wrappers in a run's settings: robust rules, privacy, secure aggregation, attacks."""

from typing import Any

from fedjax_lab.checks import check_choice, check_int, check_number
from fedjax_lab.data.client_sampling import SAMPLINGS
from fedjax_lab.round import Algorithm
from fedjax_lab.wrappers.accounting import check_bands
from fedjax_lab.wrappers.attacks import ATTACKS, with_attack
from fedjax_lab.wrappers.buffered import with_buffered_aggregation
from fedjax_lab.wrappers.privacy import with_dp
from fedjax_lab.wrappers.robust import with_robust_aggregation
from fedjax_lab.wrappers.rules import parse_rule
from fedjax_lab.wrappers.secure import check_neighbours, with_secure_aggregation

GUARDS = (
    *(
        "robust_rule",
        "dp_clip_norm",
        "dp_noise_multiplier",
        "dp_delta",
        "dp_adaptive_quantile",
        "dp_noise_bands",
    ),
    *("secure_bits", "secure_clip", "secure_neighbours", "attack"),
)
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


def check_guards(config: Any) -> None:
    """Check the settings of the wrappers.

    Args:
      config: a ``RunConfig``.

    Raises:
      TypeError, ValueError: a setting is unknown, out of range, or incompatible with another.
    """
    check_choice("sampling", config.sampling, SAMPLINGS)
    for name, other in _NEEDS:
        if getattr(config, name) is not None and getattr(config, other) is None:
            raise ValueError(f"{name} is {getattr(config, name)}; it requires {other}.")
    for name, minimum, maximum in (
        ("dp_clip_norm", 0.0, float("inf")),
        ("dp_delta", 0.0, 1.0),
        ("dp_adaptive_quantile", 0.0, 1.0),
        ("secure_clip", 0.0, float("inf")),
    ):
        value = getattr(config, name)
        if value is not None:
            check_number(name, value, minimum=minimum, exclusive_minimum=True)
            check_number(name, value, maximum=maximum, exclusive_maximum=maximum == 1.0)
    if config.dp_noise_multiplier is not None:
        check_number("dp_noise_multiplier", config.dp_noise_multiplier, minimum=0.0)
        if config.weights != "uniform":
            raise ValueError(
                f"weights is {config.weights!r} and dp_clip_norm {config.dp_clip_norm}; with "
                "privacy every client counts once: weights must be 'uniform'."
            )
    if config.dp_noise_bands is not None:
        check_bands(config.dp_noise_bands, config.sampling)
    if config.robust_rule is not None:
        parse_rule(config.robust_rule)
    if config.secure_bits is not None:
        check_int("secure_bits", config.secure_bits, minimum=2, maximum=32)
    if config.secure_neighbours is not None:
        check_neighbours(config.secure_neighbours, "secure_neighbours")
    if config.attack is not None:
        parse_attack(config.attack)


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


def with_guards(algorithm: Algorithm, config: Any) -> Algorithm:
    """Wrap the method as the settings request, with the attack outside all others.

    Args:
      algorithm: the method, with its compression.
      config: a resolved ``RunConfig``, of which ``dp_clip_norm`` and ``dp_noise_multiplier`` may
        be traced.

    Raises:
      TypeError, ValueError: as the wrappers.
    """
    if config.robust_rule is not None:
        algorithm = with_robust_aggregation(algorithm, config.robust_rule)
    if config.dp_clip_norm is not None:
        algorithm = with_dp(
            algorithm,
            config.dp_clip_norm,
            config.dp_noise_multiplier,
            config.dp_delta,
            config.dp_adaptive_quantile,
            config.dp_noise_bands or 1,
        )
    if config.secure_bits is not None:
        algorithm = with_secure_aggregation(
            algorithm, config.secure_bits, config.secure_clip, config.secure_neighbours
        )
    if config.concurrency is not None:
        algorithm = with_buffered_aggregation(algorithm, config.cohort_size, config.concurrency)
    if config.attack is not None:
        name, arguments = parse_attack(config.attack)
        algorithm = with_attack(algorithm, name, seed=config.seed, **arguments)
    return algorithm
