"""Builds the method of a ``RunConfig``."""

import functools
import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.algorithms import as_published
from fedjax_lab.algorithms.authors_codes import clip_and_decay
from fedjax_lab.command.config import VARIED, RunConfig
from fedjax_lab.command.config_checks import parse_attack
from fedjax_lab.command.factories import find, is_own
from fedjax_lab.command.options import CLIPS, SERVER_OPTIMIZERS
from fedjax_lab.command.schedules import client_schedule
from fedjax_lab.command.settings import said_of
from fedjax_lab.machine.keys import seeded
from fedjax_lab.models import Model, classification_loss, mlp
from fedjax_lab.models.losses import Preprocess
from fedjax_lab.round import MANY_CLIENTS, Algorithm, check_algorithm
from fedjax_lab.types import LossFn
from fedjax_lab.wrappers.attacks import with_attack
from fedjax_lab.wrappers.buffered import with_buffered_aggregation
from fedjax_lab.wrappers.compression import with_compression
from fedjax_lab.wrappers.privacy import with_dp
from fedjax_lab.wrappers.robust import with_robust_aggregation
from fedjax_lab.wrappers.secure import with_secure_aggregation


def build_algorithm(
    config: RunConfig,
    loss_fn: LossFn,
    model: Model | None = None,
    preprocess: Preprocess | None = None,
    changed: Mapping[str, Any] | None = None,
) -> Algorithm:
    """Build the method of a resolved config.

    Args:
      model, preprocess: for methods such as MOON, which look inside the model.
      changed: hyperparameters that replace the config's and may be traced: of ``VARIED``, or the
        method's own.

    Raises:
      ValueError, TypeError: a hyper-parameter is out of range or has the wrong type.
    """
    changed = dict(changed or {})
    settings = {name: changed.pop(name) for name in VARIED if name in changed}
    config = config.replace(**settings)
    method = config.method
    arguments = {**config.options()["algorithm"], **changed}
    if method.algorithm == "fedopt":
        optimizer = SERVER_OPTIMIZERS[arguments.pop("server_optimizer")]
        arguments = {"server_optimizer": optimizer(method.server_lr, **arguments)}
    elif method.server_lr is not None:
        arguments["server_lr"] = method.server_lr
    factory = find("algorithm", method.algorithm)
    takes = inspect.signature(factory).parameters
    clip_norm, decay = method.clip_norm, method.weight_decay
    if method.as_published:
        arguments |= {"clip_norm": clip_norm, "weight_decay": decay}
        factory = functools.partial(as_published, method.algorithm)
    else:
        clipping = clip_and_decay(clip_norm, 0.0 if decay is None else decay)
        place = CLIPS[method.clip or "gradient"]
        if clipping is not None or place in takes:  # a method of one's own may take none
            arguments[place] = clipping
    subject: Any = loss_fn
    if "model" in takes:
        subject, arguments["preprocess"] = model, preprocess
    rate = client_schedule(method.client_lr_schedule, method.client_lr, config.rounds.rounds)
    algorithm = factory(subject, client_lr=rate, **arguments)
    check_algorithm(algorithm, f"what {method.algorithm} returns")
    return _with_wrappers(algorithm, config)


def _with_wrappers(algorithm: Algorithm, config: RunConfig) -> Algorithm:
    """Wrap the method as the settings request, with the attack outside all others."""
    method, privacy, rounds, clock = config.method, config.privacy, config.rounds, config.clock
    if method.compressor is not None or method.downlink_compressor is not None:
        is_buffered = clock.concurrency is not None  # its clients have no residuals
        algorithm = with_compression(
            algorithm,
            method.compressor or "identity",
            error_feedback=method.error_feedback
            and not (is_buffered and method.compressor is None),
            downlink=method.downlink_compressor,
        )
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
        with said_of("concurrency", clock.concurrency):
            algorithm = with_buffered_aggregation(algorithm, rounds.cohort_size, clock.concurrency)
    if privacy.attack is not None:
        name, arguments = parse_attack(privacy.attack)
        with said_of("attack", privacy.attack):
            algorithm = with_attack(algorithm, name, seed=rounds.seed, **arguments)
    return algorithm


def check_methods(configs: Iterable[RunConfig]) -> None:
    """Check before the first of several runs that their methods take their options and wrappers.

    Methods of the user's own are left out: they may do more than build.

    Args:
      configs: resolved.

    Raises:
      ValueError, TypeError: as ``build_algorithm``.
    """
    model, met = mlp(2), set()  # any one, of which nothing is computed
    params = jax.eval_shape(model.init, seeded(0), jnp.zeros((1, 4)))
    for config in configs:
        about = config.method, config.privacy, config.clock, config.rounds.cohort_size
        if about not in met and not is_own("algorithm", config.method.algorithm):
            met.add(about)
            with warnings.catch_warnings(action="ignore"):  # the run itself will warn
                algorithm = build_algorithm(config, classification_loss(model.apply), model)
                if algorithm.wrappers and algorithm.personal is None:  # else the leaves matter
                    jax.eval_shape(lambda p, a=algorithm: a.start(p, MANY_CLIENTS, None), params)
