"""From runs to a paper's table without a line of Python: each call is a command, printed first.

    python -m fedjax_lab.recipes.command_line

``fedjax-lab`` is ``python -m fedjax_lab``. The last two commands use your own data: an .npz file
with clients' ids and float targets, which make it a regression.
"""

import importlib.util
import os
import shlex
import tempfile

import numpy as np

from fedjax_lab.command import cli

QUICK = "--model linear --rounds 10 --eval-every 5 --replace --client-map scan"
COMMANDS = f"""
run --algorithm fedavg scaffold --seeds 0 1 --partition-seed 0 --run-dir runs {QUICK}
sweep --algorithm fedavg --point client_lr=0.1,0.01 --seeds 0 1 --out rates.csv {QUICK} --quiet
report runs --quiet
report runs
report runs --format latex
report runs --format csv --out table.csv
export runs/fedavg-digits-dirichlet0.1-seed0 model.npz
export runs/fedavg-digits-dirichlet0.1-seed0 model.safetensors
rerun runs/fedavg-digits-dirichlet0.1-seed0 --quiet
run --dataset npz:patients.npz --partition natural:hospital --cohort-size 3 --run-dir own {QUICK}
report own --format markdown
"""


def write_patients(path, seed=0):
    """Write 60 patients for training, from 5 hospitals, and 20 for testing."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(80, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5]).astype(np.float32)
    hospital = np.array(["north", "south", "east", "west", "harbour"])[np.arange(60) % 5]
    np.savez(path, x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:], hospital=hospital)


def main():
    """Run all commands in an empty folder."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write_patients("patients.npz")
            for command in COMMANDS.strip().splitlines():
                if "safetensors" in command and not importlib.util.find_spec("safetensors"):
                    continue
                print(f"$ fedjax-lab {command}", flush=True)
                status = cli.main(shlex.split(command))
                assert status == 0, (command, status)
        finally:
            os.chdir(before)


if __name__ == "__main__":
    main()
