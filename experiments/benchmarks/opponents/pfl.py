"""Apple's pfl (the package of pfl-research) with its PyTorch models.

``pfl`` is one process; ``pfl_processes`` is one for each core with one thread, which torchrun
starts and pfl divides a cohort among, as its documentation has it for several GPUs. Its users train
on consecutive mini-batches of a pass; here, as for all systems, mini-batches are drawn with
replacement. Local models are evaluated in round 0 alone, which is not timed.
"""

import itertools
import json
import os
import subprocess
import sys
import time
import types

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.version import __version__ as pfl_version

from experiments.benchmarks import torch_models
from experiments.benchmarks.child import STARTED, Unsupported
from experiments.benchmarks.torch_models import Clients, mean_loss
from experiments.benchmarks.workloads import WORKLOADS


class DrawnDataset(Dataset):
    """A user's data, in a given number of mini-batches drawn with replacement."""

    def __init__(self, raw_data, num_steps):
        super().__init__(raw_data)
        self._num_steps = num_steps

    def iter(self, batch_size):
        """Yield [x, y]."""
        x, y = self.raw_data
        for rows in torch.randint(len(y), (self._num_steps, batch_size), device=y.device):
            yield [x[rows], y[rows]]


class Clock(TrainingProcessCallback):
    """Notes when each sample ends; ends the run when the time is up."""

    def __init__(self, rounds, max_seconds):
        self.ends, self._rounds, self._max_seconds = [], rounds, max_seconds

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Read the clock."""
        if (central_iteration + 1) % self._rounds:
            return False, Metrics()
        torch_models.wait()
        self.ends.append(time.perf_counter())
        late = self.ends[-1] - self.ends[0] > self._max_seconds
        return late and len(self.ends) > 1, Metrics()


def run(system, job):
    """Rounds of its FederatedAveraging with uniform weights."""
    if system == "pfl_processes":
        return run_processes(job)
    workload = WORKLOADS[job["workload"]]
    torch_models.set_up(job)
    clients = Clients(job["data"])
    users = [
        DrawnDataset([clients.x[rows], clients.y[rows]], workload.local_steps)
        for rows in clients.rows
    ]
    module = torch_models.build_model(workload)
    module.loss = types.MethodType(lambda self, x, y: mean_loss(self(x), y), module)
    module.metrics = types.MethodType(_metrics, module)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    sampler = get_user_sampler("minimize_reuse", list(range(len(users))))
    dataset = FederatedDataset(users.__getitem__, sampler)
    clock = Clock(job["rounds"], job["max_seconds"])
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=job["rounds"] * (job["samples"] + 1),
            evaluation_frequency=10**9,
            train_cohort_size=workload.cohort_size,
            val_cohort_size=None,
        ),
        SimulatedBackend(dataset, dataset),
        model,
        NNTrainHyperParams(
            local_batch_size=workload.batch_size,
            local_num_epochs=None,
            local_learning_rate=workload.client_lr,
            local_num_steps=workload.local_steps,
        ),
        NNEvalHyperParams(local_batch_size=workload.batch_size),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    about = torch_models.about_device()
    return {
        "milliseconds": [
            1e3 * (later - sooner) / job["rounds"]
            for sooner, later in itertools.pairwise(clock.ends)
        ],
        "first_row_seconds": clock.ends[0] - STARTED,
        **about,
        "versions": {**about["versions"], "pfl": pfl_version},
        "test_loss": clients.test_loss(module),
    }


def run_processes(job):
    """The same in a process for each core; the answer is the first one's."""
    if torch_models.DEVICE.type != "cpu":
        raise Unsupported("one GPU has no cores to divide")
    count = os.cpu_count() or 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command += [f"--nproc-per-node={count}", sys.executable, "-m", "experiments.benchmarks.child"]
    # A process that stops before the others leaves them waiting: all take all samples.
    told = json.dumps({**job, "threads": 1, "max_seconds": float("inf")})
    started = time.perf_counter() - STARTED
    done = subprocess.run([*command, "pfl", told], stdout=subprocess.PIPE, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        **answers[0],
        "first_row_seconds": started + max(each["first_row_seconds"] for each in answers),
        "peak_bytes": sum(each["peak_bytes"] for each in answers),
        "threads": count,
    }


@torch.no_grad()
def _metrics(self, x, y, **kwargs):
    return {"loss": Weighted(float(mean_loss(self(x), y)) * len(y), len(y))}
