"""FedNova: divide each client's change by its effective number of steps before averaging.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization. NeurIPS 2020, equation (6) and Algorithm 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
x^(t,0), x_i^(t,τ_i)       server params x_t, local params after K_i steps
τ_i                        K_i, the steps that the client takes
||a_i||_1                  A_i, the effective steps
d_i                        ``delta`` / client_lr: our delta is (x_t - x^i_K) / A_i
τ_eff                      sum_i p_i A_i
p_i                        ``weights`` of the batch, normalised over the cohort
ρ, μ                       ``local_momentum``, ``prox_weight``
=========================  ==========================================

A_i is by how much the changes of all steps together exceed that of one where the gradient is
constant: K_i for plain SGD, more with momentum, less with a proximal term.

Down d, up d and one number (K_i), no client state. Departures: p is normalised over those who take
part. With a proximal term the published code takes sum_i p_i K_i for τ_eff; here it stays
sum_i p_i A_i.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round, is_plain_zero
from fedjax_lab.algorithms.server import broadcast_params
from fedjax_lab.checks import check_number, check_scalar_or_schedule, is_traced
from fedjax_lab.clients.costs import Costs
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {"rho": "local_momentum", "mu": "prox_weight"}


class FedNovaServer(NamedTuple):
    """Server state of FedNova."""

    params: Params  # x_t
    momentum: PyTree  # buffer in units of gradients; () without server momentum


@factory
def fednova(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    local_momentum: Scalar = 0.0,
    prox_weight: ScalarOrSchedule = 0.0,
    server_momentum: Scalar = 0.0,
    **common: Unpack[Common],
) -> Algorithm:
    """FedNova: x_{t+1} = x_t - server_lr * (sum_i p_i A_i) * sum_i p_i (x_t - x^i_K) / A_i.

    Args:
      local_momentum: ρ in [0, 1): clients descend v <- ρ v + g, with v = 0 at the start of
        each round.
      prox_weight: μ in g + μ (y - x_t), or a schedule of the round.
      server_momentum: in [0, 1]: the server descends client_lr * b, where b is
        server_momentum * b + (its step) / client_lr; 0 keeps no b.

    Raises:
      ValueError: a hyper-parameter is out of range, or there is a local momentum and a
        proximal term too.
    """
    check_number("local_momentum", local_momentum, minimum=0.0, maximum=1.0, exclusive_maximum=True)
    check_scalar_or_schedule("prox_weight", prox_weight)
    check_number("server_momentum", server_momentum, minimum=0.0, maximum=1.0)
    known = not is_traced((local_momentum, prox_weight))
    if known and not is_plain_zero(local_momentum) and not is_plain_zero(prox_weight):
        raise ValueError(
            f"local_momentum is {local_momentum} and prox_weight is {prox_weight}; FedNova's "
            "effective steps are defined with one of them, so one must be 0."
        )
    training = LocalTraining(loss_fn, **common)
    has_buffer = not is_plain_zero(server_momentum)

    def effective_steps(of):
        """Compute A_i of a client's batch, or of a cohort's clients; 0 for one without steps."""
        rate = training.rate(of.round) * at_round(prox_weight, of.round)
        shrink = 1 - jnp.asarray(rate, float)

        def one_more(carry, _):
            velocity, effective = carry
            velocity = local_momentum * velocity + 1
            effective = shrink * effective + velocity
            return (velocity, effective), effective

        zero = jnp.zeros_like(shrink)
        _, after = jax.lax.scan(one_more, (zero, zero), length=of.max_steps)
        return jnp.concatenate([zero[None], after])[of.num_steps]

    def start(params, num_clients, batch):
        return FedNovaServer(params, tree.zeros_like(params) if has_buffer else ()), ()

    def client_update(x, row, batch):
        mu = at_round(prox_weight, batch.round)

        def direction(y, step):
            g, report = training.gradient(y, step)
            v = tree.add_scaled(g, local_momentum, step.memory)
            u = tree.add_scaled(v, mu, tree.subtract(y, x))
            return u, report._replace(memory=v)

        lr = training.rate(batch.round)
        local = training.steps(x, batch, direction, lr=lr, memory=tree.zeros_like(x))
        per_step = tree.safe_divide(1.0, effective_steps(batch))
        delta = tree.scale(tree.subtract(x, local.params), per_step)
        return {"delta": delta}, row, local.report

    def server_update(server, messages, cohort):
        mean_steps = (cohort.weights * effective_steps(cohort)).sum()
        step = tree.scale(messages["delta"], mean_steps)
        rate, buffer = at_round(server_lr, cohort.round), ()
        if has_buffer:
            lr = training.rate(cohort.round)
            buffer = tree.add_scaled(
                tree.scale(step, tree.safe_divide(1.0, lr)), server_momentum, server.momentum
            )
            step = tree.scale(buffer, lr)
        params = tree.descend(server.params, rate, step)
        metrics = {"delta_norm": tree.norm(messages["delta"]), "effective_steps": mean_steps}
        return FedNovaServer(params, buffer), metrics

    phase = Phase(
        broadcast_params,
        client_update,
        server_update,
        reduce={"delta": "mean"},
        costs=Costs(extra=4),  # K_i, an int32
    )
    return Algorithm("fednova", start, (phase,))
