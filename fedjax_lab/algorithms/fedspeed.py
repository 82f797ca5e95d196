"""FedSpeed and FedSpeed-Ing: a prox term, its dual correction, and a perturbed gradient.

FedSpeed: Sun, Shen, Huang, Ding, Tao: FedSpeed: Larger Local Interval, Less Communication Round,
and Higher Generalization Accuracy. ICLR 2023, Algorithm 1. FedSpeed-Ing: the inertial variant in
the first author's thesis of 2023, Algorithm 3.

=========================  ==========================================
paper                      here
=========================  ==========================================
x_t, x^i_{t,k}             ``params`` of the server, local params
ĝ_i                        c_i, ``dual`` of the client's row
g̃_i (-Ing)                 c̄_i, ``inertial`` of the client's row
x̃_t (-Ing)                 x̄_t, ``anchor`` of the server
1/λ                        ``prox_weight``
ρ_0, or ρ unnormalised     ``perturbation_radius``
α                          ``perturbation_weight``
ζ_t                        ``inertia``
=========================  ==========================================

Down d, up d; FedSpeed-Ing: down 2d (x_t, x̄_t). Client state d; -Ing 2d; 0 without correction.
Two gradients a local step on one mini-batch; one if the radius or the weight of the perturbation
is a plain 0. The gradient transform acts on g̃ = (1 - α) g_1 + α g_2, with any decay at the
unperturbed point; the perturbation follows the raw gradient, and is 0 where that vanishes.

With ``server_dual="all"`` (the published code) the server adds the mean of -λ c_j over all N
clients in place of the cohort's. It keeps a running mean of the duals: the change of c_i is
delta/λ, which the server knows from the delta, so that up stays d. With the whole population in
every cohort and equal weights the two agree.

Departures: the thesis' print of FedSpeed-Ing lost its accents; this is the reading that its text
describes, with y_0 = x_t, c_i in what is sent and one ζ_t for both sequences; ζ = 0 is FedSpeed.
The published code also clips the whole direction to norm 10, but for y/λ (``as_published``).
Where a traced ``prox_weight`` is 0 there is neither prox term nor correction.
"""

from typing import NamedTuple, Unpack

import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalGradient, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round, is_plain_zero
from fedjax_lab.checks import check_choice, check_number, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {
    "1/lambda": "prox_weight",
    "rho_0": "perturbation_radius",
    "alpha": "perturbation_weight",
    "zeta_t": "inertia",
}

_TINY = 1e-12  # a gradient of a smaller norm has no direction


class FedSpeedServer(NamedTuple):
    """Server state of FedSpeed and FedSpeed-Ing; what a variant does not need is ()."""

    params: Params  # x_t
    anchor: PyTree  # x̄_t
    mean_dual: PyTree  # (1/N) sum_j c_j


class Duals(NamedTuple):
    """A client's row in FedSpeed-Ing."""

    dual: PyTree  # c_i
    inertial: PyTree  # c̄_i


def _quasi_gradient(
    training: LocalTraining, radius: ScalarOrSchedule, weight: Scalar, normalize: bool
) -> LocalGradient:
    """Build g̃ = (1 - α) g_1 + α g_2 with the report of g_1."""
    check_scalar_or_schedule("perturbation_radius", radius)
    check_number("perturbation_weight", weight, minimum=0.0)
    if is_plain_zero(radius) or is_plain_zero(weight):
        return training.local_gradient
    gradient = training.gradient

    def mixed(y, step, round):
        g1, report = gradient.raw(y, step)
        r = at_round(radius, round)
        if normalize:
            norm = tree.norm(g1)
            r = tree.safe_divide(r, jnp.where(norm < _TINY, 0, norm))
        g2, _ = gradient.raw(tree.add_scaled(y, r, g1), step)
        g = tree.add_scaled(tree.scale(g1, 1 - weight), weight, g2)
        return gradient.transformed(g, y, report)

    return LocalGradient(mixed, 2)


@factory
def fedspeed(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    prox_weight: Scalar = 0.1,
    perturbation_radius: ScalarOrSchedule = 0.1,
    perturbation_weight: Scalar = 1.0,
    normalize_perturbation: bool = True,
    correction: bool = True,
    server_dual: str = "cohort",
    **common: Unpack[Common],
) -> Algorithm:
    """FedSpeed.

    Args:
      prox_weight: weight 1/λ of the prox term, above 0.
      perturbation_radius: length of the ascent step, or a schedule of the round.
      perturbation_weight: weight α of the perturbed gradient; 1 - α is that of the other.
      normalize_perturbation: ascend along g / ||g|| (the experiments), else along g itself.
      correction: use the duals c_i; without them the local steps are plain proximal ones and
        clients send their local models.
      server_dual: whose duals the server's mean takes: "cohort" (the paper) or "all".
      gradient_transform: optax transformation of each descended gradient.
    """
    training = LocalTraining(loss_fn, **common)
    quasi_gradient = _quasi_gradient(
        training, perturbation_radius, perturbation_weight, normalize_perturbation
    )
    return _fedspeed(
        "fedspeed", training, server_lr, quasi_gradient, prox_weight, correction, server_dual
    )


