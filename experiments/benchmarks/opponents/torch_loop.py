"""A plain PyTorch loop, written well: one client after the other, all threads for each.

Parameters are overwritten in place, gradients never accumulate, nothing is copied that need not
be, the mini-batches of a round are drawn at once, and images are in the layout for which PyTorch's
convolutions are fastest. ``torch_compiled`` is the same with model and loss under
``torch.compile``, whose code does not depend on the round.
"""

import time

import torch

from experiments.benchmarks import torch_models
from experiments.benchmarks.child import timed
from experiments.benchmarks.torch_models import Clients, mean_loss
from experiments.benchmarks.workloads import WORKLOADS


class Loop:
    """Local SGD of FedAvg's clients on one model, whose parameters are overwritten.

    Attributes:
      params: the model's parameters.
    """

    def __init__(self, model, clients, client_lr, compiled=False):
        self.params = list(model.parameters())
        self._clients, self._rate = clients, client_lr

        def loss(x, y):
            return mean_loss(model(x), y)

        self._loss = torch.compile(loss, dynamic=False) if compiled else loss

    def step(self, places):
        """One step of SGD on the examples at ``places``, [B]."""
        with torch.enable_grad():
            loss = self._loss(self._clients.x[places], self._clients.y[places])
            gradient = torch.autograd.grad(loss, self.params)
        torch._foreach_add_(self.params, gradient, alpha=-self._rate)

    def train(self, shared, total, places, weight):
        """Add ``weight`` times each local model to ``total``.

        Args:
          shared: the round's model.
          total: list of tensors, changed in place.
          places: of each client's mini-batches, [clients, K, B].
          weight: of a client.
        """
        for client in places:
            torch._foreach_copy_(self.params, shared)
            for minibatch in client:
                self.step(minibatch)
            torch._foreach_add_(total, self.params, alpha=weight)


def run_fedavg(model, clients, job, *, cohort_size, local_steps, batch_size, client_lr, compiled):
    """Time rounds of FedAvg and leave the last server model in ``model``; returns the answer."""
    loop = Loop(model, clients, client_lr, compiled)
    shared = [p.detach().clone() for p in loop.params]
    sizes = local_steps, batch_size

    @torch.no_grad()
    def run_rounds():
        for _ in range(job["rounds"]):
            total = [torch.zeros_like(p) for p in shared]
            places = clients.draw(clients.cohort(cohort_size), *sizes)
            loop.train(shared, total, places, 1 / cohort_size)
            torch._foreach_copy_(shared, total)
        torch_models.wait()

    compile_seconds = None
    if compiled:
        before = time.perf_counter()
        with torch.no_grad():
            loop.step(clients.draw(clients.cohort(1), 1, batch_size)[0, 0])
        torch_models.wait()
        compile_seconds = time.perf_counter() - before
        with torch.no_grad():
            torch._foreach_copy_(loop.params, shared)
    answer = timed(run_rounds, job)
    with torch.no_grad():
        torch._foreach_copy_(loop.params, shared)
    return {**answer, **torch_models.about_device(), "compile_seconds": compile_seconds}


def run(system, job):
    """Rounds of FedAvg."""
    torch_models.set_up(job)
    workload = WORKLOADS[job["workload"]]
    clients, model = Clients(job["data"]), torch_models.build_model(workload)
    answer = run_fedavg(
        *(model, clients, job),
        cohort_size=workload.cohort_size,
        local_steps=workload.local_steps,
        batch_size=workload.batch_size,
        client_lr=workload.client_lr,
        compiled=system == "torch_compiled",
    )
    return {**answer, "test_loss": clients.test_loss(model)}
