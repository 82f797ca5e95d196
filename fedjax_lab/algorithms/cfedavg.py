"""CFedAvg: FedAvg with compressed changes and error feedback.

Yang, Fang, Liu: CFedAvg: Achieving Efficient Communication and Fast Convergence in Non-IID
Federated Learning. MobiHoc 2021, Algorithms 1 and 2.

=========================  ==========================================
paper                      here
=========================  ==========================================
x_t                        ``params``
Δ̄^i_t = y_K - x_t          minus ``delta``: our delta = x_t - y_K is subtracted
e^i_t                      ``residuals`` of the client's row, with delta's sign
C(.), 1/γ                  ``compressor``, its ``snr_bound``
η_L, η                     ``client_lr``, ``server_lr``
K_i in Δ̄^i_t / K_i         ``normalize_by_steps`` (heterogeneous local steps)
comp                       fraction dropped: ``top_k(comp)``, ``random_drop(comp)``
=========================  ==========================================

Down d, up what the packed message takes, client state d with error feedback. Departures: with
partial participation, which the paper has not, e_i waits; weights are those of the batch.
"""

import dataclasses
from typing import Unpack

import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, factory
from fedjax_lab.algorithms.fedavg import fedavg
from fedjax_lab.compressors import Compressor, as_compressor
from fedjax_lab.round import Algorithm
from fedjax_lab.types import LossFn, ScalarOrSchedule
from fedjax_lab.wrappers.compression import with_compression

SYMBOLS = {"eta": "server_lr"}


@factory
def cfedavg(
    loss_fn: LossFn,
    *,
    compressor: Compressor | str,
    server_lr: ScalarOrSchedule = 1.0,
    error_feedback: bool = True,
    normalize_by_steps: bool = False,
    **common: Unpack[Common],
) -> Algorithm:
    """CFedAvg: ``with_compression(fedavg(...), compressor)``.

    Args:
      compressor: of the clients' changes; also text, such as "top_k:0.99".
      error_feedback: keep what is left out and add it to the next message.
      normalize_by_steps: divide a client's change by its own number of steps K_i
        (Algorithm 2); the server's step shrinks with it.

    Raises:
      TypeError: ``compressor`` is neither a ``Compressor`` nor text.
      ValueError: a learning rate is negative or not finite, or the text is no compressor.
    """
    compressor = as_compressor("compressor", compressor)
    plain = fedavg(loss_fn, server_lr=server_lr, **common)
    (phase,) = plain.phases
    local_sgd = phase.client_update

    def mean_step_update(params, row, batch):  # Algorithm 2
        message, row, report = local_sgd(params, row, batch)
        steps = jnp.maximum(batch.num_steps, 1).astype(jnp.result_type(float))
        delta = tree.scale(message["delta"], 1 / steps)
        return {"delta": delta}, row, report

    if normalize_by_steps:
        phase = phase._replace(client_update=mean_step_update)
    compressed = with_compression(
        dataclasses.replace(plain, phases=(phase,)), compressor, error_feedback=error_feedback
    )
    return dataclasses.replace(compressed, name="cfedavg")
