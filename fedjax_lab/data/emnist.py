"""EMNIST in the two forms that its page offers: MATLAB files and IDX files.

Both store an image column by column. Here it is upright, as MNIST's are.

Source: Cohen et al.: EMNIST: Extending MNIST to handwritten letters, IJCNN 2017.
"""

import math
from pathlib import Path

import numpy as np

from fedjax_lab.checks import errors_about
from fedjax_lab.data.files import Splits, read_idx_files

_FIRST = "-train-images-idx3-ubyte"


def read_emnist(path: Path, name: str) -> Splits:
    """Read a split of EMNIST.

    Args:
      path: a file such as emnist-letters.mat; a folder with the IDX files, packed or not, of one
        split; or, in a folder with several, the beginning of a split's files, such as
        FOLDER/emnist-letters.

    Returns:
      Of each split, x uint8 [n, 28, 28] and y integers [n] from 0. The labels of the letters, 1 to
      26 in the files, become 0 to 25.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is damaged, or a folder has several splits.
    """
    splits = _read_mat(path, name) if path.suffix == ".mat" else _read_idx(path, name)
    first = splits["train"][1].min(initial=1)
    return {
        part: (np.ascontiguousarray(x.transpose(0, 2, 1)), y.astype(np.int64) - (first == 1))
        for part, (x, y) in splits.items()
    }


def _read_idx(path: Path, name: str) -> Splits:
    folder, prefix = (path, "") if path.is_dir() else (path.parent, path.name)
    if not prefix:
        found = sorted({file.name.partition(_FIRST)[0] for file in path.glob(f"*{_FIRST}*")})
        if len(found) != 1:
            raise (ValueError if found else FileNotFoundError)(
                f"{name}: {path} has the splits {', '.join(found) or '(none)'}; there must be one,"
                f" of files SPLIT{_FIRST}. Name one of several, such as emnist:{path}/"
                f"{found[0] if found else 'emnist-letters'}."
            )
        prefix = found[0]
    return read_idx_files(folder, name, {part: f"{prefix}-{part}" for part in ("train", "test")})


def _read_mat(path: Path, name: str) -> Splits:
    from scipy import io

    if not path.is_file():
        raise FileNotFoundError(f"{name}: there is no file {path}.")
    splits = {}
    about = (
        f"{path}: damaged, or no file of EMNIST (a struct dataset with train and test, each with "
        "images uint8 [n, 784] and labels [n])"
    )
    with errors_about(about):
        found = io.loadmat(path)["dataset"][0, 0]  # a struct of MATLAB is an array [1, 1]
        for part in ("train", "test"):
            x = np.asarray(found[part][0, 0]["images"])
            y = np.asarray(found[part][0, 0]["labels"]).ravel()
            side = math.isqrt(x.shape[-1])
            if (x.dtype, y.dtype.kind, x.ndim, y.shape) != (np.uint8, "u", 2, x.shape[:1]):
                raise ValueError(
                    f"{part} has images {x.dtype} {list(x.shape)} and labels {y.dtype} "
                    f"{list(y.shape)}"
                )
            splits[part] = x.reshape(len(x), side, side), y
    return splits
