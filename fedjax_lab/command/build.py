"""The method of a ``RunConfig``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax

from fedjax_lab.algorithms import ALGORITHMS
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.options import (
    SERVER_OPTIMIZERS,
    client_schedule,
    defaults_of,
    parse_options,
)
from fedjax_lab.models import Model
from fedjax_lab.models.losses import Preprocess
from fedjax_lab.round import Algorithm
from fedjax_lab.types import LossFn
from fedjax_lab.wrappers.compression import with_compression


def build_algorithm(
    config: RunConfig,
    loss_fn: LossFn,
    model: Model | None = None,
    preprocess: Preprocess | None = None,
    changed: Mapping[str, Any] | None = None,
) -> Algorithm:
    """Make a resolved config's method.

    Args:
      config: the settings.
      loss_fn: what most methods take.
      model, preprocess: what methods such as MOON take instead, to look inside the model.
      changed: hyper-parameters in place of the config's, which may be traced: client_lr,
        server_lr, or the method's own.

    Raises:
      ValueError, TypeError: a hyper-parameter is out of range or has the wrong type.
    """
    changed = dict(changed or {})
    rates = {name: changed.pop(name) for name in ("client_lr", "server_lr") if name in changed}
    config = dataclasses.replace(config, **rates)
    arguments = {**parse_options(config.option, "option"), **changed}
    if config.algorithm == "fedopt":
        optimizer = SERVER_OPTIMIZERS[arguments.pop("server_optimizer")]
        arguments = {"server_optimizer": optimizer(config.server_lr, **arguments)}
    elif config.server_lr is not None:
        arguments["server_lr"] = config.server_lr
    transforms = []
    if config.clip_norm is not None:
        transforms.append(optax.clip_by_global_norm(config.clip_norm))
    if config.weight_decay:
        transforms.append(optax.add_decayed_weights(config.weight_decay))
    if transforms:
        arguments["gradient_transform"] = optax.chain(*transforms)
    factory = ALGORITHMS[config.algorithm]
    subject: Any = loss_fn
    if "model" in defaults_of(factory, leave_out=()):
        subject, arguments["preprocess"] = model, preprocess
    rate = client_schedule(config.client_lr_schedule, config.client_lr, config.rounds)
    algorithm = factory(subject, client_lr=rate, **arguments)
    if config.compressor is None and config.downlink_compressor is None:
        return algorithm
    return with_compression(
        algorithm,
        config.compressor or "identity",
        error_feedback=config.error_feedback,
        downlink=config.downlink_compressor,
    )
