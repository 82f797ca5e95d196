"""Kill runs, damage what they leave, and see whether the result is ever another one.

A run of 24 rounds is killed again and again, up to five times in a row, and then run to its end:
its rows and its state must be those of a run that nothing disturbed, bit for bit. It is killed by
SIGKILL at a call to the file system (each call is somebody's unlucky moment: between making the
directory and naming config.json, inside a checkpoint, while an old one is deleted, after the last
round), by SIGKILL at a random time, and by SIGTERM at a random time. Then a file of a half-finished
run is damaged: the next call must give the same bits or an error, never another result.

    python -m tests.faults [--kills 200] [--mutations 300] [--seed 0]
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROUNDS = 24
CALLS = ("replace", "rename", "mkdir", "fsync", "unlink", "rmdir", "open", "truncate")
IN_A_ROW = 5
PATIENCE = 40  # seconds for one run


def run(directory, **options):
    """One call of ``simulate``: a method with client rows, and a checkpoint in 4 rounds."""
    from fedjax_lab import simulate
    from tests.simulation.test_run import SCAFFOLD, first_params, make_clients

    return simulate(
        SCAFFOLD,
        first_params(),
        make_clients(),
        rounds=ROUNDS,
        cohort_size=3,
        local_steps=2,
        batch_size=4,
        replace=True,
        seed=5,
        eval_every=2,
        checkpoint_every=4,
        client_map="scan",
        evaluate=evaluate,
        run_dir=directory,
        **options,
    )


def evaluate(params):
    """A number of a model."""
    return {"norm": abs(params["w"]).sum()}


def digest(result, directory):
    """What must be the same in the end."""
    from fedjax_lab.storage.fingerprint import hash_arrays

    rows = hashlib.sha256((Path(directory) / "metrics.jsonl").read_bytes()).hexdigest()[:16]
    return [rows, hash_arrays(result.state), result.stopped]


def configure(cache):
    """Compile as the tests do, and each program once for all processes."""
    import jax

    os.environ["FEDJAX_LAB_TEST_CACHE"] = cache
    import tests.conftest  # noqa: F401  (sets the flags)

    jax.config.update("jax_num_cpu_devices", 1)


def count_calls(directory, at):
    """Kill this process at its call number ``at`` that touches the directory; returns the count."""
    made = [0]

    def counted(function):
        def call(path, *arguments, **options):
            # A file descriptor (of fsync, truncate) may be that of any file: it counts as well.
            if isinstance(path, int) or str(path).startswith(str(directory)):
                made[0] += 1
                if made[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(path, *arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    return made


def child(directory, cache, at, out):
    """A process that runs, and is killed at a call to the file system or told when it begins."""
    configure(cache)
    warnings.simplefilter("ignore")
    made = count_calls(directory, at)
    out.put("begun")
    result = run(directory)
    out.put([*digest(result, directory), made[0]])
    out.close()
    out.join_thread()
    os._exit(0 if result.signal is None else 128 + result.signal)


class Killer:
    """Starts children and disturbs them."""

    def __init__(self, folder, seed):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["fedjax_lab.simulation.computation", "orbax.checkpoint", "pytest"]
        )
        self._cache, self._random = str(folder / "cache"), random.Random(seed)
        self.seconds = 1.0  # of a run, once it has begun

    def once(self, directory, how, calls):
        """(what it told at its end or None, exit code) of one process."""
        out = self._context.Queue()
        at = self._random.randint(1, calls) if how == "at a call" else 0
        delay = self._random.uniform(0, 1.1 * self.seconds) if how.startswith("SIG") else None
        process = self._context.Process(target=child, args=(directory, self._cache, at, out))
        process.start()
        told = None
        try:
            out.get(timeout=PATIENCE)
            began = time.monotonic()
            if delay is not None:
                process.join(delay)
                if process.is_alive():
                    os.kill(process.pid, getattr(signal, how))
            process.join(PATIENCE)
            if process.exitcode is not None and process.exitcode >= 0 and not out.empty():
                told = out.get(timeout=5)
                if delay is None:
                    self.seconds = time.monotonic() - began
        except queue.Empty:
            told = ["no answer"]
        if process.is_alive():
            process.kill()
            process.join()
        return told, process.exitcode

    def campaign(self, folder, kills):
        """Kill so many times; returns {how: [survived, made]} and the failures."""
        whole, _ = self.once(folder / "whole", "not at all", 1)
        whole, _ = self.once(folder / "again", "not at all", 1)  # with warm caches
        *expected, calls = whole
        table = collections.defaultdict(lambda: [0, 0])
        failures, made, number = [], 0, 0
        while made < kills:
            number += 1
            directory, series = folder / f"run{number}", []
            for _ in range(self._random.randint(1, IN_A_ROW)):
                how = self._random.choice(("at a call", "at a call", "SIGKILL", "SIGTERM"))
                _, code = self.once(directory, how, calls)
                if code in (-signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM):
                    series.append(how)
            told, code = self.once(directory, "not at all", 1)
            same = told is not None and told[:-1] == expected
            for how in series:
                table[how][0] += same
                table[how][1] += 1
            if not same:
                failures.append(f"run {number} after {series}: {told}, exit {code}, not {expected}")
            made += len(series)
            shutil.rmtree(directory, ignore_errors=same)
        return dict(table), failures


DAMAGES = ("flip", "halve", "delete", "append", "zeros", "empty")


def damage(path, how, chance):
    """Damage a file."""
    raw = bytearray(path.read_bytes())
    if how == "delete" or not raw:
        path.unlink()
        return
    if how == "flip":
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    elif how == "halve":
        del raw[len(raw) // 2 :]
    elif how == "append":
        raw += b"\x00{"
    elif how == "zeros":
        begin = chance.randrange(len(raw))
        raw[begin : begin + 64] = bytes(len(raw[begin : begin + 64]))
    else:
        raw.clear()
    path.write_bytes(raw)


def mutate(folder, count, seed):
    """Damage a file of a half-finished run, so many times; returns {outcome: count}, failures."""
    import importlib

    chunks = importlib.import_module("fedjax_lab.simulation.chunks")
    build_chunk, kept = chunks.build_chunk, {}

    def kept_chunk(run, place, state_sharding):
        key = run.schedule, run.in_round, place.client_map.name, place.client_store
        return kept.setdefault(key, build_chunk(run, place, state_sharding))

    chunks.build_chunk = kept_chunk
    chance, outcomes, failures = random.Random(seed), collections.Counter(), []
    half = folder / "half"
    expected = digest(run(folder / "undisturbed"), folder / "undisturbed")
    make_half(half)
    for number in range(count):
        directory = folder / f"mutation{number}"
        shutil.copytree(half, directory)
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        path, how = chance.choice(files), chance.choice(DAMAGES)
        damage(path, how, chance)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = digest(run(directory), directory)
            except (ValueError, OSError) as error:
                outcomes["refused"] += 1
                if not str(error).strip():
                    failures.append(f"{how} {path.name}: an error without a word")
                continue
            except Exception as error:
                failures.append(
                    f"{how} {path.relative_to(directory)}: {type(error).__name__}: {error}"
                )
                continue
        if found != expected:
            failures.append(f"{how} {path.relative_to(directory)}: another result without a word")
        outcomes["same bits, with a warning" if said else "same bits"] += 1
        shutil.rmtree(directory, ignore_errors=True)
    return dict(outcomes), failures


def make_half(directory):
    """A run that was interrupted after 12 of its rounds."""
    from fedjax_lab import forget_signal

    def interrupt(row):
        if row["round"] == 12:
            signal.raise_signal(signal.SIGTERM)

    run(directory, on_row=interrupt)
    forget_signal()


def main():
    """Print two tables; exit with 1 if a result was another one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mutations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failures = []
    with tempfile.TemporaryDirectory(prefix="fedjax-lab-faults-") as name:
        folder = Path(name)
        if given.kills:
            table, failed = Killer(folder, given.seed).campaign(folder, given.kills)
            failures += failed
            survived, made = (sum(row[i] for row in table.values()) for i in range(2))
            for how, (good, all_) in sorted(table.items()):
                print(f"killed {how}: {good} of {all_} survived bit for bit")
            print(f"killed in all: {survived} of {made}", flush=True)
        if given.mutations:
            configure(str(folder / "cache"))
            outcomes, failed = mutate(folder, given.mutations, given.seed)
            failures += failed
            print(f"damaged: {json.dumps(outcomes)}, silently different: {len(failed)}", flush=True)
    print("\n".join(failures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
