"""fedjax_lab: federated learning in JAX, from a round function to a finished study."""

from fedjax_lab import algorithms, compressors, data, models, qp
from fedjax_lab.clients.host_devices import divide_cpu
from fedjax_lab.compressors import with_compression
from fedjax_lab.round import Algorithm, Phase, build_round
from fedjax_lab.simulation.run import SimulationResult, simulate
from fedjax_lab.simulation.sweep import sweep
from fedjax_lab.simulation.sweep_result import SweepResult
from fedjax_lab.types import CohortBatch, FedState

__version__ = "0.2.0"

__all__ = [
    "Algorithm",
    "CohortBatch",
    "FedState",
    "Phase",
    "SimulationResult",
    "SweepResult",
    "algorithms",
    "build_round",
    "compressors",
    "data",
    "models",
    "qp",
    "simulate",
    "sweep",
    "with_compression",
]

divide_cpu()
