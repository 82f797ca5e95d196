"""PyTorch with ``torch.func.vmap`` over the cohort's clients.

The mini-batches of all clients are drawn at once. ``torch_vmap_compiled`` is the same under
``torch.compile``, on a GPU with ``mode="reduce-overhead"``, which records CUDA graphs; the clients'
models keep their place in memory, so that no graph copies them.
"""

import time

import torch
from torch.func import functional_call, grad, vmap

from experiments.benchmarks import torch_models
from experiments.benchmarks.child import timed
from experiments.benchmarks.torch_models import Clients, mean_loss
from experiments.benchmarks.workloads import WORKLOADS


def run(system, job):
    """Rounds of FedAvg, all clients of a cohort at once."""
    workload, is_compiled = WORKLOADS[job["workload"]], system == "torch_vmap_compiled"
    torch_models.set_up(job)
    if workload.is_text:  # the fused kernels have no rule for vmap, what they are made of has
        torch.backends.mkldnn.enabled = torch.backends.cudnn.enabled = False
    clients = Clients(job["data"])
    model = torch_models.build_model(workload)
    shared = {name: p.detach().clone() for name, p in model.named_parameters()}
    size, shape = workload.cohort_size, (workload.local_steps, workload.batch_size)
    local = {name: torch.empty(size, *p.shape, device=p.device) for name, p in shared.items()}

    def loss(params, x, y):
        return mean_loss(functional_call(model, params, (x,)), y)

    gradients = vmap(grad(loss), randomness="different")
    if is_compiled:
        for p in local.values():
            torch._dynamo.mark_static_address(p)
        mode = "reduce-overhead" if torch_models.DEVICE.type == "cuda" else None
        gradients = torch.compile(gradients, mode=mode, dynamic=False)

    def step(places):  # [S, B]
        found = gradients(local, clients.x[places], clients.y[places])
        rate = -workload.client_lr
        torch._foreach_add_([*local.values()], [found[name] for name in local], alpha=rate)

    @torch.no_grad()
    def run_rounds():
        for _ in range(job["rounds"]):
            for name, p in local.items():
                p.copy_(shared[name].expand_as(p))
            for places in clients.draw(clients.cohort(size), *shape).unbind(1):
                step(places)
            for name, p in local.items():
                torch.mean(p, 0, out=shared[name])
        torch_models.wait()

    compile_seconds = None
    if is_compiled:
        before = time.perf_counter()
        with torch.no_grad():
            for p in local.values():
                p.zero_()
            for places in clients.draw(clients.cohort(size), 3, shape[1]).unbind(1):
                step(places)  # CUDA graphs are recorded in the second call
        torch_models.wait()
        compile_seconds = time.perf_counter() - before
    answer = timed(run_rounds, job)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(shared[name])
    about = {**torch_models.about_device(), "compile_seconds": compile_seconds}
    return {**answer, **about, "test_loss": clients.test_loss(model)}
