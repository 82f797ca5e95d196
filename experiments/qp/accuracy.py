"""How accurate is `fedjax_lab.qp.project_to_cone` in float32?

    python -m experiments.qp.accuracy [--problems 1000] [--max-dim 1000000] [--recorded 0]
        [--solver auto|active_set|projected_gradient]

Draws problems of several families (random, conflicting, correlated, duplicate, opposed and zero
rows, rows nearly parallel to each other and opposed to p, extreme scales, ...), solves each
under jit and under vmap, and compares with a float64 oracle: scipy.optimize.nnls on
min_{z>=0} ||M z + p||, q = p + M z. Only the returned q and z enter the two numbers, both
computed here in float64 with unit rows u_c = M_c / ||M_c||, y_c = z_c ||M_c|| / ||p||,
s_c = <q, u_c> / ||p|| over the rows that are neither zero nor masked:

    KKT       max over c of max(-y_c, -s_c, y_c |s_c| / max(1, max y))
    distance  ||q - q_oracle|| / ||p||

and q must be p, bit for bit, where the family says that p is feasible. One line per family and
shape; the last lines give the worst of all. `spread` families: rows -p/||p|| + spread * (unit
noise). Lines marked * lie beyond what a float32 Gram matrix resolves and are kept out of the
worst: spread 0.001 (its smallest eigenvalues, spread^2, are of the size of the rounding) and
spread 0.01 with more rows than dimensions (they are far smaller still).
"""

import argparse
import time
import zlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.qp import recorded
from experiments.qp.oracle import errors, oracle
from fedjax_lab.qp import SOLVERS, project_to_cone

Problem = tuple[np.ndarray, np.ndarray]  # p [d], rows [C, d]
SINGLE = jax.jit(project_to_cone, static_argnames="solver")
FEASIBLE = ("p feasible", "p zero", "all rows zero", "no rows")


def spread_rows(rng: np.random.Generator, c: int, d: int, spread: float) -> Problem:
    """Rows nearly parallel to each other and opposed to p."""
    p, noise = rng.normal(size=d), rng.normal(size=(c, d))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    return p, -p / np.linalg.norm(p) + spread * noise


def random_rows(rng: np.random.Generator, c: int, d: int, towards: float = 0.0) -> Problem:
    """Gaussian rows; ``towards`` < 0 turns them against p."""
    p = rng.normal(size=d)
    return p, rng.normal(size=(c, d)) + towards * p


def correlated_rows(rng: np.random.Generator, c: int, d: int) -> Problem:
    """Rows that share a direction three times their own size, turned against p."""
    p, rows = random_rows(rng, c, d)
    shared = rng.normal(size=d) - 0.5 * p
    return p, rows + 3 * shared


