"""FedSAM, FedASAM, MoFedSAM and FedGAMMA: local steps that look for flat minima.

FedSAM and MoFedSAM: Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness
Aware Minimization. ICML 2022. FedASAM (and FedSAM again): Caldarola, Caputo, Ciccone: Improving
Generalization in Federated Learning by Seeking Flat Minima. ECCV 2022, on Kwon, Kim, Park, Choi:
ASAM. ICML 2021. FedGAMMA: Dai, Yang, Sun, Shen, Tian, Wang, Zhang: FedGAMMA: Federated Learning
with Global Sharpness-Aware Minimization. IEEE TNNLS 2023.

=========================  ==========================================
paper                      here
=========================  ==========================================
w_t, w^i_{t,k}             ``params`` of the server, local params
ρ                          ``perturbation_radius``
T_w, η (ASAM)              the scale per entry, ``stability``
β (MoFedSAM)               ``mixing``
Δ_t (MoFedSAM)             ``direction`` of the server, a descent direction
c, c_i (FedGAMMA)          ``control`` of the server, the client's row
=========================  ==========================================

FedSAM, FedASAM: down d, up d. MoFedSAM: down 2d (x_t, Δ_t), up d, as FedCM. FedGAMMA: down 2d
(x, c), up 2d, client state d, as SCAFFOLD. A ``step_transform`` changes both as it does these.

Two gradients a local step on one mini-batch: g at the local params y, then g at y + e, with
which the step is taken from y. The norm in e is one over all parameters; e is 0 where the gradient
vanishes. The gradient transform acts on the second gradient, with any decay at y; the ascent takes
the raw one, without FedGAMMA's controls. A radius that is a plain 0 leaves one gradient.

Departures: FedASAM's code weights clients by their number of examples: use the batch's weights.
It knows its adaptive parameters by the name "weight", in layers and norms; here they are all
whose own name does not contain "bias", in whatever module. Published code of FedSAM, MoFedSAM and
FedGAMMA clips and decays the whole direction, after mixing and correction (``as_published``).
"""

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.client_momentum import mix_direction
from fedjax_lab.algorithms.control_variates import correct_drift
from fedjax_lab.algorithms.factory import Common, LocalGradient, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round, is_plain_zero
from fedjax_lab.algorithms.server import ServerSGD, broadcast_params, start_with_params
from fedjax_lab.checks import check_choice, check_number, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {"rho": "perturbation_radius", "eta": "stability", "beta": "mixing"}


def perturbed_gradient(
    training: LocalTraining,
    perturbation_radius: ScalarOrSchedule,
    ascent: Callable[[Params, PyTree], PyTree] = lambda y, g: tree.unit(g),
) -> LocalGradient:
    """Build the gradient at y + e, e = radius * ascent(y, g(y)).

    The report is that of the gradient at y: losses are those of the local params.

    Args:
      training: has the plain gradient; its transform acts on the second one.
      perturbation_radius: length of the ascent, or a schedule of the round.
      ascent: (local params, gradient there) -> the direction of e; by default the unit vector.

    Raises:
      ValueError: the radius is negative or not finite.
    """
    check_scalar_or_schedule("perturbation_radius", perturbation_radius)
    if is_plain_zero(perturbation_radius):
        return training.local_gradient
    gradient = training.gradient

    def perturbed(y, step, round):
        g, report = gradient.raw(y, step)
        radius = at_round(perturbation_radius, round)
        above, _ = gradient.raw(tree.add_scaled(y, radius, ascent(y, g)), step)
        return gradient.transformed(above, y, report)

    return LocalGradient(perturbed, 2)


@factory
def fedsam(
    loss_fn: LossFn,
    *,
    perturbation_radius: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    **common: Unpack[Common],
) -> Algorithm:
    """FedSAM: FedAvg whose clients descend the gradient at y + ρ g / ||g||.

    Args:
      perturbation_radius: ρ, the length of the ascent step, or a schedule of the round.
      gradient_transform: optax transformation of each descended gradient.
    """
    training = LocalTraining(loss_fn, **common)
    return _fedsam("fedsam", training, perturbed_gradient(training, perturbation_radius), server_lr)


