"""What a method is written with, in one import; see docs/guides/add_an_algorithm.md."""

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.algorithms.server import ServerSGD, broadcast_params
from fedjax_lab.checks import check_choice, check_int, check_number, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import one_row_per_client, zero_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import (
    ClientBatch,
    Cohort,
    CohortBatch,
    FedState,
    LossFn,
    Params,
    Personal,
    PyTree,
    Scalar,
    ScalarOrSchedule,
)

__all__ = [
    "Algorithm",
    "ClientBatch",
    "Cohort",
    "CohortBatch",
    "Common",
    "Costs",
    "FedState",
    "LocalTraining",
    "LossFn",
    "Params",
    "Personal",
    "Phase",
    "PyTree",
    "Scalar",
    "ScalarOrSchedule",
    "ServerSGD",
    "at_round",
    "broadcast_params",
    "check_choice",
    "check_int",
    "check_number",
    "check_scalar_or_schedule",
    "factory",
    "one_row_per_client",
    "tree",
    "zero_row_per_client",
]
