"""A run of 20 rounds becomes one of 40, and equals a run that had 40 from the start.

python -m fedjax_lab.recipes.more_rounds
"""

import tempfile
from pathlib import Path

import jax
import numpy as np

from fedjax_lab import algorithms, data, models, simulate


def main() -> None:
    """Run 20 rounds, then 40 in the same directory, and 40 in another one; compare them."""
    train, _ = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    model = models.linear(10)
    params = model.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(model.apply, data.preprocess(scale=16))
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)

    def run(rounds: int, run_dir: Path):
        settings = {"cohort_size": 5, "local_steps": 5, "batch_size": 16, "eval_every": 10}
        return simulate(algorithm, params, clients, rounds=rounds, run_dir=run_dir, **settings)

    with tempfile.TemporaryDirectory() as folder:
        grown, whole = Path(folder) / "grown", Path(folder) / "whole"
        print(f"20 rounds: loss {run(20, grown).history[-1]['loss']:.4f}")
        longer = run(40, grown)
        print(f"20 more in the same directory: loss {longer.history[-1]['loss']:.4f}")
        at_once = run(40, whole)
        print(f"40 at once: loss {at_once.history[-1]['loss']:.4f}")
        pairs = zip(jax.tree.leaves(longer.params), jax.tree.leaves(at_once.params), strict=True)
        files = [(path / "metrics.jsonl").read_bytes() for path in (grown, whole)]
        same = all(np.array_equal(a, b) for a, b in pairs) and files[0] == files[1]
        print(f"the same params and the same metrics.jsonl, bit for bit: {same}")


if __name__ == "__main__":
    main()
