"""FedCM, Mime, MimeLite and FedACG: clients move with a momentum that the server keeps.

FedCM: Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-level Momentum. 2021.
Mime and MimeLite: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the
Centralized Barrier for Cross-Device Federated Learning. NeurIPS 2021; here with momentum SGD.
FedACG: Kim, Kim, Han: Communication-Efficient Federated Learning with Accelerated Client
Gradient. CVPR 2024.

=========================  ==========================================
paper                      here
=========================  ==========================================
Δ_t (FedCM)                ``direction`` of the server, a descent direction
α (FedCM)                  ``mixing``
s_t, β (Mime)              ``momentum`` m_t of the server, argument ``momentum``
c_t (Mime)                 mean of the messages' ``gradient``
m_t, λ (FedACG)            ``velocity`` of the server (added to x), ``momentum``
θ_t + λ m_t (FedACG)       z_t, what the server broadcasts
β (FedACG)                 ``prox_weight``: b in g + b (y - z_t)
=========================  ==========================================

FedCM: down 2d (x_t, Δ_t), up d: ``direction`` follows from ``delta`` and K_i, but is a field of
its own, which a compressor compresses alone. With a ``step_transform`` it is the mean of the
directions before the transform, which the server cannot compute: up 2d. MimeLite: down 2d, up 2d.
Mime: down 3d, up 2d, in two exchanges, two gradients a local step on one mini-batch. FedACG: down
d, up d. No client state.

Departures: momentum is an average (weights β and 1 - β). The gradients of which c_t is the mean
are over the clients' ``full_examples``, or over the round's examples where the batch has none
(which ``example_noise`` refuses).
FedCM divides each change by the sum of the client's own learning rates (0/0 is 0). FedACG's code
leaves out the 1/2 of the penalty: its weight is half of ours.
"""

from typing import NamedTuple, Unpack

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalGradient, LocalTraining, factory
from fedjax_lab.algorithms.hyper import MEAN_FROM, at_round
from fedjax_lab.algorithms.server import MomentumServer, ServerSGD, broadcast_params
from fedjax_lab.checks import check_choice, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {"alpha": "mixing", "lambda": "momentum", "beta": ("prox_weight", "momentum")}


class FedCMServer(NamedTuple):
    """Server state of FedCM and MoFedSAM."""

    params: Params  # x_t
    direction: Params  # Δ_t


class FedACGServer(NamedTuple):
    """Server state of FedACG."""

    params: Params  # x_t
    velocity: Params  # m_t


@factory
def fedcm(
    loss_fn: LossFn,
    *,
    mixing: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    mean_from: str = "gradients",
    **common: Unpack[Common],
) -> Algorithm:
    """FedCM: local steps descend mixing * g + (1 - mixing) * Δ_t, Δ_t being last round's mean step.

    Args:
      mixing: weight of the fresh gradient, in [0, 1], or a schedule of the round; the first
        round has no direction yet, so that its steps are this much shorter.
      gradient_transform: optax transformation of each mini-batch gradient, which ``mixing``
        scales afterwards: a weight decay of 1e-3 acts as mixing * 1e-3. The published code adds
        it after the mixing: use ``step_transform``.
    """
    training = LocalTraining(loss_fn, **common)
    return mix_direction("fedcm", training, training.local_gradient, server_lr, mixing, mean_from)


def mix_direction(
    name: str,
    training: LocalTraining,
    local_gradient: LocalGradient,
    server_lr: ScalarOrSchedule,
    mixing: ScalarOrSchedule,
    mean_from: str,
) -> Algorithm:
    """Build FedCM with a given local gradient.

    Args:
      name: the method's name.
      training: takes the local steps.
      local_gradient: what is mixed with the broadcast direction.
      server_lr: server learning rate, or a schedule of the round.
      mixing: weight of the fresh gradient, in [0, 1], or a schedule of the round.
      mean_from: what the broadcast direction is a mean of, as in ``fedcm``.

    Raises:
      ValueError: ``mixing`` is out of range, or ``mean_from`` unknown.
    """
    check_choice("mean_from", mean_from, MEAN_FROM)
    sums = mean_from == "gradients" and training.step_transform is not None
    check_scalar_or_schedule("mixing", mixing, maximum=1.0)

    def start(params, num_clients, batch):
        return FedCMServer(params, tree.zeros_like(params)), ()

    def broadcast(server, round):
        return server.params, server.direction

    def client_update(received, row, batch):
        x, mean_direction = received
        alpha = at_round(mixing, batch.round)

        def direction(y, step):
            g, report = local_gradient.at(y, step, batch.round)
            return tree.add_scaled(tree.scale(g, alpha), 1 - alpha, mean_direction), report

        local = training.steps(x, batch, direction, sum_directions=sums)
        delta = tree.subtract(x, local.params)
        mean_step = tree.safe_divide(1.0, local.lr_sum)
        message = {"delta": delta, "direction": tree.scale(local.untransformed(delta), mean_step)}
        return message, row, local.report

    server_sgd = ServerSGD(server_lr)

    def server_update(server, messages, cohort):
        server, metrics = server_sgd(server, messages, cohort)
        return server._replace(direction=messages["direction"]), metrics

    phase = Phase(
        broadcast,
        client_update,
        server_update,
        reduce={"delta": "mean", "direction": "mean"},
        costs=Costs(derived=() if sums else ("direction",), gradients=local_gradient.gradients),
    )
    return Algorithm(name, start, (phase,))


