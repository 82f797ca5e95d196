"""FedExP: the server extrapolates, the further the more the clients' updates disagree.

Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation. ICLR 2023,
Algorithm 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
w^(t), M                   server params x_t; the clients that take part
Δ_i, Δ̄                     x_t - x^i_K (in the paper x^i_K - x_t), and their mean
η_g                        max(1, sum_i |Δ_i|² / (2 M (|Δ̄|² + ε))), the metric ``server_step``
ε                          ``epsilon``
=========================  ==========================================

Down d, up d; the server keeps x_{t-1} as well. What is served and evaluated is the average of the
last two iterates, as in the paper; rounds go on from the last one, ``state.server.params``.

Departures: the batch's weights, where there are any, are in both means. The server measures the
updates that it received one by one, so that its step fits what a compressor left of them; in the
paper a client may send |Δ_i|² beside Δ_i, but a wrapper that shortens both (``with_dp``) would make
the step longer by as much. So noise and masks on sums are refused, and all messages of a cohort are
in memory at once.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.server import broadcast_params
from fedjax_lab.checks import check_number
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar


class FedExPServer(NamedTuple):
    """Server state of FedExP."""

    params: Params  # x_t
    previous: PyTree  # x_{t-1}; () where the last iterate is served


@factory
def fedexp(
    loss_fn: LossFn,
    *,
    epsilon: Scalar = 1e-3,
    average_last_two: bool = True,
    **common: Unpack[Common],
) -> Algorithm:
    """FedExP: x_{t+1} = x_t - η_g Δ̄ with η_g = max(1, sum |Δ_i|² / (2 M (|Δ̄|² + ε))).

    Args:
      epsilon: ε, at least 0, small against |Δ̄|²; the larger, the nearer to FedAvg. The paper tunes
        it from 1e-3 to 1e-1.
      average_last_two: serve (x_t + x_{t-1}) / 2; False: x_t.

    Raises:
      TypeError: ``average_last_two`` is neither True nor False.
      ValueError: a hyper-parameter is outside what is allowed.
    """
    check_number("epsilon", epsilon, minimum=0.0)
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        return FedExPServer(params, params if average_last_two else ()), ()

    def server_update(server, messages, cohort):
        deltas, weights = messages["delta"], cohort.weights
        mean = tree.weighted_sum(deltas, weights)
        squares = jax.vmap(lambda delta: tree.norm(delta, squared=True))(deltas)
        mean_square = (weights * squares.astype(weights.dtype)).sum()
        below = 2 * (tree.norm(mean, squared=True) + epsilon)
        step = jnp.maximum(1, tree.safe_divide(mean_square, below.astype(weights.dtype)))
        params = tree.descend(server.params, step, mean)
        new = FedExPServer(params, server.params if average_last_two else ())
        return new, {"delta_norm": tree.norm(mean), "server_step": step}

    def served(state):
        server = state.server
        if not average_last_two:
            return server.params
        return jax.tree.map(lambda new, old: old + (new - old) / 2, *server)

    phase = Phase(
        broadcast_params, training.client_update, server_update, reduce={"delta": "stack"}
    )
    return Algorithm("fedexp", start, (phase,), served)