def with_rows(rng: np.random.Generator, c: int, d: int, change: str) -> Problem:
    """Conflicting rows of which every second one is changed."""
    p, rows = random_rows(rng, c, d, -0.2)
    factor = {"duplicate": 1.0, "parallel": 1e-3, "contradict": -1.0, "zero": 0.0}[change]
    rows[1::2] = factor * rows[: 2 * (c // 2) : 2]
    return p, rows


def scaled(rng: np.random.Generator, c: int, d: int, p_scale: float, row_scale: float) -> Problem:
    """Conflicting rows and p at the given scales; row_scale 0 draws one scale per row."""
    p, rows = random_rows(rng, c, d, -0.1)
    scales = row_scale or 10 ** rng.uniform(-20, 15, size=(c, 1))
    return p_scale * p, scales * rows


def feasible(rng: np.random.Generator, c: int, d: int) -> Problem:
    """Rows turned until every one has a positive inner product with p."""
    p, rows = random_rows(rng, c, d)
    return p, rows * np.where(rows @ p < 0, -1, 1)[:, None]


FAMILIES: dict[str, Callable[[np.random.Generator, int, int], Problem]] = {
    "random": random_rows,
    "conflicting": lambda rng, c, d: random_rows(rng, c, d, -0.3),
    "correlated": correlated_rows,
    "spread 0.3": lambda rng, c, d: spread_rows(rng, c, d, 0.3),
    "spread 0.1": lambda rng, c, d: spread_rows(rng, c, d, 0.1),
    "spread 0.01": lambda rng, c, d: spread_rows(rng, c, d, 0.01),
    "duplicate": lambda rng, c, d: with_rows(rng, c, d, "duplicate"),
    "parallel": lambda rng, c, d: with_rows(rng, c, d, "parallel"),
    "contradicting": lambda rng, c, d: with_rows(rng, c, d, "contradict"),
    "zero rows among": lambda rng, c, d: with_rows(rng, c, d, "zero"),
    "all 1e-20": lambda rng, c, d: scaled(rng, c, d, 1e-20, 1e-20),
    "all 1e+15": lambda rng, c, d: scaled(rng, c, d, 1e15, 1e15),
    "p 1e+15, rows 1e-20": lambda rng, c, d: scaled(rng, c, d, 1e15, 1e-20),
    "p 1e-20, rows 1e+15": lambda rng, c, d: scaled(rng, c, d, 1e-20, 1e15),
    "rows 1e-20 to 1e+15": lambda rng, c, d: scaled(rng, c, d, 1.0, 0.0),
    "p feasible": feasible,
    "p zero": lambda rng, c, d: (np.zeros(d), rng.normal(size=(c, d))),
    "all rows zero": lambda rng, c, d: (rng.normal(size=d), np.zeros((c, d))),
    "no rows": lambda rng, c, d: (rng.normal(size=d), np.zeros((0, d))),
    "spread 0.001": lambda rng, c, d: spread_rows(rng, c, d, 1e-3),
}
SMALL = [(1, 10), (3, 50), (10, 200), (30, 1000), (100, 2000)]  # (C, d)
TIGHT = [(30, 10), (100, 50), (100, 100), (100, 120)]  # C near or above d
LARGE = [(3, 178_110), (3, 1_000_000), (100, 100_000), (100, 1_000_000)]
LARGE_FAMILIES = ("random", "conflicting", "correlated", "spread 0.3", "spread 0.1", "spread 0.01")
TIGHT_FAMILIES = (*LARGE_FAMILIES, "duplicate", "contradicting")


@partial(jax.jit, static_argnames="solver")
def batched(ps, rows, solver):
    """Many problems at once."""
    return jax.vmap(partial(project_to_cone, solver=solver))(ps, rows)


def measure(family: str, c: int, d: int, count: int, solver: str) -> tuple[float, float, list[int]]:
    """Solve ``count`` problems under jit and under vmap; return the worst errors and the counts."""
    rng = np.random.default_rng([zlib.crc32(family.encode()), c, d])
    problems = [FAMILIES[family](rng, c, d) for _ in range(count)]
    ps = np.stack([p for p, _ in problems]).astype(np.float32)
    rows = np.stack([rows for _, rows in problems]).astype(np.float32)
    del problems
    device_ps, device_rows = jnp.asarray(ps), jnp.asarray(rows)
    qs, infos = jax.device_get(batched(device_ps, device_rows, solver))
    kkt, distance, iterations = 0.0, 0.0, []
    for i in range(count):
        q, info = jax.device_get(SINGLE(device_ps[i], device_rows[i], solver=solver))
        if family in FEASIBLE:
            for answer in (q, qs[i]):
                assert answer.tobytes() == ps[i].tobytes(), f"{family}: q differs from p"
            assert info.iterations == 0, f"{family}: took steps"
        q_oracle = oracle(ps[i], rows[i])
        for answer, z in ((q, info.z), (qs[i], infos.z[i])):
            one_kkt, one_distance = errors(ps[i], rows[i], answer, z, q_oracle)
            # np.maximum, unlike max, lets a NaN through.
            kkt = float(np.maximum(kkt, one_kkt))
            distance = float(np.maximum(distance, one_distance))
        iterations += [int(info.iterations), int(infos.iterations[i])]
    return kkt, distance, iterations


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Accuracy of project_to_cone in float32.")
    parser.add_argument("--problems", type=int, default=1000, help="small problems, about")
    parser.add_argument("--solver", choices=SOLVERS, default="auto")
    parser.add_argument("--max-dim", type=int, default=1_000_000, help="largest d")
    parser.add_argument(
        "--recorded", type=int, default=0, metavar="ROUNDS",
        help="also the programs of GradMA runs of so many rounds on Fashion-MNIST",
    )  # fmt: skip
    arguments = parser.parse_args()
    each = max(1, -(-arguments.problems // (len(FAMILIES) * len(SMALL))))
    cases = [(name, c, d, each) for name in FAMILIES for c, d in SMALL]
    cases += [(name, c, d, each) for name in TIGHT_FAMILIES for c, d in TIGHT]
    cases += [(name, c, d, 2 if c * d < 1e7 else 1) for name in LARGE_FAMILIES for c, d in LARGE]

    print("float32, each problem under jit and under vmap")
    print(f"{'family':20} {'C':>4} {'d':>8} {'count':>5} {'KKT':>9} {'distance':>9}  iterations")
    begin, total, worst_kkt, worst_distance = time.perf_counter(), 0, (0.0, ""), (0.0, "")
    for name, c, d, count in cases:
        if d > arguments.max_dim or (name == "no rows" and c != SMALL[0][0]):
            continue
        kkt, distance, iterations = measure(name, c, d, count, arguments.solver)
        rows = 0 if name == "no rows" else c
        beyond = name == "spread 0.001" or (name == "spread 0.01" and c > d)
        print(
            f"{'* ' * beyond + name:20} {rows:4} {d:8} {count:5} {kkt:9.1e} {distance:9.1e}  "
            f"median {np.median(iterations):g}, max {max(iterations)}",
            flush=True,
        )
        if not beyond:
            total += count
            label = f"{name}, C = {rows}, d = {d}"
            assert np.isfinite([kkt, distance]).all(), f"{label}: not finite"
            worst_kkt = max(worst_kkt, (kkt, label))
            worst_distance = max(worst_distance, (distance, label))
    print(f"{total} problems in {time.perf_counter() - begin:.0f} s")
    print(f"worst KKT residual {worst_kkt[0]:.1e} ({worst_kkt[1]})")
    print(f"worst distance     {worst_distance[0]:.1e} ({worst_distance[1]})")
    if arguments.recorded:
        recorded.main(["--rounds", str(arguments.recorded)])


if __name__ == "__main__":
    main()
