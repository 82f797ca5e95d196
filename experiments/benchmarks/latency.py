"""Processor seconds from the start of a process to the first round's row, and where they go.

README's quick start (an MLP on digits, 20 clients, cohort 5, 5 steps of 16), or with ``--workload
W1s`` the LeNet of ``workloads``, each method in a process of its own: cold, without any compiled
program, and once more with the programs that the first process kept. Processor seconds are those of
all threads, on which other processes weigh little. Beside them a PyTorch loop of FedAvg, if there
is PyTorch.

    python -m experiments.benchmarks.latency [--methods M ... | all] [--workload W1s]
        [--parts]

``--parts`` adds what the compiler makes of each part, as XLA's instructions and fusions: of drawing
a batch, of the round, of the same round written by hand (``by_hand``), and of a chunk of rounds.
This file imports neither jax nor torch before it is asked to measure one of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.benchmarks.compare import interpreter
from experiments.benchmarks.plain_methods import plain_method
from experiments.benchmarks.workloads import WORKLOADS

METHODS = {
    "fedavg": {},
    "scaffold": {},
    "gradma": {"memory_size": 20},
    "fafed": {"momentum": 0.1, "second_moment_decay": 0.9},
    "fedspeed": {},
    "cfedavg": {"compressor": "top_k:0.99"},
}
STAGES = ("import", "data", "model", "simulate")
RATE, ROUNDS = 0.1, 10
CLIENTS = {"quick_start": 20, "W1s": 100}
PLANS = {
    "quick_start": {"cohort_size": 5, "local_steps": 5, "batch_size": 16},
    "W1s": {"cohort_size": 10, "local_steps": 5, "batch_size": 64},
}
_DIGITS = Path(__file__).parents[2] / "fedjax_lab" / "data" / "digits.npz"


class Clock:
    """Processor seconds of this process, stage by stage, from its start."""

    def __init__(self):
        self.seconds = {}
        self._before = 0.0

    def stop(self, stage):
        """The stage is over."""
        now = time.process_time()
        self.seconds[stage] = now - self._before
        self._before = now


def start(method, workload):
    """(algorithm, params, clients) of a user's first lines, and the clock."""
    clock = Clock()
    import jax

    from fedjax_lab import data, models

    clock.stop("import")
    if workload == "quick_start":
        train, scheme, scale, name = data.load("digits")[0], "dirichlet:0.1", 16, ("mlp", {})
    else:
        chosen = WORKLOADS[workload]
        train = data.synthetic.noise_images(chosen.num_examples, chosen.input_shape, seed=0)
        scheme, scale, name = chosen.partition, 255, chosen.model
    clients = data.partition(train, scheme, num_clients=CLIENTS[workload], seed=0)
    clock.stop("data")
    preprocess = data.preprocess(scale=scale)
    model = models.build(name[0], num_classes=10, **name[1])
    loss_fn = models.classification_loss(model.apply, preprocess)
    params = jax.block_until_ready(model.init(jax.random.key(0), train.x[:1]))
    clock.stop("model")
    algorithm = plain_method(method, loss_fn, model, preprocess, RATE, **METHODS.get(method, {}))
    return algorithm, params, clients, clock


def first_row(method, workload="quick_start"):
    """Processor seconds of each stage up to the first row of ``simulate``."""
    algorithm, params, clients, clock = start(method, workload)
    import fedjax_lab

    plan = {"rounds": ROUNDS, "eval_every": ROUNDS, **PLANS[workload]}
    fedjax_lab.simulate(algorithm, params, clients, **plan)
    clock.stop("simulate")
    return clock.seconds


def parts(method, workload):
    """{part: (seconds of lowering, of compilation, instructions, fusions)}."""
    algorithm, params, clients, _ = start(method, workload)
    import jax
    import jax.numpy as jnp

    from experiments.benchmarks import by_hand
    from fedjax_lab.clients.mapping import parse_client_map
    from fedjax_lab.data.cohort import Schedule
    from fedjax_lab.simulation.computation import Computation
    from fedjax_lab.simulation.placement import Placement
    from fedjax_lab.simulation.rounds import build_chunk

    schedule, key, first = Schedule(**PLANS[workload]), jax.random.key(0), jnp.int32(0)
    jax.jit(lambda x: x + 1)(first)  # what the first program of a process costs
    run = Computation(algorithm, schedule)
    batch = jax.eval_shape(schedule.draw, clients, key, first)
    state = jax.eval_shape(run.start, params, clients, key, ())
    chunk = build_chunk(run, Placement(parse_client_map("scan")))
    found = {"draw": _compiled(jax.jit(schedule.draw).lower, clients, key, first)}
    found["round"] = _compiled(jax.jit(algorithm.round_fn).lower, state, batch)
    if hand := getattr(by_hand, method, None):
        options = {"client_lr": RATE, **METHODS[method]}
        begin, round = hand(algorithm.loss_fn, CLIENTS[workload], **options)
        state_by_hand = jax.eval_shape(begin, params)
        found["round by hand"] = _compiled(jax.jit(round).lower, state_by_hand, batch)
    found["chunk"] = _compiled(chunk.lower, state, clients, key, first, length=ROUNDS)
    return found


