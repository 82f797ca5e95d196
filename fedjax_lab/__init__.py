"""fedjax_lab: federated learning in JAX, from a round function to a finished study."""

from fedjax_lab import algorithms, compressors, data, models, qp
from fedjax_lab.clients.host_devices import divide_cpu
from fedjax_lab.clients.mapping import model_shardings
from fedjax_lab.round import Algorithm, Phase, build_round
from fedjax_lab.simulation.evaluate import build_evaluation
from fedjax_lab.simulation.history import SimulationResult
from fedjax_lab.simulation.plan import RoundPlan, plan
from fedjax_lab.simulation.simulate import simulate
from fedjax_lab.simulation.stop import forget_signal
from fedjax_lab.simulation.sweep import sweep
from fedjax_lab.simulation.sweep_result import SweepResult
from fedjax_lab.storage.saved_run import SavedRun, load_run
from fedjax_lab.tuning.tune import tune
from fedjax_lab.types import CohortBatch, FedState
from fedjax_lab.version import __version__
from fedjax_lab.wrappers import (
    privacy,
    with_attack,
    with_buffered_aggregation,
    with_client_metrics,
    with_compression,
    with_dp,
    with_frozen,
    with_personal,
    with_ranks,
    with_robust_aggregation,
    with_secure_aggregation,
    with_update_metrics,
)

__all__ = [
    "Algorithm",
    "CohortBatch",
    "FedState",
    "Phase",
    "RoundPlan",
    "SavedRun",
    "SimulationResult",
    "SweepResult",
    "__version__",
    "algorithms",
    "build_evaluation",
    "build_round",
    "compressors",
    "data",
    "forget_signal",
    "load_run",
    "model_shardings",
    "models",
    "plan",
    "privacy",
    "qp",
    "simulate",
    "sweep",
    "tune",
    "with_attack",
    "with_buffered_aggregation",
    "with_client_metrics",
    "with_compression",
    "with_dp",
    "with_frozen",
    "with_personal",
    "with_ranks",
    "with_robust_aggregation",
    "with_secure_aggregation",
    "with_update_metrics",
]

divide_cpu()
