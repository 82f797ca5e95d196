"""A set of tensorflow-datasets with a feature that says whose each example is.

    python -m fedjax_lab.recipes.tfds_ids

It needs the packages of the extra ``data``. The recipe first prepares a small set of ratings,
without TensorFlow. For a set of TFDS, such as movielens, call ``download_and_prepare`` once.
"""

import importlib.util
import tempfile

import jax
import numpy as np

from fedjax_lab import algorithms, build_evaluation, data, models, simulate


def prepare(folder, rows=300, seed=0):
    """Write the data set "ratings" to a TFDS directory."""
    import tensorflow_datasets as tfds

    class Ratings(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"user": tfds.features.Text(), "film": np.float32, "rating": np.float32}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            rng = np.random.default_rng(seed)
            for i in range(rows):
                film, user = rng.uniform(), rng.integers(12)
                yield i, {"user": f"user-{user:02d}", "film": film, "rating": 3 * film + user % 2}

    Ratings(data_dir=folder, file_format="array_record").download_and_prepare()


def main():
    """Train on the users of the data set."""
    if not importlib.util.find_spec("tensorflow_datasets"):
        print("tensorflow-datasets is not installed, nothing is read; version >= 4.9")
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        clients = data.from_tfds("ratings", client="user", x=["film"], y="rating", data_dir=folder)
    print(clients.summary())
    model = models.linear(1)
    params = model.init(jax.random.key(0), clients.examples.x[:1])
    result = simulate(
        algorithms.fedavg(models.regression_loss(model.apply), client_lr=0.1),
        params, clients, rounds=40, cohort_size=4, local_steps=5, batch_size=16,
        evaluate=build_evaluation(models.squared_error_counts(model.apply), clients),
        eval_every=20,
    )  # fmt: skip
    for row in result.history:
        print(f"round {row['round']}: mean squared error {row['mean_squared_error']:.3f}")


if __name__ == "__main__":
    main()