def _compiled(lower, *arguments, **options):
    clock = Clock()
    clock.stop("before")
    lowered = lower(*arguments, **options)
    clock.stop("lower")
    program = lowered.compile()
    clock.stop("compile")
    text = program.as_text()
    sizes = text.count(" = "), text.count(" fusion(")
    return clock.seconds["lower"], clock.seconds["compile"], *sizes


def torch_loop(_, workload):
    """The same stages of a PyTorch loop of FedAvg, iid clients of equal size."""
    clock = Clock()
    import numpy as np
    import torch

    clock.stop("import")
    plan = PLANS[workload]
    if workload == "quick_start":
        with np.load(_DIGITS) as file:
            images = torch.from_numpy(file["x_train"].reshape(-1, 64) / np.float32(16))
            labels = torch.from_numpy(file["y_train"].astype(np.int64))
    else:
        count = WORKLOADS[workload].num_examples
        images = torch.rand(count, *WORKLOADS[workload].input_shape)
        labels = torch.randint(10, (count,))
    owned = torch.randperm(len(images)).tensor_split(CLIENTS[workload])
    clock.stop("data")
    if workload == "quick_start":
        layers = [torch.nn.Linear(64, 200), torch.nn.Linear(200, 100), torch.nn.Linear(100, 10)]
        relu = torch.nn.ReLU()
        model = torch.nn.Sequential(layers[0], relu, layers[1], relu, layers[2])
    else:
        from experiments.benchmarks import torch_models

        model = torch_models.build_model(WORKLOADS[workload])
    params = list(model.parameters())
    shared = [param.detach().clone() for param in params]
    clock.stop("model")
    for _ in range(ROUNDS):
        total = [torch.zeros_like(param) for param in shared]
        for client in torch.randperm(len(owned))[: plan["cohort_size"]].tolist():
            with torch.no_grad():
                torch._foreach_copy_(params, shared)
            for _ in range(plan["local_steps"]):
                rows = owned[client][torch.randint(len(owned[client]), (plan["batch_size"],))]
                loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
                with torch.no_grad():
                    torch._foreach_sub_(params, torch.autograd.grad(loss, params), alpha=RATE)
            torch._foreach_add_(total, [param.detach() for param in params])
        shared = [value / plan["cohort_size"] for value in total]
    clock.stop("simulate")
    return clock.seconds


MEASURES = {"first_row": first_row, "parts": parts, "torch": torch_loop}


def in_a_process(python, measure, method, programs, workload="quick_start"):
    """What a measure says in a process of its own; None if it fails, whose error is shown."""
    environment = {**os.environ, "FEDJAX_LAB_PROGRAMS": programs}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [python, "-m", "experiments.benchmarks.latency", "--measure", measure, method]
    command += ["--workload", workload]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def row(name, seconds):
    """A row of the first table."""
    if seconds is None:
        return f"| {name} | " + " | ".join(["failed"] * (len(STAGES) + 1)) + " |"
    numbers = [*(seconds[stage] for stage in STAGES), sum(seconds.values())]
    return f"| {name} | " + " | ".join(f"{number:.1f}" for number in numbers) + " |"


def main(arguments=None):
    """Print one or two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="names, or: all")
    parser.add_argument("--workload", choices=list(PLANS), default="quick_start")
    parser.add_argument("--parts", action="store_true", help="what compilers make of each part")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        measure, method = given.measure
        print(json.dumps(MEASURES[measure](method, given.workload)))
        return
    if given.methods == ["all"]:
        from fedjax_lab.algorithms import ALGORITHMS

        given.methods = list(ALGORITHMS)
    torch_python = interpreter("torch")
    print("| processor seconds | import | data | model | to the first row | together |")
    print("|---|---:|---:|---:|---:|---:|")
    for method in given.methods:
        with tempfile.TemporaryDirectory() as folder:
            for name in (f"{method}, cold", f"{method}, programs kept"):
                found = in_a_process(sys.executable, "first_row", method, folder, given.workload)
                print(row(name, found), flush=True)
    search = [torch_python, "-c", "import torch"]
    if subprocess.run(search, capture_output=True).returncode == 0:
        found = in_a_process(torch_python, "torch", "fedavg", "off", given.workload)
        print(row("PyTorch, FedAvg", found))
    if given.parts:
        print_parts(given.methods, given.workload)


def print_parts(methods, workload):
    """Print the parts of some methods as a Markdown table."""
    print("\n| part | lowering s | compilation s | instructions | fusions |")
    print("|---|---:|---:|---:|---:|")
    for method in methods:
        found = in_a_process(sys.executable, "parts", method, "off", workload) or {}
        for part, (lowering, compilation, instructions, fusions) in found.items():
            times = f"{lowering:.2f} | {compilation:.2f}"
            print(f"| {method}, {part} | {times} | {instructions} | {fusions} |", flush=True)


if __name__ == "__main__":
    main()
