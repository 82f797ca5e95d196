"""FedPer, LG-FedAvg, FedBN, FedRep: some layers stay with their client; and training alone.

FedPer: Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers.
2019. LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally,
Act Globally: Federated Learning with Local and Global Representations. 2020. FedBN: Li, Jiang,
Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR
2021. FedRep: Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for
Personalized Federated Learning. ICML 2021.

================================  ==========================================
papers                            here
================================  ==========================================
W_B (FedPer), θ^g (LG), φ (Rep)   u_t, the shared leaves, ``shared`` of the server
W_P^i, θ^l_i, h_i                 h_i, the leaves that ``personal`` names, the client's row
BN layers' parameters (FedBN)     h_i, their running statistics among them
τ (FedRep)                        ``head_steps``, the steps that move h alone
α (FedRep)                        ``client_lr``
================================  ==========================================

Up and down: u. Client state: h. All rows start as the first model's; a client that does not take
part keeps its own. Client i uses (u_t, h_i). What ``algorithm.params`` serves is u_t with the mean
of all h_i, for want of anything better: the methods say nothing of a client that has none.
``local_only`` shares nothing: it is the lower bound that a method has to beat.

Departures: a server learning rate. FedPer's and LG-FedAvg's clients train h and u together from
the first round on. FedRep: of the K steps of a round the first move h and the rest u, each by the
mini-batch of its step, where the paper takes τ gradients for h and then a single one for u; a
``gradient_transform`` sees the gradient of all leaves, a ``step_transform`` that of those that
move. By default τ is half of the client's own K_i. A client with no more steps than a given
``head_steps`` leaves u as it was.
"""

from typing import NamedTuple, Unpack

import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.own_models import OWN_ROW, own_row
from fedjax_lab.algorithms.server import ParamsServer, ServerSGD
from fedjax_lab.checks import check_int
from fedjax_lab.clients.leaves import (
    Leaves,
    check_leaves,
    check_some,
    exact_mean,
    join,
    one_after_the_other,
    split,
)
from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Personal, PyTree, ScalarOrSchedule

SYMBOLS = {"tau": "head_steps", "alpha": "client_lr"}


class LayersServer(NamedTuple):
    """Server state of the methods that share some leaves."""

    shared: PyTree  # u_t, with None in the place of personal leaves


@factory
def fedper(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    personal: Leaves = "head",
    **common: Unpack[Common],
) -> Algorithm:
    """FedPer: FedAvg on the body of the model, under heads that stay with their clients.

    Args:
      personal: leaves that stay: "head" (the last layer), "body" (all others), "norm" (of
        normalisation layers), "all", "nothing", a regular expression that is searched for in their
        paths, such as "blocks_2/", or a function of a path.

    Raises:
      TypeError: ``personal`` is of another type.
      ValueError: a hyper-parameter is outside what is allowed; or (when the method is started)
        ``personal`` holds for all leaves or for none, and is not that word.
    """
    return _layers("fedper", LocalTraining(loss_fn, **common), server_lr, personal)


@factory
def lg_fedavg(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    personal: Leaves = "body",
    **common: Unpack[Common],
) -> Algorithm:
    """LG-FedAvg: FedAvg on the last layer, over representations that stay with their clients.

    Args:
      personal: leaves that stay, as in ``fedper``.

    Raises:
      TypeError: ``personal`` is of another type.
      ValueError: as ``fedper``.
    """
    return _layers("lg_fedavg", LocalTraining(loss_fn, **common), server_lr, personal)


@factory
def fedbn(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    personal: Leaves = "norm",
    **common: Unpack[Common],
) -> Algorithm:
    """FedBN: FedAvg on all but the normalisation layers, which stay with their clients.

    Args:
      personal: leaves that stay, as in ``fedper``: parameters and running statistics of layers
        whose names are or end in norm, bn, gn or ln, also with a number: batch_norm, LayerNorm_0,
        attention_norm, gn1. Name layers otherwise called by a pattern.

    Raises:
      TypeError: ``personal`` is of another type.
      ValueError: as ``fedper``, also where the model has no normalisation layers.
    """
    return _layers("fedbn", LocalTraining(loss_fn, **common), server_lr, personal)


@factory
def fedrep(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    personal: Leaves = "head",
    head_steps: int | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """FedRep: local steps first move the client's own head alone, then the shared body alone.

    Args:
      personal: leaves that stay, as in ``fedper``.
      head_steps: how many steps of a round move them, below K. None: half of the client's own
        steps K_i, rounded down; the single step of a client with K_i = 1 moves the shared leaves.
        0: they stay as they are.

    Raises:
      TypeError: ``personal`` or ``head_steps`` is of another type.
      ValueError: as ``fedper``; or (when a round is traced) no step is left for the shared leaves,
        or of a round of one step ``head_steps`` is None.
    """
    if head_steps is not None:
        check_int("head_steps", head_steps, minimum=0)
    training = LocalTraining(loss_fn, **common)

    def steps(params, batch):
        first = batch.num_steps // 2 if head_steps is None else head_steps
        if batch.max_steps <= (1 if head_steps is None else head_steps):
            raise ValueError(
                f"head_steps is {head_steps}; a round has {batch.max_steps} local steps, and some "
                "must remain to train the shared leaves (None takes half of a client's)."
            )
        turns = one_after_the_other(personal, first, training.step_transform)
        return training.steps(params, batch, transform=turns)

    return _layers("fedrep", training, server_lr, personal, steps)


@factory
def local_only(loss_fn: LossFn, **common: Unpack[Common]) -> Algorithm:
    """Every client trains alone in the rounds for which it is drawn; nothing is ever sent."""
    return _alone("local_only", LocalTraining(loss_fn, **common))


def _layers(name, training, server_lr, personal, steps=None):
    check_leaves("personal", personal)
    if personal == "all":
        return _alone(name, training)
    steps, server_sgd = steps or training.steps, ServerSGD(server_lr)

    def start(params, num_clients, batch):
        check_some(name, "personal", personal, params)
        shared, own = split(params, personal)
        return LayersServer(shared), one_row_per_client(own, num_clients)

    def broadcast(server, round):
        return server.shared

    def client_update(shared, own, batch):
        local = steps(join(shared, own), batch)
        new_shared, new_own = split(local.params, personal)
        return {"delta": tree.subtract(shared, new_shared)}, new_own, local.report

    def server_update(server, messages, cohort):
        new, metrics = server_sgd(ParamsServer(server.shared), messages, cohort)
        return LayersServer(new.params), metrics

    def params_of_client(state, client):
        return join(state.server.shared, own_row(state, client))

    phase = Phase(
        broadcast,
        client_update,
        server_update,
        reduce={"delta": "mean"},
        message=lambda params: {"delta": split(params, personal)[0]},
    )
    return Algorithm(
        name,
        start,
        (phase,),
        lambda state: join(state.server.shared, exact_mean(state.clients)),
        personal=Personal(params_of_client),
    )


def _alone(name, training):
    def client_update(nothing, own, batch):
        local = training.steps(own, batch)
        return {}, local.params, local.report

    def server_update(server, messages, cohort):
        return server, {"delta_norm": jnp.zeros_like(cohort.weights.sum())}

    def start(params, num_clients, batch):
        return (), one_row_per_client(params, num_clients)

    phase = Phase(lambda server, round: (), client_update, server_update, reduce={})
    return Algorithm(
        name, start, (phase,), lambda state: exact_mean(state.clients), personal=OWN_ROW
    )