@factory
def fedasam(
    loss_fn: LossFn,
    *,
    perturbation_radius: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    stability: Scalar = 0.2,
    adaptive: str = "weights",
    **common: Unpack[Common],
) -> Algorithm:
    """FedASAM: FedSAM with an ascent that scales with the parameters, e = ρ T² g / ||T g||.

    Args:
      perturbation_radius: ρ = ||T⁻¹ e||, or a schedule of the round.
      stability: what T = |y| + stability adds, at least 0.
      adaptive: where that is T: "weights": in every array but those whose own name contains
        "bias", where T = 1; "all": everywhere.
      gradient_transform: optax transformation of each descended gradient.
    """
    check_number("stability", stability, minimum=0.0)
    check_choice("adaptive", adaptive, ("weights", "all"))

    def scaling(path, y):  # T
        name = jax.tree_util.keystr(tree.named_keys(path)[-1:])
        if adaptive == "weights" and "bias" in name:
            return jnp.ones_like(y)
        return jnp.abs(y) + jnp.asarray(stability, y.dtype)

    def ascent(y, g):
        t = jax.tree_util.tree_map_with_path(scaling, y)
        scaled = tree.unit(jax.tree.map(jnp.multiply, t, g))
        return jax.tree.map(jnp.multiply, t, scaled)

    training = LocalTraining(loss_fn, **common)
    local_gradient = perturbed_gradient(training, perturbation_radius, ascent)
    return _fedsam("fedasam", training, local_gradient, server_lr)


def _fedsam(name, training, local_gradient, server_lr):
    def client_update(x, row, batch):
        def direction(y, step):
            return local_gradient.at(y, step, batch.round)

        local = training.steps(x, batch, direction)
        return {"delta": tree.subtract(x, local.params)}, row, local.report

    phase = Phase(
        broadcast_params,
        client_update,
        ServerSGD(server_lr),
        reduce={"delta": "mean"},
        costs=Costs(gradients=local_gradient.gradients),
    )
    return Algorithm(name, start_with_params, (phase,))


@factory
def mofedsam(
    loss_fn: LossFn,
    *,
    perturbation_radius: ScalarOrSchedule,
    mixing: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    mean_from: str = "gradients",
    **common: Unpack[Common],
) -> Algorithm:
    """MoFedSAM: FedCM with FedSAM's gradient.

    Args:
      perturbation_radius: ρ, the length of the ascent step, or a schedule of the round.
      mixing: weight of the fresh gradient, in [0, 1], or a schedule of the round; the rest is
        that of last round's mean step.
      gradient_transform: optax transformation of each descended gradient, which ``mixing`` scales
        afterwards: a weight decay of 1e-3 acts as mixing * 1e-3. The published code adds it after
        the mixing: use ``step_transform``.
    """
    training = LocalTraining(loss_fn, **common)
    local_gradient = perturbed_gradient(training, perturbation_radius)
    return mix_direction("mofedsam", training, local_gradient, server_lr, mixing, mean_from)


@factory
def fedgamma(
    loss_fn: LossFn,
    *,
    perturbation_radius: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    mean_from: str = "gradients",
    **common: Unpack[Common],
) -> Algorithm:
    """FedGAMMA: SCAFFOLD (option II) with FedSAM's gradient.

    Args:
      perturbation_radius: ρ, the length of the ascent step, or a schedule of the round.
      gradient_transform: optax transformation of each descended gradient.
    """
    training = LocalTraining(loss_fn, **common)
    local_gradient = perturbed_gradient(training, perturbation_radius)
    return correct_drift("fedgamma", training, local_gradient, server_lr, mean_from)
