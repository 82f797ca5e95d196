"""Methods as their authors' published code runs them, where that is not what the paper writes.

Three codes were read, and fifteen of these methods run beside ours with the same first parameters,
cohorts and mini-batches in float64; with these settings what they compute agrees to rounding:

- FL-Simulator (woodenchild95/FL-Simulator, 502bec6), by the authors of FedSpeed and FedSMOO,
- FedSWA (junkangLiu0/FedSWA, ``main.py`` of May 2025, 6f3e52c),
- GradMA (lkyddd/GradMA, 495792e).

``as_published(name, ...)`` makes a method with its code's options, and with clipping and weight
decay where that code has them:

- FL-Simulator clips the whole direction of a step to norm 10, and its SGD adds weight decay
  afterwards. Of a proximal term p (y - x_t), the part -p x_t is inside the clip and p y outside.
  Control variates and FedCM's direction come from a client's displacement.
- FedSWA's code clips the gradient and adds weight decay to it, before the control variates.
- GradMA's code does neither.

What the codes do by mistake is left out: a number of local steps that is a fraction and client 0's
for all (FL-Simulator), control variates that pass from one client to the next (FedSWA), a quadratic
program whose result is discarded on machines without CUDA (GradMA).

What belongs to a run and not to its method is in ``PUBLISHED[name].also``: schedules, weights of
the clients, networks.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from fedjax_lab.algorithms.client_momentum import fedcm
from fedjax_lab.algorithms.control_variates import scaffold
from fedjax_lab.algorithms.dynamic_reg import feddyn
from fedjax_lab.algorithms.fedavg import fedavg
from fedjax_lab.algorithms.fedopt import fedadam
from fedjax_lab.algorithms.fedspeed import fedspeed
from fedjax_lab.algorithms.fedswa import fedmoswa, fedswa
from fedjax_lab.algorithms.global_sharpness import fedsmoo
from fedjax_lab.algorithms.gradma import gradma, gradma_s, gradma_w
from fedjax_lab.algorithms.hyper import is_plain_zero
from fedjax_lab.algorithms.proximal import fedprox
from fedjax_lab.algorithms.sharpness import fedgamma, fedsam, mofedsam
from fedjax_lab.checks import check_choice, check_number
from fedjax_lab.round import Algorithm
from fedjax_lab.types import Scalar

_Factory = Callable[..., Algorithm]


class Published(NamedTuple):
    """Settings with which a published code runs a method.

    Attributes:
      factory: of the method.
      code: whose it is.
      options: the factory's arguments in which the code differs from its defaults, or which it
        sets where they have none.
      clips: what clipping and weight decay act on: "gradient", "step", or "prox step": the step
        without the part ``prox_weight`` * y.
      clip_norm: the global norm to which it clips; None: it does not.
      weight_decay: its default.
      also: what else its runs have, for a reader.
    """

    factory: _Factory
    code: str
    options: Mapping[str, Any]
    clips: str
    clip_norm: float | None
    weight_decay: float
    also: str


def _simulator(factory: _Factory, clips: str = "step", **options: Any) -> Published:
    also = "client_lr times 0.998^t"
    return Published(factory, "FL-Simulator", options, clips, 10.0, 1e-3, also)


def _swa(factory: _Factory, **options: Any) -> Published:
    also = "client_lr times 0.998^(t+1): round 0 is decayed already"
    return Published(factory, "FedSWA", options, "gradient", 10.0, 1e-3, also)


def _gradma(factory: _Factory, **options: Any) -> Published:
    also = 'weights="examples", networks with BatchNorm (norm="batch")'
    options = {"qp_scope": "per_leaf", **options}
    return Published(factory, "GradMA", options, "gradient", None, 0.0, also)


PUBLISHED: dict[str, Published] = {
    "fedavg": _simulator(fedavg),
    "fedprox": _simulator(fedprox, "prox step", prox_weight=0.1),
    "fedadam": _simulator(fedadam, server_lr=0.1, tau=0.01, initial_second_moment=0.0),
    "scaffold": _simulator(scaffold, mean_from="displacement"),
    "fedcm": _simulator(fedcm, mixing=0.1, mean_from="displacement"),
    "feddyn": _simulator(feddyn, "prox step", prox_weight=0.1),
    "fedsam": _simulator(fedsam, perturbation_radius=0.1),
    "mofedsam": _simulator(mofedsam, perturbation_radius=0.1, mixing=0.1, mean_from="displacement"),
    "fedgamma": _simulator(fedgamma, perturbation_radius=0.01, mean_from="displacement"),
    "fedsmoo": _simulator(
        fedsmoo, "prox step", perturbation_radius=0.1, prox_weight=0.1, s_source="mu"
    ),
    "fedspeed": _simulator(
        fedspeed, "prox step", perturbation_radius=0.1, prox_weight=0.1, server_dual="all"
    ),
    "fedswa": _swa(fedswa, final_lr_ratio=0.1),
    "fedmoswa": _swa(
        fedmoswa,
        final_lr_ratio=0.1,
        momentum=0.1,
        first_round_gamma_one=True,
        control_divisor="trapezoid",
    ),
    "gradma": _gradma(gradma),
    "gradma_s": _gradma(gradma_s),
    "gradma_w": _gradma(gradma_w, keep_local_model=True),
}


def as_published(
    name: str,
    loss_fn: Any,
    *,
    clip_norm: Scalar | None = None,
    weight_decay: Scalar | None = None,
    **arguments: Any,
) -> Algorithm:
    """Make a method as its authors' published code runs it.

    Args:
      name: a key of ``PUBLISHED``.
      loss_fn: as the method's factory takes it.
      clip_norm: global norm to which the code clips. None: the code's own.
      weight_decay: None: the code's own.
      arguments: of the factory; ``client_lr`` is required, others replace the code's options.

    Raises:
      ValueError: there is no published code of that method, or an argument is out of range.
      TypeError: an argument is unknown; or a transform is given, whose place is decided here.
    """
    found = PUBLISHED[check_choice("name", name, PUBLISHED)]
    for transform in ("gradient_transform", "step_transform"):
        if arguments.get(transform) is not None:
            raise TypeError(
                f"{transform} is given; as_published places clipping and weight decay itself: "
                f"call algorithms.{name} for another {transform}."
            )
    clip_norm = found.clip_norm if clip_norm is None else clip_norm
    weight_decay = found.weight_decay if weight_decay is None else weight_decay
    options = {**found.options, **arguments}
    prox = 0.0
    if found.clips == "prox step":
        prox = check_number("prox_weight", options["prox_weight"], minimum=0.0)
    place = "gradient_transform" if found.clips == "gradient" else "step_transform"
    return found.factory(
        loss_fn, **options, **{place: clip_and_decay(clip_norm, weight_decay, outside=prox)}
    )


def clip_and_decay(
    clip_norm: Scalar | None, weight_decay: Scalar, *, outside: Scalar = 0.0
) -> optax.GradientTransformation | None:
    """Clip to a global norm, then add weight decay.

    Args:
      clip_norm: above 0; None: no clipping.
      weight_decay: multiple of the parameters that is added.
      outside: multiple of the parameters that the direction holds and that is not clipped.

    Returns:
      None where there is nothing to do.

    Raises:
      ValueError, TypeError: a number is out of range or none.
    """
    check_number("weight_decay", weight_decay, minimum=0.0)
    if clip_norm is None:
        return None if is_plain_zero(weight_decay) else optax.add_decayed_weights(weight_decay)
    check_number("clip_norm", clip_norm, minimum=0.0, exclusive_minimum=True)
    transforms = [optax.clip_by_global_norm(clip_norm)]
    if not is_plain_zero(outside):
        transforms.insert(0, optax.add_decayed_weights(-outside))
    if not (is_plain_zero(weight_decay) and is_plain_zero(outside)):
        transforms.append(optax.add_decayed_weights(weight_decay + outside))
    return optax.chain(*transforms)
