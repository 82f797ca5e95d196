"""Damaged files of every kind that is read: an error that is meant, or a value; nothing else.

Settings (YAML, JSON), IDX, npz and packed messages are damaged at random for a fixed number of
seconds each. A damaged run directory is the business of ``tests.faults``.

    python -m tests.fuzz [--seconds 10] [--seed 0]
"""

import argparse
import collections
import gzip
import random
import struct
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import jax
import numpy as np

from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.config_file import format_settings
from fedjax_lab.data import files
from tests.compressors.vectors import ALL
from tests.faults import DAMAGES, damage

MEANT = (ValueError, TypeError, OSError)  # what a reader of files says
WORDS = (b"1e999", b"-1", b"0", b"null", b"[", b"{", b"'", b"\xff", b"NaN", b"true", b"1:30", b"!!")
D = 40  # numbers of a packed message


def settings(folder, suffix):
    """A file of settings, and what reads it."""
    file = folder / f"settings{suffix}"
    form = "yaml" if suffix == ".yaml" else "json"
    text = format_settings(RunConfig.of(algorithm="gradma").resolve().to_dict(), form)
    file.write_text(text)
    return file, lambda: RunConfig.from_file(file).resolve()


def idx(folder, zipped):
    """An IDX file, and what reads it."""
    raw = struct.pack(">4B2I", 0, 0, 8, 2, 5, 7) + bytes(range(35))
    file = folder / ("idx.gz" if zipped else "idx")
    file.write_bytes(gzip.compress(raw) if zipped else raw)
    return file, lambda: files.read_idx(file, ndim=2)


def npz(folder):
    """An npz file, and what reads it."""
    file = folder / "data.npz"
    x, y = np.zeros((6, 2), np.float32), np.arange(6)
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    return file, lambda: files.read_npz(file, "data")


def message(folder, name):
    """A packed message, and what unpacks it."""
    compressor = ALL[name]
    file = folder / f"message-{name}"
    file.write_bytes(
        compressor.pack(compressor.compress(jax.random.key(0), np.ones(D, np.float32)))
    )
    return file, lambda: compressor.unpack(file.read_bytes(), D)


def fuzz(make, seconds, chance):
    """Damage what ``make`` gives until the time is over; returns outcomes and failures."""
    outcomes, failures = collections.Counter(), []
    with tempfile.TemporaryDirectory() as name:
        file, read = make(Path(name))
        whole = file.read_bytes()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            file.write_bytes(whole)
            if chance.random() < 0.3:
                at = chance.randrange(len(whole) + 1)
                cut = at + chance.randrange(8)
                file.write_bytes(whole[:at] + chance.choice(WORDS) + whole[cut:])
            else:
                damage(file, chance.choice(DAMAGES), chance)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    read()
                outcomes["read"] += 1
            except MEANT as error:
                outcomes["refused"] += 1
                if not str(error).strip():
                    failures.append(f"{file.name}: {type(error).__name__} without a word")
            except Exception:
                last = traceback.format_exc().splitlines()
                failures.append(f"{file.name}: {last[-1]} ({last[-3].strip()})")
    return outcomes, failures


def main():
    """Print a line for each kind; exit with 1 if an error was not meant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each kind")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance, failures = random.Random(given.seed), []
    kinds = {
        "YAML": lambda folder: settings(folder, ".yaml"),
        "JSON": lambda folder: settings(folder, ".json"),
        "IDX": lambda folder: idx(folder, False),
        "IDX, gzip": lambda folder: idx(folder, True),
        "npz": npz,
    }
    for name in ("top_k", "random_k", "qsgd", "sign", "terngrad", "int8", "low_rank"):
        kinds[f"message of {name}"] = lambda folder, name=name: message(folder, name)
    for kind, make in kinds.items():
        outcomes, failed = fuzz(make, given.seconds, chance)
        failures += failed
        print(f"{kind}: {dict(outcomes)}, errors that are not meant: {len(failed)}", flush=True)
    for text, count in collections.Counter(failures).most_common(20):
        print(f"{count} times {text}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
