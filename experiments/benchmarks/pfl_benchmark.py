"""pfl-research's benchmark on CIFAR-10 as a whole run: wall time and curve of the test loss.

pfl's published settings (``benchmarks/image_classification/configs/baseline.yaml``): 1,000 users of
50 images, cohorts of 50, one local epoch of batch 10 with learning rate 0.1, a mean over users with
server learning rate 1, its CNN of two convolutions with Glorot's initial weights and dropout, and
the loss and accuracy of 10,000 images every 10 rounds. pfl evaluates these in one batch, fedjax_lab
in its batches of 1,000; pfl also evaluates the cohort's models on their users in those rounds.
Where CIFAR-10 is not on this machine, the images are those of Fashion-MNIST, 28 x 28 x 1, with a
border of zeros and three equal channels.

    python -m experiments.benchmarks.pfl_benchmark [--rounds 150] [--seeds 0 1 2] [--json FILE]

Both systems take turns, each in a process of its own; its seconds count from the start of the
process, with imports, data and compilation. The published number of rounds is 1,500.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from experiments.benchmarks import child

USERS, IMAGES, COHORT, BATCH, RATE, EVERY = 1000, 50, 50, 10, 0.1, 10
SYSTEMS = ("pfl_benchmark", "pfl_benchmark_of_pfl")


def write_data(folder):
    """Write images [n, 32, 32, 3] and labels for both systems; returns (path, whose they are)."""
    from fedjax_lab import data

    for name in ("cifar10", "fashion_mnist"):
        try:
            train, test = data.load(name)
            break
        except (FileNotFoundError, ImportError):
            pass
    else:
        name = "noise"
        train, test = (
            data.synthetic.noise_images(n, (32, 32, 3), seed=0) for n in (50_000, 10_000)
        )
    path = Path(folder) / "images.npz"
    number = USERS * IMAGES
    images = {"x": _as_cifar10(train.x[:number]), "x_test": _as_cifar10(test.x)}
    np.savez(path, **images, y=train.y[:number], y_test=test.y)
    return str(path), name


def _as_cifar10(images):
    images = np.asarray(images)
    border = (32 - images.shape[1]) // 2
    images = np.pad(images, ((0, 0), (border, border), (border, border), (0, 0)))
    return np.broadcast_to(images, (*images.shape[:3], 3)).copy()


def run(system, job):
    """One run: ``seconds``, ``curve`` [(round, loss, accuracy)] and what is known of the device.

    The job has the file of the ``data``, ``rounds`` and ``seed``.
    """
    with np.load(job["data"]) as file:
        arrays = {name: file[name] for name in file}
    side = run_ours if system == "pfl_benchmark" else run_pfl
    return side(arrays, job["rounds"], job["seed"])


def run_ours(arrays, rounds, seed):
    """``simulate`` with every setting of the library at its default."""
    import jax
    from flax import linen as nn

    import fedjax_lab
    from experiments.benchmarks.ours import about_device
    from fedjax_lab import algorithms, data, models
    from fedjax_lab.storage.run_dir import versions

    def biases(inputs):
        """PyTorch's initial biases."""
        bound = inputs**-0.5
        return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)

    class Network(nn.Module):
        """pfl's."""

        @nn.compact
        def __call__(self, x, train):
            glorot = nn.initializers.glorot_uniform()
            for inputs, features in ((9 * x.shape[-1], 32), (9 * 32, 64)):
                start = {"kernel_init": glorot, "bias_init": biases(inputs)}
                x = nn.relu(nn.Conv(features, (3, 3), padding="VALID", **start)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.Dropout(0.25, deterministic=not train)(x).reshape(x.shape[0], -1)
            x = nn.Dense(128, kernel_init=glorot, bias_init=biases(x.shape[1]))(x)
            x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
            return nn.Dense(10, kernel_init=glorot, bias_init=biases(128))(x)

    train = data.Examples(arrays["x"], arrays["y"])
    test = data.Examples(arrays["x_test"], arrays["y_test"])
    mean, std, scale = data.normalization(train)
    preprocess = data.preprocess(mean, std, scale=scale)
    model = models.from_linen(Network())
    result = fedjax_lab.simulate(
        algorithms.fedavg(models.classification_loss(model.apply, preprocess), client_lr=RATE),
        model.init(jax.random.key(seed), train.x[:1]),
        data.partition(train, "iid", num_clients=USERS, seed=seed),
        rounds=rounds,
        cohort_size=COHORT,
        local_epochs=1,
        batch_size=BATCH,
        seed=seed,
        evaluate=fedjax_lab.build_evaluation(models.accuracy_counts(model.apply, preprocess), test),
        eval_every=EVERY,
    )
    seconds = time.perf_counter() - child.STARTED
    rows = [(row["round"], row["test_loss"], row["accuracy"]) for row in result.history]
    about = {**about_device(), "versions": versions()}
    return {"seconds": seconds, "curve": [[*map(float, row)] for row in rows], **about}


def run_pfl(arrays, rounds, seed):
    """pfl's training script with its callbacks for evaluation."""
    import types

    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted, get_overall_value
    from pfl.model.pytorch import PyTorchModel

    from experiments.benchmarks import torch_models
    from experiments.benchmarks.workloads import WORKLOADS

    torch_models.set_up({})
    torch.manual_seed(seed)
    np.random.seed(seed)
    module = torch_models.build_model(WORKLOADS["W5"])
    for layer in module:
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            torch.nn.init.xavier_uniform_(layer.weight)
    cross_entropy = torch.nn.functional.cross_entropy

    def loss(self, x, y):
        self.train()
        return cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        self.eval()
        logits = self(x)
        correct = (logits.argmax(-1) == y).sum()
        return {
            "loss": Weighted(float(cross_entropy(logits, y, reduction="sum")), len(y)),
            "accuracy": Weighted(float(correct), len(y)),
        }

    module.loss = types.MethodType(loss, module)
    module.metrics = types.MethodType(metrics, module)
    axes = (0, 1, 2)
    mean, std = (of(arrays["x"], axes, np.float64) for of in (np.mean, np.std))
    order = np.random.permutation(len(arrays["x"]))
    device = torch_models.DEVICE

    def tensors(x, y):
        x = torch.from_numpy(((x - mean) / std).astype(np.float32)).to(device)
        return x, torch.from_numpy(y).long().to(device)

    x, y = tensors(arrays["x"][order], arrays["y"][order])
    users = [*zip(x.split(IMAGES), y.split(IMAGES), strict=True)]
    sampler = get_user_sampler("random", range(len(users)))
    dataset = FederatedDataset.from_slices(users, sampler)
    evaluation = NNEvalHyperParams(local_batch_size=10_000)
    curve = []

    class Evaluation(CentralEvaluationCallback):
        """Also keeps what it found."""

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            """Evaluate every few rounds."""
            stop, found = super().after_central_iteration(
                aggregate_metrics, model, central_iteration=central_iteration
            )
            values = {str(name): get_overall_value(value) for name, value in found}
            if values:
                scores = [values[f"Central val | {name}"] for name in ("loss", "accuracy")]
                curve.append([central_iteration + 1, *map(float, scores)])
            return stop, found

    central = Dataset(raw_data=[*tensors(arrays["x_test"], arrays["y_test"])])
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=EVERY,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        SimulatedBackend(dataset, dataset, [WeightByUser()]),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0)),
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE),
        evaluation,
        callbacks=[Evaluation(central, model_eval_params=evaluation, frequency=EVERY)],
        send_metrics_to_platform=False,
    )
    torch_models.wait()
    seconds = time.perf_counter() - child.STARTED
    return {"seconds": seconds, "curve": curve, **torch_models.about_device()}


