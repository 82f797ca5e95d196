"""A plain PyTorch loop, written well: one client after the other, all threads for each.

Parameters are overwritten in place, gradients never accumulate, nothing is copied that need not
be, and images are in the layout for which PyTorch's convolutions are fastest.
"""

import torch

from experiments.benchmarks import torch_models
from experiments.benchmarks.child import samples
from experiments.benchmarks.torch_models import Clients, mean_loss
from experiments.benchmarks.workloads import WORKLOADS

PROX_WEIGHT = PERTURBATION_RADIUS = 0.1  # FedSpeed's, the defaults of fedjax_lab


def run(system, job):
    """Rounds of FedAvg or FedSpeed."""
    torch_models.set_up()
    workload = WORKLOADS[job["workload"]]
    clients = Clients(job["data"])
    model = torch_models.build_model(workload)
    params = list(model.parameters())
    shared = [p.detach().clone() for p in params]
    shape = workload.local_steps, workload.batch_size
    speed = workload.algorithm == "fedspeed"
    duals = [[torch.zeros_like(p) for p in shared] for _ in clients.rows] if speed else None

    def gradient(rows):
        with torch.enable_grad():
            loss = mean_loss(model(clients.x[rows]), clients.y[rows])
            return torch.autograd.grad(loss, params)

    def sgd_step(rows):
        torch._foreach_add_(params, gradient(rows), alpha=-workload.client_lr)

    def fedspeed_step(rows, dual):
        ascent = list(gradient(rows))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(ascent)))
        torch._foreach_mul_(ascent, PERTURBATION_RADIUS / norm)
        torch._foreach_add_(params, ascent)
        direction = list(gradient(rows))
        torch._foreach_sub_(params, ascent)
        torch._foreach_add_(direction, params, alpha=PROX_WEIGHT)
        torch._foreach_sub_(direction, shared, alpha=PROX_WEIGHT)
        torch._foreach_sub_(direction, dual)
        torch._foreach_add_(params, direction, alpha=-workload.client_lr)

    def fedspeed_message(dual):
        """Update the dual; the local model becomes what the client sends."""
        torch._foreach_add_(dual, shared, alpha=PROX_WEIGHT)
        torch._foreach_sub_(dual, params, alpha=PROX_WEIGHT)
        torch._foreach_sub_(params, dual, alpha=1 / PROX_WEIGHT)

    def one_round():
        total = [torch.zeros_like(p) for p in shared]
        for client in clients.cohort(workload.cohort_size):
            torch._foreach_copy_(params, shared)
            for rows in clients.draw(client, *shape):
                fedspeed_step(rows, duals[client]) if speed else sgd_step(rows)
            if speed:
                fedspeed_message(duals[client])
            torch._foreach_add_(total, params, alpha=1 / workload.cohort_size)
        torch._foreach_copy_(shared, total)

    @torch.no_grad()
    def run_rounds():
        for _ in range(job["rounds"]):
            one_round()
        if job["evaluate"]:
            torch._foreach_copy_(params, shared)
            clients.evaluate(model)
        torch_models.wait()

    return {"milliseconds": samples(run_rounds, job), **torch_models.about_device()}