@factory
def fedspeed_ing(
    loss_fn: LossFn,
    *,
    inertia: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    prox_weight: Scalar = 0.1,
    perturbation_radius: ScalarOrSchedule = 0.1,
    perturbation_weight: Scalar = 1.0,
    normalize_perturbation: bool = True,
    correction: bool = True,
    server_dual: str = "cohort",
    **common: Unpack[Common],
) -> Algorithm:
    """FedSpeed-Ing: FedSpeed with extrapolated duals and an extrapolated prox centre.

    Args:
      inertia: ζ_t: how far both go on in the direction of their last change, or a schedule of the
        round.
      prox_weight: weight 1/λ of the prox term, above 0.
      perturbation_radius: length of the ascent step, or a schedule of the round.
      perturbation_weight: weight α of the perturbed gradient; 1 - α is that of the other.
      normalize_perturbation: ascend along g / ||g||, else along g itself.
      correction: use the duals; without them the local steps are plain proximal ones.
      server_dual: whose duals the server's mean takes: "cohort" or "all".
      gradient_transform: optax transformation of each descended gradient.
    """
    check_scalar_or_schedule("inertia", inertia)
    training = LocalTraining(loss_fn, **common)
    quasi_gradient = _quasi_gradient(
        training, perturbation_radius, perturbation_weight, normalize_perturbation
    )
    return _fedspeed(
        "fedspeed_ing",
        training,
        server_lr,
        quasi_gradient,
        prox_weight,
        correction,
        server_dual,
        inertia,
    )


def _fedspeed(
    name, training, server_lr, quasi_gradient, prox_weight, corrects, server_dual, inertia=None
):
    check_number("prox_weight", prox_weight, minimum=0.0, exclusive_minimum=True)
    check_choice("server_dual", server_dual, ("all", "cohort"))
    inertial = inertia is not None
    dual_of_all = corrects and server_dual == "all"

    def start(params, num_clients, batch):
        rows = zero_row_per_client(params, num_clients) if corrects else ()
        mean_dual = tree.zeros_like(params) if dual_of_all else ()
        server = FedSpeedServer(params, params if inertial else (), mean_dual)
        return server, Duals(rows, rows) if inertial else rows

    def broadcast(server, round):
        return (server.params, server.anchor) if inertial else server.params

    def client_update(received, row, batch):
        x, anchor = received if inertial else (received, received)
        c_i, pull = row if inertial else (row, row)

        def direction(y, step):
            g, report = quasi_gradient.at(y, step, batch.round)
            g = tree.add_scaled(g, prox_weight, tree.subtract(y, anchor))
            return (tree.subtract(g, pull) if corrects else g), report

        local = training.steps(x, batch, direction)
        delta = tree.subtract(x, local.params)
        if not corrects:
            return {"delta": delta}, row, local.report
        dual_change = tree.scale(delta, prox_weight)
        new_c_i = tree.add(c_i, dual_change)
        if dual_of_all:
            message = {"delta": delta, "dual_change": dual_change}
        else:  # x_t minus what the paper sends, x_K - λ c_i⁺
            message = {"delta": tree.add_scaled(delta, tree.safe_divide(1.0, prox_weight), new_c_i)}
        if inertial:
            zeta = at_round(inertia, batch.round)
            return message, Duals(new_c_i, _extrapolate(new_c_i, c_i, zeta)), local.report
        return message, new_c_i, local.report

    def server_update(server, messages, cohort):
        delta, mean_dual, anchor = messages["delta"], server.mean_dual, ()
        if dual_of_all:
            mean_dual = tree.add_scaled(mean_dual, cohort.client_share, messages["dual_change"])
            delta = tree.add_scaled(delta, tree.safe_divide(1.0, prox_weight), mean_dual)
        params = tree.descend(server.params, at_round(server_lr, cohort.round), delta)
        if inertial:
            anchor = _extrapolate(params, server.params, at_round(inertia, cohort.round))
        metrics = {"delta_norm": tree.norm(messages["delta"])}
        return FedSpeedServer(params, anchor, mean_dual), metrics

    reduce = {"delta": "mean", "dual_change": "sum"} if dual_of_all else {"delta": "mean"}
    derived = ("dual_change",) if dual_of_all else ()
    costs = Costs(derived, gradients=quasi_gradient.gradients)
    phase = Phase(broadcast, client_update, server_update, reduce, costs=costs)
    return Algorithm(name, start, (phase,))


def _extrapolate(new: PyTree, old: PyTree, zeta: Scalar) -> PyTree:
    """Compute new + zeta (new - old)."""
    return tree.add_scaled(new, zeta, tree.subtract(new, old))