def table(answers):
    """Seconds of the runs and the loss in the end as Markdown.

    Args:
      answers: system -> its answers, one for each seed.
    """
    lines = ["| system | seconds | test loss in the end, mean ± sd over seeds | accuracy |"]
    lines.append("|---|---:|---:|---:|")
    for system, given in answers.items():
        good = [answer for answer in given if "status" not in answer]
        if not good:
            lines.append(f"| {system} | {given[-1]['status']} | | |")
            continue
        seconds = [answer["seconds"] for answer in good]
        ends = np.array([answer["curve"][-1] for answer in good])
        spread = f" ± {ends[:, 1].std(ddof=1):.3f}" if len(good) > 1 else ""
        cells = f"{np.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        loss, accuracy = ends[:, 1].mean(), 100 * ends[:, 2].mean()
        lines.append(f"| {system} | {cells} | {loss:.3f}{spread} | {accuracy:.1f} % |")
    return "\n".join(lines)


def main(arguments=None):
    """Print the table; progress goes to stderr."""
    from experiments.benchmarks.compare import commit, machine, run_child

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", metavar="FILE", help="where curves and seconds are stored")
    given = parser.parse_args(arguments)
    answers = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder:
        path, source = write_data(folder)
        for seed in given.seeds:
            job = {"data": path, "rounds": given.rounds, "seed": seed}
            for system in SYSTEMS:
                answers[system].append(run_child(system, job))
                told = answers[system][-1]
                print(system, seed, told.get("status") or told["seconds"], file=sys.stderr)
    if given.json:
        about = {"rounds": given.rounds, "data": source, "machine": machine(), "commit": commit()}
        text = json.dumps({**about, "systems": answers}, indent=1)
        Path(given.json).write_text(text + "\n", encoding="utf-8")
    print(f"{given.rounds} rounds on {source}\n\n{table(answers)}")


if __name__ == "__main__":
    main()
