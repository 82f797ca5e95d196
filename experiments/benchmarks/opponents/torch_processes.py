"""The PyTorch loop as one process for each core, each with one thread and its share of a cohort.

The round's model, and the sum of each process's local models, are in shared memory. Two barriers
make a round: all have the model, all have trained.
"""

import os

import torch
from torch import multiprocessing

from experiments.benchmarks import torch_models
from experiments.benchmarks.child import Unsupported, max_resident_bytes, timed
from experiments.benchmarks.opponents.torch_loop import Loop
from experiments.benchmarks.torch_models import Clients
from experiments.benchmarks.workloads import WORKLOADS


def work(job, shared, total, cohort, is_over, peak, barrier):
    """Train the clients ``cohort`` [its share] round after round, until it is over."""
    torch_models.set_up(job, threads=1)
    workload = WORKLOADS[job["workload"]]
    clients, model = Clients(job["data"]), torch_models.build_model(workload)
    loop = Loop(model, clients, workload.client_lr)
    while True:
        barrier.wait()
        if is_over:
            return
        with torch.no_grad():
            torch._foreach_zero_(total)
            places = clients.draw(cohort, workload.local_steps, workload.batch_size)
            loop.train(shared, total, places, 1 / workload.cohort_size)
        peak.fill_(max_resident_bytes())
        barrier.wait()


def run(system, job):
    """Rounds of FedAvg."""
    if torch_models.DEVICE.type != "cpu":
        raise Unsupported("one GPU has no cores to divide")
    workload = WORKLOADS[job["workload"]]
    count = min(os.cpu_count() or 1, workload.cohort_size)
    torch_models.set_up(job)
    clients, model = Clients(job["data"]), torch_models.build_model(workload)
    params = list(model.parameters())
    shared = [p.detach().clone().share_memory_() for p in params]
    totals = [[torch.zeros_like(p).share_memory_() for p in shared] for _ in range(count)]
    cohort = torch.arange(workload.cohort_size).share_memory_()
    peaks = torch.zeros(count, dtype=torch.long).share_memory_()
    is_over = torch.zeros((), dtype=torch.bool).share_memory_()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count + 1, timeout=600)
    workers = []
    for total, share, peak in zip(totals, cohort.tensor_split(count), peaks, strict=True):
        arguments = job, shared, total, share, is_over, peak, barrier
        workers.append(context.Process(target=work, args=arguments, daemon=True))
        workers[-1].start()

    @torch.no_grad()
    def run_rounds():
        for _ in range(job["rounds"]):
            cohort.copy_(clients.cohort(workload.cohort_size))
            barrier.wait()
            barrier.wait()
            torch._foreach_copy_(shared, totals[0])
            for total in totals[1:]:
                torch._foreach_add_(shared, total)

    answer = timed(run_rounds, job)
    is_over.fill_(True)
    barrier.wait()
    for worker in workers:
        worker.join()
    with torch.no_grad():
        torch._foreach_copy_(params, shared)
    about = torch_models.about_device()
    about["peak_bytes"] += int(peaks.sum())
    about["threads"] = count
    return {**answer, **about, "test_loss": clients.test_loss(model)}
