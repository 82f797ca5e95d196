"""What the servers of many methods have in common: their broadcast and their step."""

import dataclasses
from typing import NamedTuple

import jax

from fedjax_lab import tree
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.checks import check_number
from fedjax_lab.types import (
    Cohort,
    CohortBatch,
    Metrics,
    Params,
    PyTree,
    Scalar,
    ScalarOrSchedule,
)


class ParamsServer(NamedTuple):
    """Server state of methods whose server holds the global model only."""

    params: Params  # x_t


class MomentumServer(NamedTuple):
    """Server state of methods whose server holds a momentum, too."""

    params: Params  # x_t
    momentum: PyTree  # m_t; () where a variant has none


def start_with_params(
    params: Params, num_clients: int, batch: CohortBatch | None
) -> tuple[ParamsServer, tuple[()]]:
    """Start a method whose server holds the global model only, and whose clients are stateless.

    Args:
      batch: not used.
    """
    return ParamsServer(params), ()


def broadcast_params(server: PyTree, round: jax.Array) -> Params:
    """Broadcast the global model only, as most methods do.

    Args:
      server: server state with a field ``params``.
      round: int32 scalar; it makes no difference.
    """
    return server.params


def keep_server(server: PyTree, messages: dict, cohort: Cohort) -> tuple[PyTree, Metrics]:
    """Return the server unchanged: the server half of an exchange that only informs the clients."""
    return server, {}


@dataclasses.dataclass(frozen=True, eq=False)
class ServerSGD:
    """SGD as the server half of a phase: it descends ``delta``, the mean of the clients' changes.

    Without momentum x <- x - lr * delta; with it m <- momentum * m + delta, x <- x - lr * m. The
    server state has ``params`` and, with momentum, ``momentum``; other fields stay. The metric is
    ``delta_norm``.

    Attributes:
      lr: server learning rate, or a schedule of the round.
      momentum: in [0, 1]; None: no momentum is kept.
    """

    lr: ScalarOrSchedule
    momentum: Scalar | None = None

    def __post_init__(self):
        if self.momentum is not None:
            check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)

    def first_momentum(self, params: Params) -> PyTree:
        """Return the server state's ``momentum`` before round 0: zeros, or () without momentum.

        Args:
          params: the initial global model.
        """
        return () if self.momentum is None else tree.zeros_like(params)

    def __call__(self, server: PyTree, messages: dict, cohort: Cohort) -> tuple[PyTree, Metrics]:
        """Take the server's step of a round.

        Args:
          server: server state.
          messages: field -> what the server received; ``delta`` is like the params.
          cohort: who took part.
        """
        step = delta = messages["delta"]
        if self.momentum is not None:
            if not jax.tree.leaves(getattr(server, "momentum", None)):
                raise ValueError(
                    f"server state is a {type(server).__name__} without momentum; ServerSGD(lr, "
                    "momentum) requires a field momentum, at first first_momentum(params)."
                )
            step = tree.add_scaled(delta, self.momentum, server.momentum)
            server = server._replace(momentum=step)
        params = tree.descend(server.params, at_round(self.lr, cohort.round), step)
        return server._replace(params=params), {"delta_norm": tree.norm(delta)}
