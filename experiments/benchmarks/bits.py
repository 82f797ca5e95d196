"""The bits that every method ends with, to prove that a restructuring changes none.

Each method of the catalogue runs for three rounds on digits with each store of client rows, from a
stream of examples and in a sweep; seven of them also in two processes, by ``same_bits``. Of each
run the file has a hash for every leaf of the params and of the state, and one of its program as JAX
hands it to XLA. The exit status of a comparison is 1 if a hash differs or a run is missing. Another
program with the same bits is listed, and is no failure.

    python -m experiments.benchmarks.bits --out before.json
    python -m experiments.benchmarks.bits --against before.json

Bits are those of one machine, one JAX and one set of XLA flags; the file says which, and files
that differ in that are not compared.
"""

import argparse
import functools
import hashlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

from experiments.benchmarks.plain_methods import plain_method

ROUNDS = 3
CLIENTS = 12
DEVICES = 2
STORES = ("device", "sharded", "host")
CASES = (*STORES, "stream", "sweep", "processes")
_RATE = 0.05


def environment():
    """What bits depend on besides the code."""
    import jax
    import numpy as np

    return {
        "jax": jax.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "rounds": ROUNDS,
    }


class Problem:
    """Digits among 12 clients, and a small MLP, on two CPU devices."""

    def __init__(self):
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
        from fedjax_lab import data, models

        self.train, _ = data.load("digits")
        self.division = ("dirichlet:0.3", CLIENTS)
        self.model = models.build("mlp", num_classes=10, hidden=(16, 8))
        self.prepare = data.preprocess(scale=16)
        self.params = self.model.init(jax.random.key(0), self.prepare(self.train, None).x[:1])
        self.loss_fn = models.classification_loss(self.model.apply, self.prepare)
        self.clients = data.partition(self.train, *self.division, seed=0)
        self.stream = data.stream(self.train, *self.division, seed=0)

    def method(self, name, client_lr=_RATE):
        """A method of the catalogue, with plain values for what it asks for."""
        return plain_method(
            *(name, self.loss_fn, self.model, self.prepare, client_lr), memory_size=CLIENTS
        )

    def run(self, name, case):
        """What a run ends with: {place: pytree}."""
        from fedjax_lab import simulate, sweep

        plan = {"rounds": ROUNDS, "cohort_size": 4, "local_steps": 2, "batch_size": 8}
        if case == "sweep":
            points = {"client_lr": [_RATE, _RATE / 2]}
            build = functools.partial(self.method, name)
            plan["run_map"] = "scan"  # "auto" compiles several to choose from
            result = sweep(build, self.params, self.clients, points=points, seeds=(0,), **plan)
            return {"params": result.params}
        clients = self.stream if case == "stream" else self.clients
        plan |= {
            "client_store": case if case in STORES else "device",
            "client_map": "shard_map" if case == "sharded" else "scan",
        }
        result = simulate(self.method(name), self.params, clients, **plan)
        if result.stopped is not None:
            raise SystemExit("Interrupted; nothing was written.")
        rows = result.state.clients
        if hasattr(rows, "read"):
            rows = rows.read(range(CLIENTS))
        return {"params": result.params, "state": result.state._replace(clients=rows)}


def hashes(trees):
    """{path of a leaf: hash of its type, shape and bytes}."""
    import jax
    import numpy as np

    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = np.asarray(leaf)
        digest = hashlib.sha256(f"{leaf.dtype} {leaf.shape} ".encode() + leaf.tobytes())
        found[jax.tree_util.keystr(path, simple=True, separator=".")] = digest.hexdigest()
    return found


def measure(problem, name, case):
    """One run's hashes: {"leaves": {path: hash}, "program": hash}, or {"refused": why}."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_dump_ir_to", folder)
        try:
            leaves = hashes(problem.run(name, case))
        except (TypeError, ValueError) as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        finally:
            jax.config.update("jax_dump_ir_to", "")
        # Single operations are small, and compiled once in a process; the rounds are the largest.
        largest = max(Path(folder).iterdir(), key=lambda file: file.stat().st_size, default=None)
        program = largest.read_bytes() if largest else b""
    return {"leaves": leaves, "program": hashlib.sha256(program).hexdigest()}


def in_processes(chosen):
    """{"method processes-store": hashes} of the methods of ``same_bits`` in two processes."""
    from experiments.benchmarks import same_bits

    found = {}
    names = [name for name in same_bits.METHODS if name in chosen]
    with tempfile.TemporaryDirectory() as folder:
        given = argparse.Namespace(methods=names, folder=folder, rounds=ROUNDS, verbose=False)
        cells = same_bits.layout(given, DEVICES, 2, ("sharded", "host")) if names else {}
        for (name, store), (digest, _) in cells.items():
            found[f"{name} processes-{store}"] = {"leaves": {"all": digest}}
    return found


def compare(before, after):
    """(differences, other programs): lines about the runs that ``after`` has."""
    differences, programs = [], []
    for run, now in after.items():
        then = before.get(run)
        if then is None:
            differences.append(f"{run}: not in the other file")
        elif "refused" in now or "refused" in then:
            if now != then:
                said = [each.get("refused", "ran") for each in (then, now)]
                differences.append(f"{run}: {said[0]!r} became {said[1]!r}")
        else:
            paths = sorted({*now["leaves"], *then["leaves"]})
            other = [p for p in paths if now["leaves"].get(p) != then["leaves"].get(p)]
            if other:
                shown = ", ".join(other[:5]) + (" ..." if len(other) > 5 else "")
                differences.append(f"{run}: {len(other)} of {len(paths)} leaves differ: {shown}")
            elif now.get("program") != then.get("program"):
                programs.append(run)
    return differences, programs


def main(arguments=None):
    """Write the file, or compare with one; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", help="of the catalogue; all of it by default")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--against", type=Path, help="a file of before, to compare with")
    given = parser.parse_args(arguments)
    if given.out is None and given.against is None:
        parser.error("--out, --against or both are needed")
    before = json.loads(given.against.read_text()) if given.against else None
    problem = Problem()
    if before and before["environment"] != environment():
        print(f"Not comparable: {before['environment']} and {environment()}", file=sys.stderr)
        return 2
    from fedjax_lab.algorithms import ALGORITHMS

    names = given.methods or list(ALGORITHMS)
    unknown = sorted({*names} - {*ALGORITHMS})
    if unknown:
        parser.error(f"--methods {' '.join(unknown)}: not in the catalogue")
    found = {}
    for name in names:
        for case in given.cases:
            if case != "processes":
                found[f"{name} {case}"] = measure(problem, name, case)
        print(name, file=sys.stderr, flush=True)
    if "processes" in given.cases:
        found |= in_processes(names)
    if given.out:
        kept = {"environment": environment(), "runs": found}
        given.out.write_text(json.dumps(kept, indent=1) + "\n")
    refused = sum("refused" in run for run in found.values())
    print(f"{len(found)} runs, {refused} of them refused")
    if before is None:
        return 0
    differences, programs = compare(before["runs"], found)
    print(f"{len(differences)} differ")
    print("\n".join(differences))
    if programs:
        print(f"The same bits by another program: {', '.join(programs)}")
    return int(bool(differences))


if __name__ == "__main__":
    raise SystemExit(main())
