"""Why methods with control variates diverge under partial participation: old controls, isolated.

A client's control is as old as its last visit. Here is the same round with all controls fresh: all
clients take their steps and renew their controls, and the server moves by the deltas of a tenth of
them, as it does where only a tenth came. What differs is the age of the controls alone.

    python -m experiments.catalogue stale_controls
"""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.studies.study import Column, Method, Scale, Study, smoke
from fedjax_lab import tree
from fedjax_lab.round import Algorithm


def a_tenth_moves_the_server(algorithm: Algorithm, share: float = 0.1) -> Algorithm:
    """The method, whose server sees the deltas of a random tenth, and all controls."""
    (phase,) = algorithm.phases

    def client_update(received, row, batch):
        message, row, report = phase.client_update(received, row, batch)
        moves = jax.random.bernoulli(batch.key, share).astype(float)
        delta = tree.scale(message["delta"], moves)
        return {**message, "delta": delta, "moves": moves}, row, report

    def server_update(server, messages, cohort):
        messages = dict(messages)
        of_those = tree.safe_divide(1.0, messages.pop("moves"))
        messages["delta"] = tree.scale(messages["delta"], of_those)
        return phase.server_update(server, messages, cohort)

    def message(params):
        return {**dict.fromkeys(phase.reduce, params), "moves": jnp.zeros(())}

    wrapped = phase._replace(
        client_update=client_update,
        server_update=server_update,
        reduce={**phase.reduce, "moves": "mean"},
        message=message,
        costs=phase.costs._replace(up=lambda message: tree.nbytes(message["delta"])),
    )
    return dataclasses.replace(algorithm, phases=(wrapped,))


_METHODS = {"FedAvg": "fedavg", "SCAFFOLD": "scaffold", "FedMo": "fedmo"}
_ALL = {"cohort_size": 100}


def _rows(name: str, algorithm: str) -> dict[str, Method]:
    grid = {"client_lr": (0.1,)}
    fresh = Method(algorithm, grid, settings=_ALL, wrap=a_tenth_moves_the_server)
    return {f"{name}, 10 of 100": Method(algorithm, grid), f"{name}, fresh controls": fresh}


METHODS = {label: row for item in _METHODS.items() for label, row in _rows(*item).items()}
_SETTING = {
    "dataset": "fashion_mnist",
    "model": "mlp",
    "partition": "dirichlet:0.1",
    "num_clients": 100,
    "cohort_size": 10,
    "batch_size": 64,
    "local_steps": 5,
    "rounds": 120,
    "eval_every": 10,
}

STUDY = Study(
    name="catalogue/stale_controls",
    title="Old control variates, isolated",
    notes="""\
Fashion-MNIST at Dirichlet 0.1: 100 clients, 10 a round, 5 steps of batch 64, the MLP
784-200-100-10, client_lr 0.1, with which SCAFFOLD, FedMo and others leave all bounds, without
clipping. "Fresh controls": all 100 clients take their steps and renew their controls in every
round, and the server moves by the deltas of a random tenth, which is as large a cohort as in the
other rows. FedAvg has no controls: its two rows differ by chance alone.""",
    methods=METHODS,
    scales={
        "machine": Scale(columns={"dirichlet:0.1": Column(_SETTING, 120)}, minutes=15),
        "smoke": smoke(100, 10, ("SCAFFOLD, 10 of 100", "SCAFFOLD, fresh controls")),
    },
)
