"""One of several processes of ``jax.distributed``: it runs jobs, and says what came of them.

    python -m tests.simulation.in_processes PROCESSES PROCESS PORT DEVICES < JOBS

The jobs are a JSON list; of each, what ``do`` returns is printed as a line of JSON. DEVICES is
how many each process has.
"""

import dataclasses
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings

import jax
import numpy as np

from tests.kept_programs import use_programs


def start(processes, process, port, devices):
    use_programs(os.environ["FEDJAX_LAB_TEST_CACHE"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)


def digest(result):
    """A hash of all that a run returns but its times."""
    from fedjax_lab.simulation.host_store import all_rows
    from fedjax_lab.simulation.processes import Processes

    state = result.state
    if hasattr(state.clients, "read"):
        state = state._replace(clients=all_rows(state.clients))
    else:
        state = Processes.here().collected(state)
    found = hashlib.sha256(json.dumps(result.history).encode())
    for leaf in jax.tree.leaves((result.params, state)):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def evaluate(params):
    return {"size": sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(params))}


def shared_evaluation():
    """An evaluation of which each device has a part."""
    from fedjax_lab.simulation.evaluate import build_evaluation
    from tests.simulation import test_stores

    def counts(params, examples):
        losses = test_stores.loss_fn(params, examples, None)
        return (losses < 1).astype(losses.dtype), losses

    return build_evaluation(counts, test_stores.make_clients(), batch_size=16)


def errors(params, examples):
    from tests.simulation import test_stores

    losses = test_stores.loss_fn(params, examples, None)
    return losses, losses


errors.score = "error"


def own_biases():
    """A method whose clients have a bias of their own, and the state of a run with sharded rows."""
    from fedjax_lab import simulate, with_personal
    from tests.simulation import test_stores

    method = with_personal(test_stores.METHODS["fedavg"], lambda path: path == "b")
    where = {"client_map": "shard_map", "client_store": "sharded"}
    given = test_stores.PARAMS, test_stores.make_clients()
    return method, simulate(method, *given, **test_stores.SETTINGS, **where).state


def score(job):
    """Score clients outside of a run.

    "moved": the initial model, with numbers by process that are added to the targets. Without it,
    the models of ``own_biases``.
    """
    from fedjax_lab.simulation.evaluate import build_client_evaluation
    from fedjax_lab.simulation.evaluate_personal import build_personal_evaluation, client_models
    from tests.simulation import test_stores

    clients = test_stores.make_clients()
    if "moved" in job:
        moved = job["moved"].get(str(jax.process_index()), 0)
        examples = clients.examples._replace(y=clients.examples.y + moved)
        clients, of = dataclasses.replace(clients, examples=examples), test_stores.PARAMS
        evaluate = build_client_evaluation(errors, clients)
    else:
        method, of = own_biases()
        evaluate = build_personal_evaluation(errors, client_models(method), clients)
    try:
        return {"scores": np.asarray(evaluate(of)).tolist()}
    except ValueError as error:
        return {"error": str(error)}


def compile_late(seconds):
    compiled = jax.stages.Lowered.compile

    def late(*arguments, **named):
        time.sleep(seconds)
        return compiled(*arguments, **named)

    jax.stages.Lowered.compile = late


def do(job):
    """Run a job: a method of ``test_stores`` with settings.

    The job may also have "differs", settings by process; "stop_at", a process that wishes to stop
    and the round after which; "signal_at", a process that gets SIGTERM and the round after which;
    "late", a process and the seconds longer that it compiles, and "shares", whether the evaluation
    is one that all processes share; "scores", to do what ``score`` says instead; "stream", a folder
    from which the clients' examples come; and "block", the bytes of a table that travel at once.
    """
    from fedjax_lab.simulation import processes
    from tests.simulation import test_stores, test_streams

    if job.get("scores"):
        return score(job)
    processes._BLOCK = job.get("block", processes._BLOCK)
    settings = dict(job.get("settings", {}))
    settings |= job.get("differs", {}).get(str(jax.process_index()), {})
    if "stop_at" in job:
        process, round = job["stop_at"]
        settings["stop_when"] = lambda row: jax.process_index() == process and row["round"] >= round
    if job.get("signal_at", [None])[0] == jax.process_index():
        settings["stop_when"] = lambda row: (
            row["round"] == job["signal_at"][1] and os.kill(os.getpid(), signal.SIGTERM)
        )
    if job.get("late", [None])[0] == jax.process_index():
        compile_late(job["late"][1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            scores = shared_evaluation() if job.get("shares") else evaluate
            if "stream" in job:
                clients = test_streams.streamed(job["stream"], test_streams.TIGHT)
                result = test_streams.run(job["method"], clients, evaluate=scores, **settings)
            else:
                result = test_stores.run(job["method"], evaluate=scores, **settings)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {
        "hash": digest(result),
        "rounds": result.history[-1]["round"],
        "stopped": result.stopped,
        "signal": result.signal,
        "warnings": [str(warning.message) for warning in told],
    }


def launch(processes, devices, *arguments, module="tests.simulation.in_processes", **options):
    """Start processes that find each other; returns them.

    With ``module`` "fedjax_lab", the arguments are those of the command line.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def command(process):
        if module == "tests.simulation.in_processes":
            return [processes, process, port, devices]
        joined = ["--distributed", "--coordinator", f"127.0.0.1:{port}"]
        joined += ["--num-processes", processes, "--process-id", process]
        return [*arguments, "--cpu-devices", devices, *(joined if processes > 1 else [])]

    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, command(process))],
            **{"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, **options},
        )
        for process in range(processes)
    ]


def answers(processes, devices, jobs, timeout=900):
    """[job][process] -> what each said of each job."""
    children = launch(processes, devices)
    for child in children:
        child.stdin.write(json.dumps(jobs))
        child.stdin.close()
        child.stdin = None
    said = []
    for child in children:
        out, errors = child.communicate(timeout=timeout)
        assert child.returncode == 0, errors[-3000:]
        said.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
    return [list(of_job) for of_job in zip(*said, strict=True)]


if __name__ == "__main__":
    start(*map(int, sys.argv[1:]))
    for job in json.load(sys.stdin):
        print(json.dumps(do(job)), flush=True)
