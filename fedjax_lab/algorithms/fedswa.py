"""FedSWA and FedMoSWA: a learning rate that falls within the round, an extrapolating server.

Liu, Liu, Shang, Liu, Liu, Feng: Improving Generalization in Federated Learning with Highly
Heterogeneous Data via Momentum-Based Stochastic Controlled Weight Averaging. ICML 2025,
Algorithm 1. FedMo is their ablation with ρ = α = 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
θ_t, m                     ``params`` x_t, ``control`` of the server
θ^t_{i,k}, c_i             local params x^i_k, the client's row
v_t - θ_{t-1}              minus ``delta``: our delta = mean_i (x_t - x^i_K) is subtracted
c_i⁺ - m                   ``control_change``
η_l, ρ                     ``client_lr``, ``final_lr_ratio``
α, γ                       ``server_lr`` (α > 1 extrapolates), ``momentum``
options I, II              ``control_update``
=========================  ==========================================

FedSWA: down d, up d. FedMoSWA and FedMo: down 2d (x, m), up 2d (x^i_K, c_i⁺ - m), client state d.
With a ``step_transform`` option II averages the directions before the transform, as SCAFFOLD's
here does.

Departures: k runs over the K_i steps that the client takes, and option II divides by the exact
sum of their learning rates; with a sum of 0 it keeps c_i - m (0/0 is 0). The published code
divides by another sum (``control_divisor``) and sets m to the mean of the c_i⁺ in its first round
(``first_round_gamma_one``); the paper does not. Both means take the batch's weights.
"""

from typing import Unpack

import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.control_variates import Controls, ControlServer
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round, check_unused
from fedjax_lab.algorithms.server import ServerSGD, broadcast_params, start_with_params
from fedjax_lab.checks import check_choice, check_scalar_or_schedule
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Scalar, ScalarOrSchedule

SYMBOLS = {"rho": "final_lr_ratio", "alpha": "server_lr", "gamma": "momentum"}


@factory
def fedswa(
    loss_fn: LossFn,
    *,
    final_lr_ratio: ScalarOrSchedule = 0.1,
    server_lr: ScalarOrSchedule = 1.5,
    **common: Unpack[Common],
) -> Algorithm:
    """FedSWA: local steps under a falling learning rate, x_{t+1} = x_t + α (mean x^i_K - x_t).

    Args:
      client_lr: learning rate of a round's first local step, or a schedule of the round.
      final_lr_ratio: what is left of it at the end of the round, or a schedule of the round;
        step k of K_i has the share (1 - k/K_i) + (k/K_i) final_lr_ratio; 1 is constant.
      server_lr: server learning rate, or a schedule of the round; above 1 it extrapolates.
    """
    check_scalar_or_schedule("final_lr_ratio", final_lr_ratio)
    training = LocalTraining(loss_fn, **common)

    def client_update(x, row, batch):
        lr = _falling(training.rate(batch.round), at_round(final_lr_ratio, batch.round))
        local = training.steps(x, batch, lr=lr)
        return {"delta": tree.subtract(x, local.params)}, row, local.report

    phase = Phase(broadcast_params, client_update, ServerSGD(server_lr), reduce={"delta": "mean"})
    return Algorithm("fedswa", start_with_params, (phase,))


@factory
def fedmoswa(
    loss_fn: LossFn,
    *,
    final_lr_ratio: ScalarOrSchedule = 0.1,
    server_lr: ScalarOrSchedule = 1.5,
    momentum: ScalarOrSchedule = 0.2,
    control_update: str = "II",
    control_divisor: str = "sum",
    first_round_gamma_one: bool = False,
    **common: Unpack[Common],
) -> Algorithm:
    """FedMoSWA: FedSWA whose local steps descend g - c_i + m.

    Args:
      client_lr: learning rate of a round's first local step, or a schedule of the round.
      final_lr_ratio: what is left of it at the end of the round, or a schedule of the round.
      server_lr: server learning rate, or a schedule of the round; above 1 it extrapolates.
      momentum: share of the cohort's mean control in the new m, in [0, 1], or a schedule of
        the round.
      control_update: "I": the client's gradient at the server model, over
        ``full_examples`` if the batch has them (with ``example_noise`` it must), else over the
        round's examples; "II": the mean of the gradients that the local steps saw, weighted with
        their learning rates.
      control_divisor: by what "II" divides the sum of the directions, each times its learning
        rate: "sum", of these rates, or "trapezoid", K_i η_l (1 + ρ) / 2 (the published code),
        smaller by η_l (1 - ρ) / 2.
      first_round_gamma_one: round 0 sets m to the cohort's mean control.
    """
    training = LocalTraining(loss_fn, **common)
    return _fedmoswa(
        "fedmoswa",
        training,
        final_lr_ratio,
        server_lr,
        momentum,
        control_update,
        control_divisor,
        first_round_gamma_one,
    )


