"""FedLESAM and FedSMOO: perturbations that follow the global model instead of the client's data.

FedLESAM: Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang: Locally Estimated Global Perturbations are
Better than Local Perturbations for Federated Sharpness-aware Minimization. ICML 2024. FedSMOO:
Sun, Shen, Chen, Ding, Tao: Dynamic Regularized Sharpness Aware Minimization in Federated
Learning: Approaching Global Consistency and Smooth Landscape. ICML 2023.

=========================  ==========================================
paper                      here
=========================  ==========================================
w^t, w^i_{t,k}             ``params`` x_t of the server, local params
ρ                          ``perturbation_radius``
w_i^old (FedLESAM)         ``LastVisit.model``, or ``previous`` of the server
c, c_i (FedLESAM-S)        ``correction`` of the server and of the client's row
-λ_i / p (dual variable)   h_i, ``correction`` (FedLESAM-D) or ``dual`` (FedSMOO) of the row
its mean over all N        ``correction`` or ``mean_dual`` of the server
μ_i, s (FedSMOO)           ``multiplier`` of the row, ``perturbation`` of the server
1/β, the weight p          ``prox_weight``
=========================  ==========================================

FedLESAM: down d, up d, client state d (the model of its last visit); with the last round's step
down 2d, no client state. -S: d more down, up and of client state. -D: d more client state. One
gradient a local step, at y + e; its loss is that of the perturbed params. With a ``step_transform``
the c_i of -S are means of the directions before the transform, as SCAFFOLD's. FedSMOO: down 2d
(x, s), up 2d (x^i_K, s̃_i), client state 2d; two gradients a local step on one mini-batch.

The change of h_i is -delta, so that neither method sends it; it is a field of its own all the same,
as the server's mean over N is unweighted, and a compressor compresses it alone. The server's
mean of the h_i is updated before it is added: x_{t+1} = mean_i x^i_K + mean_j h_j. The gradient
transform acts on the descended gradient, with any decay at the unperturbed params.

Departures: FedLESAM's published code adds scalars of a flattened model to whole arrays, and scales
the correction of -S by 0.1 (``correction_weight``). Norms are over all parameters; the direction
of a vector shorter than 1e-12 is 0, and so is a client's on its first visit.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round, check_unused, is_plain_zero
from fedjax_lab.checks import check_choice, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {"rho": "perturbation_radius", "1/beta": "prox_weight"}


class FedLESAMServer(NamedTuple):
    """Server state of FedLESAM; what a variant does not need is ()."""

    params: Params  # x_t
    previous: PyTree  # x_{t-1}
    correction: PyTree  # c (S), the mean of all h_j (D)


class LastVisit(NamedTuple):
    """A client's values from the last round in which it participated."""

    model: Params  # the x_t that it received
    happened: jax.Array  # bool, whether there was such a round


class FedLESAMRow(NamedTuple):
    """A client's row in FedLESAM; what a variant does not need is ()."""

    visit: LastVisit | tuple[()]
    correction: PyTree  # c_i (S), h_i (D)


class FedSMOOServer(NamedTuple):
    """Server state of FedSMOO."""

    params: Params  # x_t
    perturbation: Params  # s
    mean_dual: Params  # the mean of all h_j


class FedSMOORow(NamedTuple):
    """A client's row in FedSMOO."""

    dual: Params  # h_i
    multiplier: Params  # μ_i


