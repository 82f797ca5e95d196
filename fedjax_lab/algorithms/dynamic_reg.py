"""FedDyn, FedADMM, FedPD: a proximal term and one dual variable for each client.

FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on
Dynamic Regularization. ICLR 2021, Algorithm 1. FedADMM has two origins: "W": Wang, Marella,
Anderson: FedADMM: A Federated Primal-Dual Algorithm Allowing Partial Participation. CDC 2022; "G":
Gong, Li, Freris: FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System
Heterogeneity. ICDE 2022. FedPD: Zhang, Hong, Dhople, Yin, Liu: FedPD: A Federated Learning
Framework with Adaptivity to Non-IID Data. IEEE Transactions on Signal Processing 2021, Algorithm 1.

==========================  =========================================
paper                       here
==========================  =========================================
α (FedDyn), ρ (G), 1/η      ``prox_weight``
∇L_k(θ_k) (FedDyn)          λ_i, the client's row, an estimate of its gradient
h (FedDyn)                  ``mean_dual`` = (1/N) sum_i λ_i
y_i (FedADMM), λ_i (FedPD)  ``dual`` of the client's row: minus FedDyn's λ_i
w_i, x_i                    ``params`` of the client's row, its last local model
x_{0,i} (FedPD)             ``anchor`` of the client's row
η (G)                       ``server_lr``
1 - p (FedPD)               1 - ``skip_probability``, how often clients and server communicate
==========================  =========================================

FedDyn, FedADMM: down d, up d. Client state: FedDyn d, FedADMM 2d (d with ``prev="global"``),
FedPD 3d. FedPD, in rounds that communicate: up d; down 2d and the coin: x_t, from which the message
is a difference, and x_{t+1}. Where all clients always take part they know x_t already, which makes
down d, the paper's count. In other rounds nothing travels and nothing is counted.

Departures: where the papers average over the cohort the batch's weights apply; sums over clients
/ N (FedDyn's h, FedADMM-W) have none. What FedDyn serves and evaluates is x_{t+1}, not the mean of
local models. FedDyn's message holds delta once more, as the change of λ_i: it costs nothing to
send (the server knows both), but a compressor compresses it alone. Where a traced ``prox_weight``
is 0, there is neither proximal term nor correction.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.algorithms.server import ParamsServer, ServerSGD, broadcast_params, keep_server
from fedjax_lab.checks import check_choice, check_number, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import one_row_per_client, zero_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {
    "alpha": "prox_weight",
    "rho": "prox_weight",
    "1/eta": "prox_weight",
    "eta": "server_lr",
    "p": "skip_probability",
}

# Folded into a round's key for FedPD's coin; phases fold in 0 and 1.
_COIN = np.uint32(2**32 - 1)


class FedDynServer(NamedTuple):
    """Server state of FedDyn."""

    params: Params  # x_t
    mean_dual: Params  # h_t


class FedADMMRow(NamedTuple):
    """A client's row in FedADMM."""

    params: PyTree  # x_i, the last local model; () with prev="global"
    dual: Params  # y_i


class FedPDServer(NamedTuple):
    """Server state of FedPD."""

    params: Params  # x_t, the mean of anchors that was communicated last
    communicates: jax.Array  # bool, this round's coin


class FedPDRow(NamedTuple):
    """A client's row in FedPD."""

    params: Params  # x_i
    dual: Params  # y_i
    anchor: Params  # x0_i


@factory
def feddyn(
    loss_fn: LossFn, *, prox_weight: ScalarOrSchedule = 0.1, **common: Unpack[Common]
) -> Algorithm:
    """FedDyn: local steps descend g - λ_i + α (y - x_t);  x_{t+1} = mean x^i_K - h_{t+1} / α.

    Args:
      prox_weight: α, above 0, or a schedule of the round.
    """
    check_scalar_or_schedule("prox_weight", prox_weight, exclusive_minimum=True)
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        server = FedDynServer(params, tree.zeros_like(params))
        return server, zero_row_per_client(params, num_clients)

    def client_update(x, dual, batch):
        alpha = at_round(prox_weight, batch.round)

        def direction(y, step):
            g, report = training.gradient(y, step)
            return tree.add_scaled(tree.subtract(g, dual), alpha, tree.subtract(y, x)), report

        local = training.steps(x, batch, direction)
        delta = tree.subtract(x, local.params)
        dual_change = tree.scale(delta, alpha)
        message = {"delta": delta, "dual_change": dual_change}
        return message, tree.add(dual, dual_change), local.report

    def server_update(server, messages, cohort):
        delta, alpha = messages["delta"], at_round(prox_weight, cohort.round)
        h = tree.add_scaled(server.mean_dual, cohort.client_share, messages["dual_change"])
        step = tree.add_scaled(delta, tree.safe_divide(1.0, alpha), h)
        params = tree.subtract(server.params, step)
        return FedDynServer(params, h), {"delta_norm": tree.norm(delta)}

    phase = Phase(
        broadcast_params,
        client_update,
        server_update,
        reduce={"delta": "mean", "dual_change": "sum"},
        costs=Costs(derived=("dual_change",)),
    )
    return Algorithm("feddyn", start, (phase,))


