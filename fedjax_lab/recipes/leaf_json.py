"""LEAF's files: one JSON for training and one for testing, with the users of each.

    python -m fedjax_lab.recipes.leaf_json

The recipe first writes such folders, with 12 writers of digits. Skip this step if you have LEAF's
own, such as ``leaf/data/femnist/data``. ``convert`` is for data sets whose x is text.
"""

import json
import tempfile
from pathlib import Path

import jax
import numpy as np

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.simulation.evaluate import build_client_evaluation, build_evaluation


def write_leaf(folder, examples, num_users=12):
    """Write files as LEAF's ``preprocess.sh`` does: users, num_samples, user_data."""
    x = (examples.x.reshape(len(examples.x), -1) / 16).round(3)
    owners = np.arange(len(x)) % num_users
    users = {
        f"writer_{i:02d}": {"x": x[owners == i].tolist(), "y": examples.y[owners == i].tolist()}
        for i in range(num_users)
    }
    sizes = [len(user["y"]) for user in users.values()]
    content = {"users": list(users), "num_samples": sizes, "user_data": users}
    folder.mkdir()
    (folder / "all_data_0.json").write_text(json.dumps(content))


def main():
    """Train on the users of one folder and evaluate on those of the other."""
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / part for part in ("train", "test")]
        for folder, examples in zip(folders, data.load("digits"), strict=True):
            write_leaf(folder, examples)
        train, test = map(data.load_leaf, folders)
    assert train.names == test.names
    print(train.summary())

    model = models.linear(10)
    params = model.init(jax.random.key(0), train.examples.x[:1])
    counts = models.accuracy_counts(model.apply)
    result = simulate(
        algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.5),
        params,
        train,
        rounds=60,
        cohort_size=4,
        local_steps=5,
        batch_size=16,
        evaluate=build_evaluation(counts, test),
        eval_every=20,
    )
    for row in result.history:
        print(f"round {row['round']}: accuracy {row['accuracy']:.3f}")
    each = np.asarray(build_client_evaluation(counts, test)(result.params))
    print(f"on their own test digits: {each.min():.3f} to {each.max():.3f}")


if __name__ == "__main__":
    main()
