"""What importing the package costs beyond JAX: medians over fresh processes.

    python -m experiments.tools.import_time [REPEATS]

The two are timed in turn, so that a machine that slows down slows both.
"""

import statistics
import subprocess
import sys


def main(repeats: int = 7) -> None:
    """Print the medians and their difference."""
    _seconds("fedjax_lab")  # compiles the bytecode and fills the file cache
    times: dict[str, list[float]] = {"jax": [], "fedjax_lab": []}
    for _ in range(repeats):
        for module, found in times.items():
            found.append(_seconds(module))
    jax, ours = (statistics.median(found) for found in times.values())
    print(f"import jax {jax:.2f} s, import fedjax_lab {ours:.2f} s, beyond jax {ours - jax:.2f} s")


def _seconds(module: str) -> float:
    program = (
        f"import time; b = time.perf_counter(); import {module}; print(time.perf_counter() - b)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