@factory
def fedadmm(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    prox_weight: ScalarOrSchedule = 0.1,
    variant: str = "W",
    prev: str = "local",
    **common: Unpack[Common],
) -> Algorithm:
    """FedADMM: local steps descend g + y_i + ρ (y - x_t); the server adds changes of x_i + y_i / ρ.

    Args:
      server_lr: factor on the server's step, or a schedule of the round. In W it is 1, so that
        x_t is the mean over all clients of x_i + y_i / ρ; in G it is a hyper-parameter.
      prox_weight: ρ, above 0, or a schedule of the round.
      variant: "W": the server adds the sum of the changes / N; "G": their mean over the cohort.
      prev: of variant G, what a client's new model is compared with: "local": its last one
        (the paper); "global": x_t (the published code).

    Raises:
      ValueError: a hyper-parameter is out of range, an option is unknown, or ``prev`` is
        "global" in variant W.
    """
    check_scalar_or_schedule("prox_weight", prox_weight, exclusive_minimum=True)
    check_choice("variant", variant, ("G", "W"))
    check_choice("prev", prev, ("global", "local"))
    if variant == "W" and prev == "global":
        raise ValueError("prev is 'global'; with variant 'W' it must be 'local'.")
    training = LocalTraining(loss_fn, **common)
    server_sgd = ServerSGD(server_lr)

    def start(params, num_clients, batch):
        row = FedADMMRow(params if prev == "local" else (), tree.zeros_like(params))
        return ParamsServer(params), one_row_per_client(row, num_clients)

    def client_update(x, row, batch):
        rho = at_round(prox_weight, batch.round)

        def direction(y, step):
            g, report = training.gradient(y, step)
            return tree.add_scaled(tree.add(g, row.dual), rho, tree.subtract(y, x)), report

        local = training.steps(x, batch, direction)
        primal = tree.subtract(local.params, x)  # (y_i⁺ - y_i) / ρ
        dual = tree.add_scaled(row.dual, rho, primal)
        before, last = (row.params, local.params) if prev == "local" else (x, ())
        change = tree.add(tree.subtract(local.params, before), primal)
        return {"delta": tree.scale(change, -1.0)}, FedADMMRow(last, dual), local.report

    def server_update(server, messages, cohort):
        delta = messages["delta"]
        if variant == "W":
            delta = tree.scale(delta, cohort.client_share)
        return server_sgd(server, {"delta": delta}, cohort)

    reduce = {"delta": "sum" if variant == "W" else "mean"}
    phase = Phase(broadcast_params, client_update, server_update, reduce)
    return Algorithm("fedadmm", start, (phase,))


@factory
def fedpd(
    loss_fn: LossFn,
    *,
    prox_weight: ScalarOrSchedule = 1.0,
    skip_probability: Scalar = 0.0,
    **common: Unpack[Common],
) -> Algorithm:
    """FedPD: each client's anchor is its own x_i + y_i / ρ, and at times the mean of all.

    Local steps start from x_i and descend g + y_i + ρ (y - x0_i). The paper has all clients take
    part in each round. With a smaller cohort the mean is over those who took part and goes to
    them alone; other rows stay. The server model is the mean that was communicated last.

    The coin is drawn from the batch's key, the same for all clients. A compressor's residuals go
    on in skipped rounds as if the messages had been sent.

    Args:
      prox_weight: ρ, above 0, or a schedule of the round.
      skip_probability: how likely a round is not to communicate, in [0, 1].
    """
    check_scalar_or_schedule("prox_weight", prox_weight, exclusive_minimum=True)
    check_number("skip_probability", skip_probability, minimum=0.0, maximum=1.0)
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        row = FedPDRow(params, tree.zeros_like(params), params)
        return FedPDServer(params, jnp.zeros((), bool)), one_row_per_client(row, num_clients)

    def client_update(x, row, batch):
        rho = at_round(prox_weight, batch.round)

        def direction(y, step):
            g, report = training.gradient(y, step)
            return tree.add_scaled(tree.add(g, row.dual), rho, tree.subtract(y, row.anchor)), report

        local = training.steps(row.params, batch, direction)
        dual = tree.add_scaled(row.dual, rho, tree.subtract(local.params, row.anchor))
        anchor = tree.add_scaled(local.params, tree.safe_divide(1.0, rho), dual)
        message = {"delta": tree.subtract(x, anchor)}
        return message, FedPDRow(local.params, dual, anchor), local.report

    def average(server, messages, cohort):
        mean = tree.subtract(server.params, messages["delta"])
        key = jax.random.fold_in(cohort.key, _COIN)
        coin = jax.random.uniform(key, dtype=jnp.float32) >= skip_probability
        params = tree.where(coin, mean, server.params)
        communicated = coin.astype(cohort.weights.dtype)
        metrics = {"delta_norm": tree.norm(messages["delta"]), "communicated": communicated}
        return FedPDServer(params, coin), metrics

    def broadcast_mean(server, round):
        return server.params, server.communicates

    def adopt(received, row, batch):
        mean, coin = received
        return {}, row._replace(anchor=tree.where(coin, mean, row.anchor)), {}

    phases = (
        Phase(broadcast_params, client_update, average, reduce={"delta": "mean"}),
        Phase(broadcast_mean, adopt, keep_server, reduce={}),
    )
    return Algorithm("fedpd", start, phases)
