"""FedLab: its standalone simulation, one client after the other in one process.

A round is that of FedLab's ``StandalonePipeline``. Its users give it PyTorch's data loaders; here a
client's mini-batches are tensors in memory, which is faster.
"""

import importlib.metadata
import sys
from unittest import mock

import torch

from experiments.benchmarks import torch_models
from experiments.benchmarks.child import timed
from experiments.benchmarks.torch_models import Clients
from experiments.benchmarks.workloads import WORKLOADS

# FedLab imports the data sets of torchvision, which cannot be imported beside a PyTorch without
# CUDA. None of them is used here.
UNUSED = {f"torchvision{end}": mock.MagicMock() for end in ("", ".datasets", ".transforms")}
with mock.patch.dict(sys.modules, UNUSED):
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler


class DrawnDataset:
    """Each client's mini-batches, drawn with replacement.

    A ``FedDataset`` in all but its class, whose methods read files.
    """

    def __init__(self, clients, local_steps):
        self._clients, self._local_steps = clients, local_steps

    def get_dataloader(self, id, batch_size=None):
        """Return [(x, y)]."""
        x, y = self._clients.x, self._clients.y
        [places] = self._clients.draw([id], self._local_steps, batch_size)
        return [(x[rows], y[rows]) for rows in places]


class Trainer(SGDSerialClientTrainer):
    """With the loss of the workloads, which is cross-entropy over the words of a sequence, too."""

    def setup_optim(self, epochs, batch_size, lr):
        """Set the loss."""
        super().setup_optim(epochs, batch_size, lr)
        self.criterion = torch_models.mean_loss


def run(system, job):
    """Rounds of its FedAvg, the plain mean of the clients' models."""
    workload = WORKLOADS[job["workload"]]
    torch_models.set_up(job)
    clients, model = Clients(job["data"]), torch_models.build_model(workload)
    model.to(memory_format=torch.contiguous_format)  # FedLab views all weights as one vector
    share = workload.cohort_size / workload.num_clients
    handler = SyncServerHandler(model, job["rounds"] * (job["samples"] + 1), share)
    handler.num_clients = workload.num_clients
    trainer = Trainer(model, workload.num_clients)
    trainer.setup_dataset(DrawnDataset(clients, workload.local_steps))
    trainer.setup_optim(1, workload.batch_size, workload.client_lr)

    def run_rounds():
        for _ in range(job["rounds"]):
            sampled = handler.sample_clients()
            trainer.local_process(handler.downlink_package, sampled)
            for package in trainer.uplink_package:
                handler.load(package)

    answer, about = timed(run_rounds, job), torch_models.about_device()
    about["versions"]["fedlab"] = importlib.metadata.version("fedlab")
    return {**answer, **about, "test_loss": clients.test_loss(handler.model)}
