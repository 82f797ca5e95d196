"""SCAFFOLD: control variates correct the drift of local steps.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning. ICML 2020, Algorithm 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
x, c                       ``params``, ``control`` of the server
y_i, c_i                   local params, the client's row
Δy_i (points uphill: +)    minus ``delta``: our delta = x - y_i is subtracted
Δc_i                       ``control_change`` = c_i⁺ - c_i
η_l, η_g                   ``client_lr``, ``server_lr``
options I, II (line 12)    ``control_update``
=========================  ==========================================

Down 2d (x, c), up 2d (Δy_i, Δc_i), client state d. Departures: with a learning rate of 0,
option II keeps c_i - c (0/0 is 0). The mean of the deltas takes the batch's weights; the sum
of the Δc_i over N does not, so that c stays the mean of all c_i.
"""

from typing import NamedTuple, Unpack

import jax

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.checks import check_choice
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, ScalarOrSchedule


class ScaffoldServer(NamedTuple):
    """Server state of SCAFFOLD."""

    params: Params  # x
    control: Params  # c


@factory
def scaffold(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    control_update: str = "II",
    **common: Unpack[Common],
) -> Algorithm:
    """SCAFFOLD.

    Args:
      control_update: "I": the client's gradient at the server model, over
        ``full_examples`` if the batch has them (with ``example_noise`` it must), else over the
        round's examples; "II": the mean of the gradients that the local steps saw.
    """
    check_choice("control_update", control_update, ("I", "II"))
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        server = ScaffoldServer(params, tree.zeros_like(params))
        return server, zero_row_per_client(params, num_clients)

    def broadcast(server, round):
        return server.params, server.control

    def client_update(received, c_i, batch):
        x, c = received

        def direction(y, step):  # line 10: g_i(y) - c_i + c
            g, report = training.gradient(y, step)
            return jax.tree.map(lambda g, c_i, c: g - c_i + c, g, c_i, c), report

        local = training.steps(x, batch, direction)
        delta = tree.subtract(x, local.params)
        if control_update == "I":  # line 12
            new_c_i = training.gradient.full(x, batch)
        else:
            mean_step = tree.safe_divide(1.0, local.lr_sum)
            new_c_i = tree.add_scaled(tree.subtract(c_i, c), mean_step, delta)
        message = {"delta": delta, "control_change": tree.subtract(new_c_i, c_i)}
        return message, new_c_i, local.report

    def server_update(server, messages, cohort):  # lines 16, 17
        delta = messages["delta"]
        params = tree.descend(server.params, at_round(server_lr, cohort.round), delta)
        share = 1 / cohort.num_clients.astype(cohort.weights.dtype)
        control = tree.add_scaled(server.control, share, messages["control_change"])
        return ScaffoldServer(params, control), {"delta_norm": tree.norm(delta)}

    phase = Phase(
        broadcast,
        client_update,
        server_update,
        reduce={"delta": "mean", "control_change": "sum"},
    )
    return Algorithm("scaffold", start, (phase,))