@factory
def mime(
    loss_fn: LossFn,
    *,
    momentum: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    **common: Unpack[Common],
) -> Algorithm:
    """Mime: local momentum SGD with the server's momentum held fixed and an SVRG correction.

    First exchange: c_t = mean of the clients' gradients at x_t, m_{t+1} = β m_t + (1 - β) c_t.
    Second: local steps with v = g(y) - g(x_t) + c_t descend (1 - β) v + β m_t, which is
    (1 - β)(g(y) - g(x_t)) + m_{t+1}: the clients need not be sent c_t.

    Args:
      momentum: β in [0, 1], the weight of the old momentum, or a schedule of the round.
    """
    check_scalar_or_schedule("momentum", momentum, maximum=1.0)
    training = LocalTraining(loss_fn, **common)

    def full_gradient(x, row, batch):
        return {"gradient": training.gradient.full(x, batch)}, row, {}

    def update_momentum(server, messages, cohort):
        beta = at_round(momentum, cohort.round)
        return server._replace(momentum=_average(server.momentum, messages["gradient"], beta)), {}

    def client_update(received, row, batch):
        x, new_m = received
        beta = at_round(momentum, batch.round)

        def direction(y, step):
            g, report = training.gradient(y, step)
            g_at_server, _ = training.gradient(x, step)
            return tree.add_scaled(new_m, 1 - beta, tree.subtract(g, g_at_server)), report

        local = training.steps(x, batch, direction)
        return {"delta": tree.subtract(x, local.params)}, row, local.report

    gradients = Phase(broadcast_params, full_gradient, update_momentum, reduce={"gradient": "mean"})
    steps = Phase(
        _broadcast_mime,
        client_update,
        ServerSGD(server_lr),
        reduce={"delta": "mean"},
        costs=Costs(gradients=2),
    )
    return Algorithm("mime", _start_mime, (gradients, steps))


@factory
def mimelite(
    loss_fn: LossFn,
    *,
    momentum: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    **common: Unpack[Common],
) -> Algorithm:
    """MimeLite: local steps descend (1 - β) g + β m_t; m_t then averages the gradients at x_t.

    Args:
      momentum: β in [0, 1], the weight of the old momentum, or a schedule of the round.
    """
    check_scalar_or_schedule("momentum", momentum, maximum=1.0)
    training = LocalTraining(loss_fn, **common)

    def client_update(received, row, batch):
        x, m = received
        beta = at_round(momentum, batch.round)

        def direction(y, step):
            g, report = training.gradient(y, step)
            return _average(m, g, beta), report

        local = training.steps(x, batch, direction)
        delta = tree.subtract(x, local.params)
        return {"delta": delta, "gradient": training.gradient.full(x, batch)}, row, local.report

    server_sgd = ServerSGD(server_lr)

    def server_update(server, messages, cohort):
        server, metrics = server_sgd(server, messages, cohort)
        beta = at_round(momentum, cohort.round)
        new_m = _average(server.momentum, messages["gradient"], beta)
        return server._replace(momentum=new_m), metrics

    reduce = {"delta": "mean", "gradient": "mean"}
    phase = Phase(_broadcast_mime, client_update, server_update, reduce)
    return Algorithm("mimelite", _start_mime, (phase,))


def _start_mime(params, num_clients, batch):
    return MomentumServer(params, tree.zeros_like(params)), ()


def _broadcast_mime(server, round):
    return server.params, server.momentum


def _average(m: PyTree, g: PyTree, beta: Scalar) -> PyTree:
    """Compute beta m + (1 - beta) g."""
    return tree.add_scaled(tree.scale(m, beta), 1 - beta, g)


@factory
def fedacg(
    loss_fn: LossFn,
    *,
    momentum: ScalarOrSchedule,
    prox_weight: ScalarOrSchedule,
    **common: Unpack[Common],
) -> Algorithm:
    """FedACG: clients start from the look-ahead z_t = x_t + λ m_t, and are held near it.

    m_{t+1} = λ m_t - mean_i (z_t - x^i_K) and x_{t+1} = x_t + m_{t+1}, the clients' mean. The
    model to evaluate is x_t.

    Args:
      momentum: λ in [0, 1], or a schedule of the round.
      prox_weight: weight b of the penalty b/2 ||y - z_t||², or a schedule of the round.
    """
    check_scalar_or_schedule("momentum", momentum, maximum=1.0)
    check_scalar_or_schedule("prox_weight", prox_weight)
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        return FedACGServer(params, tree.zeros_like(params)), ()

    def broadcast(server, round):
        return tree.add_scaled(server.params, at_round(momentum, round), server.velocity)

    def client_update(z, row, batch):
        b = at_round(prox_weight, batch.round)

        def direction(y, step):
            g, report = training.gradient(y, step)
            return tree.add_scaled(g, b, tree.subtract(y, z)), report

        local = training.steps(z, batch, direction)
        return {"delta": tree.subtract(z, local.params)}, row, local.report

    def server_update(server, messages, cohort):
        delta = messages["delta"]
        kept = tree.scale(server.velocity, at_round(momentum, cohort.round))
        velocity = tree.subtract(kept, delta)
        params = tree.add(server.params, velocity)
        return FedACGServer(params, velocity), {"delta_norm": tree.norm(delta)}

    phase = Phase(broadcast, client_update, server_update, reduce={"delta": "mean"})
    return Algorithm("fedacg", start, (phase,))
