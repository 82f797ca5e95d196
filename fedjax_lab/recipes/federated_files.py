"""Federated sets of other libraries: FedJAX's SQLite files, and TensorFlow Federated's HDF5.

    python -m fedjax_lab.recipes.federated_files

The recipe first writes such files, with 12 writers of digits. HDF5 needs ``pip install h5py`` and
is skipped without it.
"""

import importlib.util
import sqlite3
import tempfile
import zlib
from pathlib import Path

import jax
import numpy as np
from flax import serialization

from fedjax_lab import algorithms, data, models, simulate


def write_sqlite(path, writers):
    """Write a file as FedJAX's ``SQLiteFederatedDataBuilder`` does."""
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL,"
            " num_examples INTEGER NOT NULL)"
        )
        for name, (pixels, label) in writers.items():
            packed = zlib.compress(serialization.msgpack_serialize({"x": pixels, "y": label}))
            row = (name.encode(), packed, len(label))
            connection.execute("INSERT INTO federated_data VALUES (?, ?, ?)", row)
    connection.close()


def read_hdf5(path):
    """Read {client: (pixels, label)} from a file as of ``tff.simulation.datasets.emnist``."""
    import h5py

    with h5py.File(path) as file:
        users = file["examples"]
        return {user: (users[user]["pixels"][()], users[user]["label"][()]) for user in users}


def main():
    """Read the writers from each kind of file, and train on them."""
    train, _ = data.load("digits")
    owners = np.arange(len(train.y)) % 12
    pixels = (train.x / 16).astype(np.float32)
    writers = {f"f{i:04d}": (pixels[owners == i], train.y[owners == i]) for i in range(12)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.sqlite"
        write_sqlite(path, writers)
        read = {"FedJAX": data.load_fedjax(path, convert=lambda d: (d["x"], d["y"]))}
        if importlib.util.find_spec("h5py"):
            import h5py

            with h5py.File(path.with_suffix(".h5"), "w") as file:
                for name, (x, y) in writers.items():
                    file[f"examples/{name}/pixels"], file[f"examples/{name}/label"] = x, y
            read["TensorFlow Federated"] = data.from_clients(read_hdf5(path.with_suffix(".h5")))
        else:
            print("h5py is not installed: no HDF5")
    model = models.linear(10)
    params = model.init(jax.random.key(0), pixels[:1])
    algorithm = algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.5)
    for name, clients in read.items():
        result = simulate(
            algorithm, params, clients, rounds=20, cohort_size=4, local_steps=5, batch_size=16
        )
        loss = result.history[-1]["loss"]
        print(f"{name}: {clients.num_clients} clients, {clients.names[0]} first, loss {loss:.3f}")


if __name__ == "__main__":
    main()