@factory
def fedmo(
    loss_fn: LossFn,
    *,
    momentum: ScalarOrSchedule = 0.2,
    control_update: str = "II",
    first_round_gamma_one: bool = False,
    **common: Unpack[Common],
) -> Algorithm:
    """FedMo: FedMoSWA with a constant learning rate within the round and plain averaging.

    Args:
      momentum: share of the cohort's mean control in the new m, in [0, 1], or a schedule of the
        round.
      control_update: how a client renews its control, "I" or "II", as in ``fedmoswa``.
      first_round_gamma_one: round 0 sets m to the cohort's mean control.
    """
    training = LocalTraining(loss_fn, **common)
    return _fedmoswa(
        "fedmo", training, 1.0, 1.0, momentum, control_update, "sum", first_round_gamma_one
    )


def _fedmoswa(
    name, training, final_lr_ratio, server_lr, momentum, update, divisor, first_round_gamma_one
):
    check_scalar_or_schedule("momentum", momentum, maximum=1.0)
    check_choice("control_update", update, ("I", "II"))
    check_choice("control_divisor", divisor, ("sum", "trapezoid"))
    if update == "I":
        check_unused("control_divisor", divisor, "sum", "control_update 'I'")
    check_scalar_or_schedule("final_lr_ratio", final_lr_ratio)
    server_sgd = ServerSGD(server_lr)

    def start(params, num_clients, batch):
        server = ControlServer(params, tree.zeros_like(params))
        return server, zero_row_per_client(params, num_clients)

    def broadcast(server, round):
        return server.params, server.control

    def client_update(received, c_i, batch):
        x, m = received
        held = Controls(m, c_i)

        def direction(y, step):
            g, report = training.gradient(y, step)
            return held.corrected(g), report

        first, ratio = training.rate(batch.round), at_round(final_lr_ratio, batch.round)
        local = training.steps(
            x, batch, direction, lr=_falling(first, ratio), sum_directions=update == "II"
        )
        delta = tree.subtract(x, local.params)
        if update == "I":
            new_c_i = training.gradient.full(x, batch)
        else:
            lr_sum = local.lr_sum
            if divisor == "trapezoid":
                lr_sum = jnp.asarray(batch.num_steps * first * (1 + ratio) / 2, lr_sum.dtype)
            new_c_i = held.mean_gradient(local.untransformed(delta), lr_sum)
        message = {"delta": delta, "control_change": tree.subtract(new_c_i, m)}
        return message, new_c_i, local.report

    def server_update(server, messages, cohort):
        server, metrics = server_sgd(server, messages, cohort)
        gamma = at_round(momentum, cohort.round)
        if first_round_gamma_one:
            gamma = jnp.where(cohort.round == 0, 1.0, gamma)
        control = tree.add_scaled(server.control, gamma, messages["control_change"])
        return server._replace(control=control), metrics

    reduce = {"delta": "mean", "control_change": "mean"}
    phase = Phase(broadcast, client_update, server_update, reduce)
    return Algorithm(name, start, (phase,))


def _falling(first: Scalar, ratio: Scalar):
    """Return η_k = η_l (1 - k/K_i) + (k/K_i) ρ η_l of a round, as a function of (k, K_i)."""

    def lr(k, num_steps):
        done = tree.safe_divide(k.astype(float), num_steps)  # int32 / int32 would be float32
        return first * (1 - done) + done * ratio * first

    return lr
