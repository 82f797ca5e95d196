"""Train, read the run back from its directory, and export the model for other programs.

python -m fedjax_lab.recipes.get_the_model_out
"""

import tempfile
from pathlib import Path

import jax
import numpy as np

import fedjax_lab
from fedjax_lab import algorithms, data, models
from fedjax_lab.storage.saved_run import export_params


def main() -> None:
    """Run fifty rounds, and print the contents of the directory and of the exported file."""
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    scaled = data.preprocess(scale=16)
    model = models.build("mlp", num_classes=10, hidden=(64,))
    loss_fn = models.classification_loss(model.apply, scaled)
    params = model.init(jax.random.key(0), train.x[:1])

    with tempfile.TemporaryDirectory() as folder:
        fedjax_lab.simulate(
            algorithms.fedavg(loss_fn, client_lr=0.1),
            params,
            clients,
            rounds=50,
            cohort_size=5,
            local_steps=5,
            batch_size=16,
            replace=True,
            client_map="scan",  # compiles fastest
            run_dir=Path(folder) / "run",
        )

        # Another program reads the model, the rows and the settings, without the method.
        run = fedjax_lab.load_run(Path(folder) / "run")
        print(f"{run.config['algorithm']}: round {run.round}, loss {run.history[-1]['loss']:.3f}")
        logits = model.apply(run.params, scaled(test, None).x)
        print(f"test accuracy {np.mean(logits.argmax(-1) == test.y):.3f}")

        # For programs without JAX and this package; .safetensors works the same way.
        file = Path(folder) / "model.npz"
        export_params(run.params, file)
        with np.load(file) as arrays:
            for name in arrays.files:
                print(name, arrays[name].shape, arrays[name].dtype)


if __name__ == "__main__":
    main()
