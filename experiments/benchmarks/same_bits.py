"""Whether a run gives the same bits wherever client rows stand and in however many processes.

Seven methods with state of every kind run with each store of client rows on eight devices, which
one, two and four processes share. The hash is over the params, the state, the rows of all clients
and the history. Then one device and eight run a smooth model, with tanh in place of ReLU: another
last bit may take an input of a ReLU over its kink. The exit status is 1 if two hashes of a method
differ, or if eight devices and one differ by more than rounding. That is not asked of top-k, which
takes one of two values that are equal to rounding.

    python -m experiments.benchmarks.same_bits [--methods fedavg scaffold] [--rounds 50]

With ``--folder``, what each run ends with is kept there, and a run that is there is not made again:
an interrupted benchmark goes on. It is for the same code and the same options alone.
"""

import argparse
import hashlib
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from experiments.benchmarks.compare import ROOT

DEVICES = 8
PROCESSES = (1, 2, 4)
STORES = ("device", "sharded", "host")
CLIENTS = 24
# Methods whose state is of every kind -> their arguments besides the loss.
METHODS = {
    "fedavg": {"client_lr": 0.1},
    "scaffold": {"client_lr": 0.1},
    "gradma": {"client_lr": 0.1, "memory_size": 20},
    "fedmoswa": {"client_lr": 0.1},
    "fedspeed": {"client_lr": 0.1, "server_dual": "all"},
    "fafed": {"client_lr": 0.01, "momentum": 0.9, "second_moment_decay": 0.9},
    "cfedavg": {"client_lr": 0.1, "compressor": "top_k:0.9"},
}
_TOLERANCE = 1e-5  # of a leaf's norm, after all rounds
# A change of one bit in the first params moves the rows of GradMA's memory by 1.5e-5.
_TOLERANCES = {"gradma": 2e-5}
_JUMPS = {"cfedavg"}


def smooth_mlp():
    """The MLP with tanh."""
    import flax.linen as nn

    from fedjax_lab.models.base import from_linen

    class Smooth(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            hidden = nn.tanh(nn.Dense(80)(x.reshape(len(x), -1)))
            return nn.Dense(10)(hidden)

    return from_linen(Smooth())


def run_all(given):
    """All runs of one layout, in this process; process 0 prints a line of JSON for each run."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", given.devices // given.processes)
    if given.processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{given.port}", given.processes, given.process)
    from fedjax_lab import algorithms, data, models, simulate
    from fedjax_lab.simulation.evaluate import build_evaluation
    from fedjax_lab.simulation.host_store import all_rows
    from fedjax_lab.simulation.processes import Processes

    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.3", num_clients=CLIENTS, seed=0)
    model = smooth_mlp() if given.smooth else models.build("mlp", num_classes=10, hidden=(80,))
    prepare = data.preprocess(scale=16)
    params = model.init(jax.random.key(0), prepare(train, None).x[:1])
    evaluate = build_evaluation(models.accuracy_counts(model.apply, prepare), test)
    loss_fn = models.classification_loss(model.apply, prepare)
    for cell in given.cells:
        name, store = cell.split(":")
        result = simulate(
            getattr(algorithms, name)(loss_fn, **METHODS[name]),
            params,
            clients,
            rounds=given.rounds,
            cohort_size=10,
            local_steps=4,
            batch_size=16,
            evaluate=evaluate,
            eval_every=10,
            client_map="shard_map" if given.devices > 1 else "scan",
            client_store=store,
        )
        assert result.stopped is None, "a run was interrupted"
        state = result.state
        if hasattr(state.clients, "read"):
            state = state._replace(clients=all_rows(state.clients))
        else:
            state = Processes.here().collected(state)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((result.params, state))]
        digest = hashlib.sha256(json.dumps(result.history).encode())
        for leaf in leaves:
            digest.update(leaf.tobytes())
        if jax.process_index() == 0:
            file = file_of(given, given.devices, given.processes, name, store, given.smooth)
            keep(file, digest, leaves)


def file_of(given, devices, processes, name, store, smooth):
    """Where a run's hash and values are kept."""
    parts = [name, store, given.rounds, devices, processes, *(["smooth"] if smooth else [])]
    return Path(given.folder) / f"{'-'.join(map(str, parts))}.npz"


def keep(file, digest, leaves):
    """Write a run's hash and values; the file is there whole or not at all."""
    part = file.with_suffix(".part")
    with part.open("wb") as opened:
        np.savez(opened, *leaves, digest=digest.hexdigest()[:12])
    part.rename(file)


def layout(given, devices, processes, stores, smooth=False):
    """{(method, store): (hash, file)} of so many devices divided among so many processes."""
    every = [(name, store) for name in given.methods for store in stores]
    files = {cell: file_of(given, devices, processes, *cell, smooth) for cell in every}
    cells = [":".join(cell) for cell, file in files.items() if not file.exists()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "experiments.benchmarks.same_bits", "--devices", devices]
    command += ["--processes", processes, "--port", port, "--folder", given.folder]
    command += ["--rounds", given.rounds, *(["--smooth"] if smooth else []), "--cells", *cells]
    children = [
        subprocess.Popen(
            [str(part) for part in (*command, "--process", process)],
            cwd=ROOT,
            stderr=None if given.verbose else subprocess.DEVNULL,
        )
        for process in range(processes if cells else 0)
    ]
    if any([child.wait() for child in children]):
        raise SystemExit(f"{processes} processes with {devices} devices failed; see --verbose.")
    found = {}
    for cell, file in files.items():
        with np.load(file) as kept:
            found[cell] = str(kept["digest"]), file
    return found


def largest_difference(file, other):
    """Of all leaves, the largest difference as a share of the leaf, both by their norms."""
    with np.load(file) as one, np.load(other) as two:
        return max(
            float(np.linalg.norm(one[name] - two[name]) / max(np.linalg.norm(two[name]), 1e-9))
            for name in one.files
            if one[name].size and one[name].dtype.kind == "f"
        )


def main(arguments=None):
    """Print one Markdown table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--stores", nargs="+", default=list(STORES))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--verbose", action="store_true", help="what the processes say")
    parser.add_argument("--devices", type=int, help="of a process that was started by this one")
    parser.add_argument("--folder", help="where runs are kept; none: nowhere")
    parser.add_argument("--smooth", action="store_true", help=argparse.SUPPRESS)
    for name in ("processes", "process", "port"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--cells", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.devices:
        run_all(given)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        given.folder = given.folder or temporary
        Path(given.folder).mkdir(parents=True, exist_ok=True)
        found = {count: layout(given, DEVICES, count, given.stores) for count in PROCESSES}
        smooth = [layout(given, count, 1, ["device"], smooth=True) for count in (DEVICES, 1)]
        print(f"| method | rows | {' | '.join(f'{n} x {DEVICES // n}' for n in PROCESSES)} | one |")
        print("|---|---|" + "---|" * (len(PROCESSES) + 1))
        failed = False
        for name in given.methods:
            reference = found[1][name, given.stores[0]][0]
            off = largest_difference(*(files[name, "device"][1] for files in smooth))
            failed |= off > _TOLERANCES.get(name, _TOLERANCE) and name not in _JUMPS
            for store in given.stores:
                hashes = [found[count][name, store][0] for count in PROCESSES]
                failed |= any(digest != reference for digest in hashes)
                print(f"| {name} | {store} | {' | '.join(hashes)} | {off:.1e} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