@factory
def fedlesam(
    loss_fn: LossFn,
    *,
    perturbation_radius: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    variant: str = "base",
    reference: str = "own_last_visit",
    prox_weight: ScalarOrSchedule = 0.1,
    correction_weight: ScalarOrSchedule = 1.0,
    **common: Unpack[Common],
) -> Algorithm:
    """FedLESAM: local steps descend the gradient at y + e, where e points from x_t to an older x.

    Args:
      perturbation_radius: ρ = ||e||, or a schedule of the round.
      server_lr: server learning rate, or a schedule of the round; in "D" the share of the way
        from x_t to the paper's x_{t+1}.
      variant: "base"; "S": with SCAFFOLD's controls (option II); "D": with FedDyn's duals.
      reference: the older x: "own_last_visit": what the client received when it last took
        part (the paper); "last_round": x_{t-1} for everybody (the published code).
      prox_weight: weight p of h_i + y - x_t in "D", or a schedule of the round.
      correction_weight: weight of c - c_i in the steps of "S", or a schedule of the round.
    """
    check_scalar_or_schedule("perturbation_radius", perturbation_radius)
    check_scalar_or_schedule("prox_weight", prox_weight)
    check_scalar_or_schedule("correction_weight", correction_weight)
    check_choice("variant", variant, ("base", "S", "D"))
    if variant != "D":
        check_unused("prox_weight", prox_weight, 0.1, f"variant {variant!r}")
    if variant != "S":
        check_unused("correction_weight", correction_weight, 1.0, f"variant {variant!r}")
    check_choice("reference", reference, ("own_last_visit", "last_round"))
    remembers, corrects = reference == "own_last_visit", variant != "base"
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        rows = zero_row_per_client(params, num_clients)
        visit = LastVisit(rows, jnp.zeros(num_clients, bool)) if remembers else ()
        zeros = tree.zeros_like(params) if corrects else ()
        server = FedLESAMServer(params, () if remembers else params, zeros)
        return server, FedLESAMRow(visit, rows if corrects else ())

    def broadcast(server, round):
        uphill = () if remembers else tree.unit(tree.subtract(server.previous, server.params))
        return server.params, uphill, server.correction if variant == "S" else ()

    def client_update(received, row, batch):
        x, uphill, c = received
        visit, c_i = row
        if remembers:
            uphill = tree.unit(tree.subtract(visit.model, x))
            uphill = tree.where(visit.happened, uphill, tree.zeros_like(x))
            visit = LastVisit(x, jnp.ones((), bool))
        e = tree.scale(uphill, at_round(perturbation_radius, batch.round))
        weight = at_round(prox_weight, batch.round)
        share = at_round(correction_weight, batch.round)

        def direction(y, step):
            g, report = training.gradient.raw(tree.add(y, e), step)
            g, report = training.gradient.transformed(g, y, report)
            if variant == "S":
                g = tree.add_scaled(g, share, tree.subtract(c, c_i))
            elif variant == "D":
                g = _corrected(g, weight, c_i, y, x)
            return g, report

        local = training.steps(x, batch, direction, sum_directions=variant == "S")
        delta = tree.subtract(x, local.params)
        message = {"delta": delta}
        if variant == "S":
            mean_step = tree.safe_divide(1.0, local.lr_sum)
            mean = tree.scale(local.untransformed(delta), mean_step)
            message["correction_change"] = tree.subtract(mean, c)
        elif variant == "D":
            message["correction_change"] = tree.scale(delta, -1.0)
        if corrects:
            c_i = tree.add(c_i, message["correction_change"])
        return message, FedLESAMRow(visit, c_i), local.report

    def server_update(server, messages, cohort):
        delta, correction = messages["delta"], server.correction
        metrics = {"delta_norm": tree.norm(delta)}
        if corrects:
            correction = tree.add_scaled(
                correction, cohort.client_share, messages["correction_change"]
            )
        if variant == "D":
            delta = tree.subtract(delta, correction)
        params = tree.descend(server.params, at_round(server_lr, cohort.round), delta)
        return FedLESAMServer(params, () if remembers else server.params, correction), metrics

    reduce = {"delta": "mean", "correction_change": "sum"} if corrects else {"delta": "mean"}
    costs = Costs(derived=("correction_change",) if variant == "D" else ())
    phase = Phase(broadcast, client_update, server_update, reduce, costs=costs)
    return Algorithm("fedlesam", start, (phase,))


