"""Clients by a column of ids: arrays, a dict of columns, and a table of Hugging Face's.

    python -m fedjax_lab.recipes.ids_from_a_column

The last one needs ``pip install datasets`` and is skipped without it.
"""

import importlib.util

import jax
import numpy as np

from fedjax_lab import algorithms, build_evaluation, data, models, simulate


def make_table(rows=400, seed=0):
    """Make rows of age, dose, response and hospital; replace this by your own table."""
    rng = np.random.default_rng(seed)
    age, dose = rng.uniform(20, 80, rows), rng.uniform(0, 1, rows)
    hospital = rng.choice(["north", "south", "east", "west", "harbour"], rows)
    response = 0.02 * age + dose + 0.3 * (hospital == "north") + 0.1 * rng.normal(size=rows)
    return {"hospital": hospital, "age": age / 50, "dose": dose, "response": response}


def main():
    """Read the same clients in each of these ways, and train on them."""
    table = make_table()
    x = np.stack([table["age"], table["dose"]], axis=1)
    read = {
        "arrays": data.partition((x, table["response"]), table["hospital"]),
        "columns": data.from_table(table, client="hospital", x=["age", "dose"], y="response"),
    }
    if importlib.util.find_spec("datasets"):
        import datasets

        rows = datasets.Dataset.from_dict(table)
        columns = {"client": "hospital", "x": ["age", "dose"], "y": "response"}
        read["Hugging Face"] = data.from_table(rows, **columns)
    else:
        print("datasets is not installed: no table of Hugging Face's")

    model = models.linear(1)
    params = model.init(jax.random.key(0), x[:1])
    counts = models.squared_error_counts(model.apply)
    for name, clients in read.items():
        result = simulate(
            algorithms.fedavg(models.regression_loss(model.apply), client_lr=0.1),
            params, clients, rounds=40, cohort_size=3, local_steps=5, batch_size=16,
            evaluate=build_evaluation(counts, clients), eval_every=40,
        )  # fmt: skip
        error = result.history[-1]["mean_squared_error"]
        print(f"{name}: {', '.join(clients.names)}; mean squared error {error:.3f}")


if __name__ == "__main__":
    main()
