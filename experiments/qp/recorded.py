"""The quadratic programs of real GradMA runs: how accurately were they solved?

    python -m experiments.qp.recorded [--rounds 50] [--runs 2]

Trains an MLP with GradMA on Fashion-MNIST (100 clients, 10 in a round, a memory of 100 rows) and
looks at the programs that are solved on the way, as they are solved: every round's of the server,
and some of the clients', of three rows. Measures them as ``experiments.qp.accuracy`` does, which
runs this too. Each run makes another kind: clients of few classes, whose rows disagree, and clients
that are alike and take one step from a large mini-batch, whose rows are nearly parallel.

Each is solved by both solvers. 20 rounds, 20 programs of each kind: KKT residual at most 1.1e-6,
distance to scipy's solution at most 2.1e-6 ||p||. The active set takes at most 8 steps for the
server's up to 87 rows (median 2) and 30 for the clients' three (1); projected gradient 56 (13) and
48 (12). In the second run, mean cosine of the rows 0.72 and 1.00, p was feasible every time.
"""

import argparse
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.qp.oracle import errors, oracle, unit_rows
from fedjax_lab import algorithms, data, models, qp, simulate

SOLVERS = ("active_set", "projected_gradient")  # the run goes on with the first one's answer

# partition, local steps, examples of a mini-batch, one of so many of the clients' programs
RUNS = (("dirichlet:0.1", 5, 64, 50), ("iid", 1, 500, 10))


class Solved(NamedTuple):
    """A program and its solution.

    Attributes:
      rows: C, those without a mask and not zero.
      cosine: mean cosine of the angle between two rows.
      kkt: residual, as ``experiments.qp.accuracy`` defines it.
      distance: to the oracle, over ||p||.
      iterations: of the dual.
      active: rows that pull on q.
    """

    rows: int
    cosine: float
    kkt: float
    distance: float
    iterations: int
    active: int


def measured(p, rows, mask, q, z, iterations) -> Solved:
    """Compare a solution with scipy's, in float64.

    Args:
      p: float [d].
      rows: float [C, d].
      mask: bool [C], which rows are constraints.
      q: float [d], the solution.
      z: float [C], its dual.
      iterations: that it took.
    """
    rows, z = rows[mask], z[mask]
    kkt, distance = errors(p, rows, q, z, oracle(p, rows))
    units, _, _ = unit_rows(p, rows)
    count = len(units)
    together = float(np.sum(units.sum(0) ** 2)) - count
    cosine = together / (count * (count - 1)) if count > 1 else 0.0
    return Solved(count, cosine, kkt, distance, int(iterations), int((z > 0).sum()))


def flat(leaves: Any, ndim: int) -> jax.Array:
    """A pytree's leaves as one array, behind their first ``ndim`` axes."""
    return jnp.concatenate([x.reshape(*x.shape[:ndim], -1) for x in jax.tree.leaves(leaves)], -1)


def record(partition: str, steps: int, batch_size: int, every: int, rounds: int) -> dict:
    """{("clients" or "server", solver): the programs of a run, solved by this solver}."""
    train, _ = data.load("fashion_mnist")
    clients = data.partition(train, partition, num_clients=100, seed=0)
    network = models.mlp(10)
    params = network.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(network.apply, data.preprocess())
    algorithm = algorithms.gradma(loss_fn, client_lr=0.05, memory_size=100)
    places = [(place, solver) for place in ("clients", "server") for solver in SOLVERS]
    found: dict[tuple[str, str], list[Solved]] = {place: [] for place in places}
    seen = 0
    project = qp.project_to_cone

    def keep(p, rows, mask, answers):
        nonlocal seen
        is_server = len(rows) > 3
        seen += not is_server
        if is_server or seen % every == 0:
            for solver, answer in zip(SOLVERS, answers, strict=True):
                solved = map(np.asarray, (p, rows, mask, *answer))
                found["server" if is_server else "clients", solver].append(measured(*solved))

    def recorded(p, rows, mask=None, margin=0.0, *, solver, **options):
        solved = [project(p, rows, mask, margin, solver=name, **options) for name in SOLVERS]
        used = jnp.ones(solved[0][1].z.shape, bool) if mask is None else mask
        answers = [(flat(q, 0), info.z, info.iterations) for q, info in solved]
        jax.debug.callback(keep, flat(p, 0), flat(rows, 1), used, answers)
        return solved[0]

    with mock.patch.object(qp, "project_to_cone", recorded):
        simulate(
            algorithm,
            params,
            clients,
            rounds=rounds,
            cohort_size=10,
            local_steps=steps,
            batch_size=batch_size,
            seed=0,
            client_map="scan",
            progress=False,
        )
        jax.effects_barrier()
    return found


def main(argv: list[str] | None = None) -> None:
    """Print the table.

    Args:
      argv: the command line; None: the process's.
    """
    parser = argparse.ArgumentParser(description="Accuracy of the QP in real GradMA runs.")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--runs", type=int, default=len(RUNS), help="how many of the two")
    arguments = parser.parse_args(argv)
    print("\nprograms of GradMA on Fashion-MNIST, d = 178,110, as the runs solved them")
    print(f"{'run':42} count  rows  cosine  active  KKT      distance  iterations")
    for run in RUNS[: arguments.runs]:
        for (place, solver), found in record(*run, arguments.rounds).items():
            rows, cosine, kkt, distance, iterations, active = map(
                np.array, zip(*found, strict=True)
            )
            print(
                f"{f'{run[0]}, {place}, {solver}':42} {len(found):5}  up to {rows.max()}  "
                f"{np.median(cosine):.2f}  median {np.median(active):g}, max {active.max()}  "
                f"{kkt.max():.1e}  {distance.max():.1e}  median {np.median(iterations):g}, "
                f"max {iterations.max()}",
                flush=True,
            )


if __name__ == "__main__":
    main()
