"""PyTorch with ``torch.func.vmap`` over the cohort's clients."""

import torch
from torch.func import functional_call, grad, vmap

from experiments.benchmarks import torch_models
from experiments.benchmarks.child import Unsupported, samples
from experiments.benchmarks.torch_models import Clients, mean_loss
from experiments.benchmarks.workloads import WORKLOADS


def run(system, job):
    """Rounds of FedAvg, all clients of a cohort at once."""
    workload = WORKLOADS[job["workload"]]
    if workload.algorithm != "fedavg":
        raise Unsupported(f"{workload.algorithm} is not written for it")
    torch_models.set_up()
    if workload.is_text:  # the fused kernels have no rule for vmap, what they are made of has
        torch.backends.mkldnn.enabled = torch.backends.cudnn.enabled = False
    clients = Clients(job["data"])
    model = torch_models.build_model(workload)
    shared = {name: p.detach().clone() for name, p in model.named_parameters()}
    size, shape = workload.cohort_size, (workload.local_steps, workload.batch_size)

    def loss(params, x, y):
        return mean_loss(functional_call(model, params, (x,)), y)

    gradients = vmap(grad(loss), randomness="different")

    def one_round():
        params = {
            name: p.expand(size, *p.shape).clone(memory_format=torch.contiguous_format)
            for name, p in shared.items()
        }
        rows = torch.stack([clients.draw(client, *shape) for client in clients.cohort(size)], 1)
        for step in rows:  # [S, B]
            found = gradients(params, clients.x[step], clients.y[step])
            for name, p in params.items():
                p.sub_(found[name], alpha=workload.client_lr)
        for name, p in params.items():
            shared[name] = p.mean(0)

    @torch.no_grad()
    def run_rounds():
        for _ in range(job["rounds"]):
            one_round()
        if job["evaluate"]:
            for name, p in model.named_parameters():
                p.copy_(shared[name])
            clients.evaluate(model)
        torch_models.wait()

    return {"milliseconds": samples(run_rounds, job), **torch_models.about_device()}
