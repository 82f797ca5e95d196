"""Flower: a ClientApp, a ServerApp and its FedAvg, in its simulation engine on Ray.

There is one actor for each core, with one thread. An actor keeps data and model from one client to
the next, which Flower's examples load again. Messages are polled, which gives the times of rounds
a granularity of about 0.1 s. The start of Ray and of its actors is in ``first_row_seconds`` alone.
Flower's command ``flwr run`` starts the same engine; ``run_simulation``, which starts it in this
process, is deprecated. Memory is that of this process and of the actors, without Ray's own.
"""

import functools
import importlib.metadata
import json
import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from experiments.benchmarks import torch_models
from experiments.benchmarks.child import max_resident_bytes, timed
from experiments.benchmarks.opponents.torch_loop import Loop
from experiments.benchmarks.torch_models import Clients
from experiments.benchmarks.workloads import WORKLOADS

client_app = ClientApp()


@functools.cache
def prepare(told):
    """(workload, clients, model, loop) of a process."""
    job = json.loads(told)
    torch_models.set_up(job, threads=1)
    workload = WORKLOADS[job["workload"]]
    clients, model = Clients(job["data"]), torch_models.build_model(workload)
    return workload, clients, model, Loop(model, clients, workload.client_lr)


@client_app.train()
def train(message, context):
    """K local steps of one client."""
    workload, clients, model, loop = prepare(message.content["config"]["job"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = [context.node_config["partition-id"]]
    with torch.no_grad():
        for places in clients.draw(client, workload.local_steps, workload.batch_size)[0]:
            loop.step(places)
    metrics = MetricRecord({"num-examples": 1, "peak_bytes": max_resident_bytes()})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def run(system, job):
    """Rounds of its FedAvg with uniform weights."""
    workload, count = WORKLOADS[job["workload"]], os.cpu_count() or 1
    clients, model = Clients(job["data"]), torch_models.build_model(workload)
    answer, server_app = {}, ServerApp()

    @server_app.main()
    def main(grid, context):
        arrays = ArrayRecord(model.state_dict())
        strategy = FedAvg(
            fraction_train=workload.cohort_size / workload.num_clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.cohort_size,
            min_available_nodes=workload.num_clients,
        )
        config = ConfigRecord({"job": json.dumps(job)})

        def run_rounds():
            nonlocal arrays
            result = strategy.start(grid, arrays, job["rounds"], train_config=config)
            arrays = result.arrays
            answer["peak_bytes"] = result.train_metrics_clientapp[job["rounds"]]["peak_bytes"]

        answer.update(timed(run_rounds, job))
        model.load_state_dict(arrays.to_torch_state_dict())

    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.num_clients,
        backend_config={
            "init_args": {"num_cpus": count, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
        },
    )
    about = torch_models.about_device()
    versions = {name: importlib.metadata.version(name) for name in ("flwr", "ray")}
    return {
        **about,
        **answer,
        "peak_bytes": about["peak_bytes"] + int(count * answer["peak_bytes"]),
        "threads": count,
        "versions": {**about["versions"], **versions},
        "test_loss": clients.test_loss(model),
    }
