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

Down 2d (x, c), up 2d (Δy_i, Δc_i), client state d.

Option II reads the mean gradient of the steps off the way that they went, (x - y_i) / (K η_l).
That holds for SGD. With a ``step_transform`` the directions are added up before the transform, so
that c_i stays a mean of gradients.

Departures: with a learning rate of 0, option II keeps c_i - c (0/0 is 0). The mean of the deltas
takes the batch's weights; the sum of the Δc_i over N does not, so that c stays the mean of all c_i.
"""

from typing import NamedTuple, Unpack

import jax

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalGradient, LocalTraining, factory
from fedjax_lab.algorithms.hyper import MEAN_FROM, check_unused
from fedjax_lab.algorithms.server import ServerSGD
from fedjax_lab.checks import check_choice
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, ScalarOrSchedule


class ControlServer(NamedTuple):
    """Server state of SCAFFOLD, FedGAMMA, FedMo and FedMoSWA."""

    params: Params  # x
    control: Params  # c, or m of FedMoSWA


class Controls(NamedTuple):
    """A client's control variates in one round."""

    server: Params  # c
    own: Params  # c_i

    def corrected(self, gradient: PyTree) -> PyTree:
        """Compute g - c_i + c, the direction of a local step (line 10).

        Args:
          gradient: g at the local params.
        """
        return jax.tree.map(
            lambda g, own, server: g - own + server, gradient, self.own, self.server
        )

    def mean_gradient(self, directions: PyTree, lr_sum: jax.Array) -> PyTree:
        """Compute c_i - c + directions / lr_sum, the mean gradient of the local steps (option II).

        Args:
          directions: sum of the corrected directions times their learning rates: x - y_i for SGD.
          lr_sum: float scalar, the sum of these learning rates; 0 keeps c_i - c.
        """
        mean_step = tree.safe_divide(1.0, lr_sum)
        return tree.add_scaled(tree.subtract(self.own, self.server), mean_step, directions)


@factory
def scaffold(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    control_update: str = "II",
    mean_from: str = "gradients",
    **common: Unpack[Common],
) -> Algorithm:
    """SCAFFOLD.

    Args:
      control_update: "I": the client's gradient at the server model, over
        ``full_examples`` if the batch has them (with ``example_noise`` it must), else over the
        round's examples; "II": the mean of the gradients that the local steps saw.
    """
    check_choice("control_update", control_update, ("I", "II"))
    if control_update == "I":
        check_unused("mean_from", mean_from, "gradients", "control_update 'I'")
    training = LocalTraining(loss_fn, **common)
    return correct_drift(
        "scaffold", training, training.local_gradient, server_lr, mean_from, control_update
    )


def correct_drift(
    name: str,
    training: LocalTraining,
    local_gradient: LocalGradient,
    server_lr: ScalarOrSchedule,
    mean_from: str,
    control_update: str = "II",
) -> Algorithm:
    """Build SCAFFOLD with a given local gradient.

    Args:
      name: the method's name.
      training: takes the local steps.
      local_gradient: what the controls correct.
      server_lr: server learning rate, or a schedule of the round.
      mean_from: what option II averages, as in ``scaffold``.
      control_update: how a client renews its control, "I" or "II", as in ``scaffold``.

    Raises:
      ValueError: ``mean_from`` is unknown.
    """
    check_choice("mean_from", mean_from, MEAN_FROM)
    server_sgd = ServerSGD(server_lr)

    def start(params, num_clients, batch):
        server = ControlServer(params, tree.zeros_like(params))
        return server, zero_row_per_client(params, num_clients)

    def broadcast(server, round):
        return server.params, server.control

    def client_update(received, c_i, batch):
        x, c = received
        controls = Controls(c, c_i)

        def direction(y, step):
            g, report = local_gradient.at(y, step, batch.round)
            return controls.corrected(g), report

        sums = control_update == "II" and mean_from == "gradients"
        local = training.steps(x, batch, direction, sum_directions=sums)
        delta = tree.subtract(x, local.params)
        if control_update == "I":  # line 12
            new_c_i = training.gradient.full(x, batch)
        else:
            new_c_i = controls.mean_gradient(local.untransformed(delta), local.lr_sum)
        message = {"delta": delta, "control_change": tree.subtract(new_c_i, c_i)}
        return message, new_c_i, local.report

    def server_update(server, messages, cohort):  # lines 16, 17
        server, metrics = server_sgd(server, messages, cohort)
        control = tree.add_scaled(server.control, cohort.client_share, messages["control_change"])
        return server._replace(control=control), metrics

    reduce = {"delta": "mean", "control_change": "sum"}
    costs = Costs(gradients=local_gradient.gradients)
    phase = Phase(broadcast, client_update, server_update, reduce, costs=costs)
    return Algorithm(name, start, (phase,))
