"""How far from the optimum do methods end? On problems whose optimum is known.

python -m fedjax_lab.recipes.known_optimum
"""

import jax.numpy as jnp
import numpy as np

from fedjax_lab import algorithms, data, simulate

CLIENTS, DIM = 20, 10
PROBLEMS = {
    "quadratics": data.synthetic.quadratics(CLIENTS, DIM, heterogeneity=2.0),
    "logistic regression": data.synthetic.logistic_regression(CLIENTS, DIM, heterogeneity=2.0),
}
METHODS = {
    "fedavg": {},  # local steps move it away from the optimum: client drift
    "scaffold": {},
    "feddyn": {"prox_weight": 0.5},
}


def main() -> None:
    """Train all clients on all their data in each round, so that client drift alone remains."""
    for title, problem in PROBLEMS.items():
        clients = data.partition(problem.examples, problem.client_ids, CLIENTS)
        print(f"{title}: the first model is {np.linalg.norm(problem.optimum):.1f} from the optimum")
        for name, options in METHODS.items():
            algorithm = getattr(algorithms, name)(problem.loss_fn, client_lr=0.05, **options)
            result = simulate(
                algorithm, jnp.zeros(DIM), clients, rounds=100, cohort_size=CLIENTS,
                local_steps=10, batch_size=int(clients.sizes.max()),
            )  # fmt: skip
            distance = np.linalg.norm(result.params - problem.optimum)
            print(f"{title}, {name}: {distance:.1e} from the optimum")


if __name__ == "__main__":
    main()