@factory
def fedsmoo(
    loss_fn: LossFn,
    *,
    perturbation_radius: ScalarOrSchedule,
    prox_weight: ScalarOrSchedule,
    s_source: str = "mu_minus_e",
    **common: Unpack[Common],
) -> Algorithm:
    """FedSMOO: FedDyn whose clients perturb towards an agreed perturbation s.

    A step takes e = ρ u / ||u||, u = g(y) - μ_i - s, then μ_i <- μ_i + e - s, and descends
    g(y + e) + p (h_i + y - x_t). The server's s is the mean of the s̃_i, scaled to norm ρ.

    Args:
      perturbation_radius: ρ, or a schedule of the round.
      prox_weight: weight p of h_i + y - x_t, or a schedule of the round. At 0 the h_i are
        added up and used by the server nevertheless.
      s_source: s̃_i: "mu_minus_e": μ_i minus the last step's e (the paper); "mu": μ_i (the
        published code).
      gradient_transform: optax transformation of each descended gradient.
    """
    check_scalar_or_schedule("perturbation_radius", perturbation_radius)
    check_scalar_or_schedule("prox_weight", prox_weight)
    check_choice("s_source", s_source, ("mu", "mu_minus_e"))
    perturbs = not is_plain_zero(perturbation_radius)
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        zeros, rows = tree.zeros_like(params), zero_row_per_client(params, num_clients)
        return FedSMOOServer(params, zeros, zeros), FedSMOORow(rows, rows)

    def broadcast(server, round):
        return server.params, server.perturbation

    def client_update(received, row, batch):
        x, s = received
        rho = at_round(perturbation_radius, batch.round)
        weight = at_round(prox_weight, batch.round)

        def direction(y, step):
            mu, e = step.memory
            g, report = training.gradient.raw(y, step)
            if perturbs:
                u = jax.tree.map(lambda g, mu, s: g - mu - s, g, mu, s)
                e = tree.scale(tree.unit(u), rho)
                mu = jax.tree.map(lambda mu, e, s: mu + e - s, mu, e, s)
                g, _ = training.gradient.raw(tree.add(y, e), step)
            g, report = training.gradient.transformed(g, y, report)
            return _corrected(g, weight, row.dual, y, x), report._replace(memory=(mu, e))

        lr = training.rate(batch.round)
        memory = (row.multiplier, tree.zeros_like(x))
        local = training.steps(x, batch, direction, lr=lr, memory=memory)
        mu, e = local.memory
        delta = tree.subtract(x, local.params)
        message = {
            "delta": delta,
            "dual_change": tree.scale(delta, -1.0),
            "perturbation": mu if s_source == "mu" else tree.subtract(mu, e),
        }
        return message, FedSMOORow(tree.subtract(row.dual, delta), mu), local.report

    def server_update(server, messages, cohort):
        mean_dual = tree.add_scaled(server.mean_dual, cohort.client_share, messages["dual_change"])
        params = tree.add(tree.subtract(server.params, messages["delta"]), mean_dual)
        rho = at_round(perturbation_radius, cohort.round)
        s = tree.scale(tree.unit(messages["perturbation"]), rho)
        metrics = {"delta_norm": tree.norm(messages["delta"])}
        return FedSMOOServer(params, s, mean_dual), metrics

    reduce = {"delta": "mean", "dual_change": "sum", "perturbation": "mean"}
    phase = Phase(
        broadcast,
        client_update,
        server_update,
        reduce,
        costs=Costs(derived=("dual_change",), gradients=2 if perturbs else 1),
    )
    return Algorithm("fedsmoo", start, (phase,))


def _corrected(g: PyTree, weight: Scalar, h: PyTree, y: Params, x: Params) -> PyTree:
    """Compute g + p (h_i + y - x_t), FedDyn's correction by its dual variable divided by -p."""
    return tree.add_scaled(g, weight, tree.add(h, tree.subtract(y, x)))
