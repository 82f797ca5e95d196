"""Seconds a round with examples on the host, next to the same run with all of them on the device.

Both take turns in one process: 100 clients, cohorts of 10, 5 local steps of 64 examples 28x28, of a
data set that is larger than the memory that a stream is allowed. "Compile" is the programs of
rounds; "ms a round" leaves out the first chunk, "CPU" is the time of all the process's threads, and
a ratio is the median over the turns of one turn's. "Held" is the most bytes of arrays that the
device had during a run beyond those from before it, looked at every 5 ms; data and index of the
resident run, and the index of the streamed one, were there before.

    python -m experiments.benchmarks.streams [--data-mb 400] [--memory-mb 100] [--model lenet5]
"""

import argparse
import tempfile
import threading
import time

import jax
import numpy as np

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.storage.fingerprint import hash_arrays

SHAPE, CLASSES, CLIENTS, SEED = (28, 28, 1), 10, 100, 0
_PART = 50_000  # examples that are made at once


def parts(count):
    """Noise images [.., 28, 28, 1] and labels, ``count`` in all, a part after the other."""
    for start in range(0, count, _PART):
        yield data.synthetic.noise_images(min(_PART, count - start), SHAPE, CLASSES, SEED + start)


class Watch:
    """Most bytes of live arrays while it is open, beyond those from before."""

    def __enter__(self):
        """Start to look."""
        self.before, self.most, self._done = _live(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self):
        while not self._done.wait(0.005):
            self.most = max(self.most, _live() - self.before)

    def __exit__(self, *_):
        """Stop."""
        self._done.set()
        self._thread.join()


def _live():
    return sum(array.nbytes for array in jax.live_arrays())


def measure(algorithm, params, clients, given):
    """One run: (seconds a round, CPU seconds a round, compile seconds, bytes held, a hash)."""
    times, works = [], []

    def look(row):
        times.append(time.perf_counter())
        works.append(time.process_time())

    with Watch() as watch:
        result = simulate(
            algorithm,
            params,
            clients,
            rounds=given.rounds,
            eval_every=given.eval_every,
            cohort_size=10,
            local_steps=5,
            batch_size=64,
            client_map=given.client_map,
            on_row=look,
            progress=given.progress,
        )
    assert result.stopped is None, "a run was interrupted"
    rounds = given.rounds - given.eval_every
    seconds, work = (times[-1] - times[0]) / rounds, (works[-1] - works[0]) / rounds
    return seconds, work, result.compile_seconds, watch.most, hash_arrays(result.params)


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-mb", type=float, default=400)
    parser.add_argument("--memory-mb", type=float, default=100, help="that a stream is allowed")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--client-map", default="auto")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--progress", action="store_true")
    given = parser.parse_args(arguments)
    count = int(given.data_mb * 1e6) // (int(np.prod(SHAPE)) + 4)
    model = models.build(given.model, CLASSES)
    prepare = data.preprocess(0.5, 0.3)
    loss_fn = models.classification_loss(model.apply, prepare)
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.05)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        path = data.write_stream(f"{folder}/train", parts(count))
        written = time.perf_counter() - began
        began = time.perf_counter()
        memory = int(given.memory_mb * 1e6)
        stream = data.stream(path, "dirichlet:0.5", CLIENTS, SEED, memory=memory)
        divided = time.perf_counter() - began
        began = time.perf_counter()
        stream.examples.content()
        known = time.perf_counter() - began
        resident = data.partition(data.open_stream(path), "dirichlet:0.5", CLIENTS, SEED)
        first = prepare(jax.tree.map(lambda leaf: leaf[:1], data.open_stream(path)), None).x
        params = model.init(jax.random.key(SEED), first)
        found = {"resident": [], "streamed": []}
        for _ in range(given.turns):
            found["resident"].append(measure(algorithm, params, resident, given))
            found["streamed"].append(measure(algorithm, params, stream, given))
    assert len({of_run[4] for runs in found.values() for of_run in runs}) == 1, "other bits"
    data_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(resident))
    index = stream.index_bytes
    print(
        f"{count:,} examples, {stream.nbytes / 1e6:,.0f} MB, written in {written:.1f} s, divided "
        f"in {divided:.1f} s, known by their hash in {1e3 * known:.1f} ms; allowed "
        f"{memory / 1e6:,.0f} MB; the next chunk is fetched while one runs. All runs gave the same "
        "bits."
    )
    heads = ["data", "compile, s", "ms a round", "ratio", "CPU ms a round", "ratio"]
    print(f"| {' | '.join([*heads, 'data and index, MB', 'held, MB'])} |")
    print(f"|---|{'---:|' * 7}")
    plain = np.array([of_run[:2] for of_run in found["resident"]])
    for name, runs in found.items():
        times = np.array([of_run[:2] for of_run in runs])
        cells = [name, f"{runs[0][2]:.1f}"]
        for of_kind, ratios in zip(1e3 * times.T, (times / plain).T, strict=True):
            spread = f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
            cells += [f"{np.median(of_kind):.1f}", spread]
        cells.append(f"{(data_bytes if name == 'resident' else index) / 1e6:,.1f}")
        cells.append(f"{max(of_run[3] for of_run in runs) / 1e6:.1f}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
