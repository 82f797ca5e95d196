"""FedBABU: the body alone is trained together; each client fine-tunes before it is evaluated.

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022.

=========================  ==========================================
paper                      here
=========================  ==========================================
θ_ext, θ_cls               body and ``head`` of the model x_t; the head stays as it is
τ_f                        ``fine_tune_steps``, mini-batches of the client's own data
fine-tuning of all, head   ``fine_tune``
=========================  ==========================================

Up: the body. Down d: the head never changes, but a client that is drawn for the first time needs
it. No client state. Departures: a server learning rate; fine-tuning is counted in mini-batches, of
a learning rate of its own where one is given, and in epochs in the paper. A ``gradient_transform``
sees the gradient of the head as well, a ``step_transform`` zeros in its place.

``with_fine_tuning`` makes of any method one whose clients fine-tune: FedAvg, fine-tuned, is the
baseline that personal methods have to beat.
"""

import dataclasses
from typing import Unpack

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory, takes_common
from fedjax_lab.algorithms.server import ParamsServer, ServerSGD, broadcast_params
from fedjax_lab.checks import check_choice, check_int, check_number
from fedjax_lab.clients.leaves import (
    Leaves,
    check_leaves,
    check_some,
    join,
    one_after_the_other,
    split,
)
from fedjax_lab.descriptions import describe
from fedjax_lab.round import Algorithm, Phase, check_algorithm
from fedjax_lab.types import LossFn, Personal, Scalar, ScalarOrSchedule

SYMBOLS = {"tau_f": "fine_tune_steps"}


@factory
def fedbabu(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    head: Leaves = "head",
    fine_tune_steps: int = 10,
    fine_tune: str = "all",
    fine_tune_lr: Scalar | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """FedBABU: FedAvg on the body under a random head; clients fine-tune for their evaluation.

    Args:
      head: leaves that are frozen, as ``personal`` of ``fedper``.
      fine_tune_steps: mini-batches of a client's own data before it is evaluated; 0: none.
      fine_tune: what they move: "all" leaves, or the "head".
      fine_tune_lr: their learning rate. None: ``client_lr``, of a schedule that of round 0.

    Raises:
      TypeError: ``head`` or ``fine_tune_steps`` is of another type.
      ValueError: a hyper-parameter is outside what is allowed; or (when the method is started)
        ``head`` holds for all leaves, or for none and is not that word.
    """
    check_leaves("head", head)
    if head == "all":
        raise ValueError("head is 'all'; FedBABU trains the leaves that are not the head.")
    check_int("fine_tune_steps", fine_tune_steps, minimum=0)
    check_choice("fine_tune", fine_tune, ("all", "head"))
    if fine_tune_lr is not None:
        check_number("fine_tune_lr", fine_tune_lr, minimum=0.0)
    training, server_sgd = LocalTraining(loss_fn, **common), ServerSGD(server_lr)

    def steps(params, batch, head_steps, lr=None):
        """Run local steps: the first ones move the head, the others the body."""
        turns = one_after_the_other(head, head_steps, training.step_transform)
        return training.steps(params, batch, lr=lr, transform=turns)

    def start(params, num_clients, batch):
        check_some("fedbabu", "head", head, params)
        return ParamsServer(params), ()

    def client_update(x, row, batch):
        local = steps(x, batch, head_steps=0)
        body, _ = split(tree.subtract(x, local.params), head)
        return {"delta": body}, row, local.report

    def server_update(server, messages, cohort):
        body, frozen = split(server.params, head)
        new, metrics = server_sgd(ParamsServer(body), messages, cohort)
        return ParamsServer(join(new.params, frozen)), metrics

    def tuned(params, batch):
        if fine_tune == "head":
            return steps(params, batch, batch.max_steps, fine_tune_lr).params
        return training.steps(params, batch, lr=fine_tune_lr).params

    phase = Phase(
        broadcast_params,
        client_update,
        server_update,
        reduce={"delta": "mean"},
        message=lambda params: {"delta": split(params, head)[0]},
    )
    return Algorithm(
        "fedbabu",
        start,
        (phase,),
        personal=Personal(lambda state, i: state.server.params, tuned, fine_tune_steps),
    )


@takes_common
def with_fine_tuning(
    algorithm: Algorithm, loss_fn: LossFn, *, steps: int, **common: Unpack[Common]
) -> Algorithm:
    """Wrap a method so that clients fine-tune the global model before they are evaluated.

    Rounds are unchanged. ``client_lr`` and the other arguments that all methods share apply to the
    fine-tuning.

    Args:
      algorithm: any method; clients that have models of their own fine-tune these.
      loss_fn: (params, examples [B, ...], key) -> losses, float [B], or (losses, metrics).
      steps: mini-batches of a client's own data, at least 1.

    Raises:
      TypeError, ValueError: an argument is wrong, or the method fine-tunes already.
    """
    check_algorithm(algorithm)
    check_int("steps", steps, minimum=1)
    training = LocalTraining(loss_fn, **common)
    personal = algorithm.personal or Personal(lambda state, client: algorithm.params(state))
    if personal.fine_tune is not None:
        raise ValueError(f"algorithm is {algorithm.name}, whose clients fine-tune already.")
    own = {"steps": steps, **{name.removeprefix("client_"): v for name, v in common.items()}}
    record = {f"fine_tune_{name}": describe(v) for name, v in own.items() if v is not None}
    return dataclasses.replace(
        algorithm,
        name=f"{algorithm.name}+fine_tuned",
        hyperparameters={**algorithm.hyperparameters, **record},
        personal=personal._replace(
            fine_tune=lambda params, batch: training.steps(params, batch).params, steps=steps
        ),
    )
