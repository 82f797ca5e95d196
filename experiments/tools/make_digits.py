"""Writes the embedded data set ``fedjax_lab/data/digits.npz`` from scikit-learn's digits.

    python -m experiments.tools.make_digits fedjax_lab/data/digits.npz

The 1,797 real 8x8 images (values 0..16) are those of the UCI test set of "Optical Recognition
of Handwritten Digits". The split is fixed: of every class, every fifth image in
scikit-learn's order is a test image, which makes it stratified and leaves nothing to a seed.
"""

import sys
import zipfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def split_digits() -> dict[str, np.ndarray]:
    """The arrays of the file: uint8 images [n, 8, 8, 1] and int32 labels [n] of both splits."""
    digits = load_digits()
    images = digits.images.astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int32)
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    return {
        "x_train": images[~is_test],
        "y_train": labels[~is_test],
        "x_test": images[is_test],
        "y_test": labels[is_test],
    }


def write(path: Path) -> None:
    """Write the file with fixed time stamps, so that the same arrays give the same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in split_digits().items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m experiments.tools.make_digits OUTPUT.npz")
    write(Path(sys.argv[1]))
