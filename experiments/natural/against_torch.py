"""Compare FedAvg's rounds on the roles with a plain PyTorch loop on the same mini-batches.

    python -m experiments.natural.against_torch --torch-python PYTHON [--folder FOLDER] [--rounds R]

PYTHON is an environment with PyTorch (``make bench-opponents OPPONENTS=torch``). Model, rate and
seed are the study's. Prints the largest differences of losses and parameters.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np

from experiments.natural.runs import SEEDS, Scale
from fedjax_lab import algorithms, build_round, data, models
from fedjax_lab.tree import by_path

HERE = Path(__file__).parent


def rounds_of(clients, hidden, client_lr, rounds, seed, cohort_size):
    """Run our rounds; returns (arrays for the other loop, last parameters, losses).

    Args:
      clients: the roles.
      hidden: units of the LSTM layer.
      client_lr, rounds, seed, cohort_size: of the run.
    """
    scale = Scale(hidden)
    model = scale.network()
    params = model.init(jax.random.key(seed), clients.examples.x[:1])
    algorithm = algorithms.fedavg(models.answer_loss(model.apply), client_lr=client_lr)
    state, round_fn = algorithm.init(params, clients.num_clients), build_round(algorithm)
    schedule = {"cohort_size": cohort_size, "local_epochs": 1, **scale.mini_batches}
    arrays = {f"start/{name}": np.asarray(leaf) for name, leaf in by_path(params).items()}
    arrays |= {"client_lr": np.float64(client_lr), "rounds": np.int64(rounds)}
    losses = []
    for t in range(rounds):
        batch = data.draw_batch(clients, jax.random.key(seed), t, **schedule)
        state, metrics = round_fn(state, batch)
        losses.append(float(metrics["loss"]))
        rows = np.asarray(batch.examples)
        real = np.ones(rows.shape, bool) if batch.example_mask is None else batch.example_mask
        real = np.asarray(real)
        steps = np.full(cohort_size, rows.shape[1])
        steps = steps if batch.num_steps is None else np.asarray(batch.num_steps)
        arrays |= {f"{t}/weights": np.asarray(batch.weights, np.float64), f"{t}/steps": steps}
        for i in range(cohort_size):
            for k in range(steps[i]):
                held = rows[i, k][real[i, k]]
                arrays[f"{t}/{i}/{k}/x"] = np.asarray(clients.examples.x)[held]
                arrays[f"{t}/{i}/{k}/y"] = np.asarray(clients.examples.y)[held]
    return arrays, by_path(algorithm.params(state)), np.array(losses)


def main(arguments=None):
    """Print the differences."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.natural.against_torch", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/shakespeare"))
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args(arguments)
    cell = json.loads((HERE / "results.json").read_text(encoding="utf-8"))["roles, E = 1"]
    clients, _ = data.load_federated("shakespeare", given.folder)
    scale = Scale()
    arrays, params, losses = rounds_of(
        clients, scale.hidden, cell["client_lr"], given.rounds, SEEDS[0], scale.cohort_size
    )
    with tempfile.TemporaryDirectory() as folder:
        batches, result = Path(folder) / "batches.npz", Path(folder) / "result.npz"
        np.savez(batches, **arrays)
        script = HERE / "torch_rounds.py"
        subprocess.run([given.torch_python, script, batches, result], check=True)
        theirs = dict(np.load(result))
    for t, (ours, other) in enumerate(zip(losses, theirs.pop("losses"), strict=True)):
        print(f"round {t + 1}: loss {ours:.6f}, PyTorch {other:.6f}, {abs(ours - other):.1e}")
    assert params.keys() == theirs.keys()
    for name, leaf in params.items():
        moved = np.abs(np.asarray(leaf) - arrays[f"start/{name}"]).max()
        apart = np.abs(np.asarray(leaf) - theirs[name]).max()
        print(f"{name}: moved by at most {moved:.3f}; largest difference {apart:.1e}")


if __name__ == "__main__":
    main()
