"""What a data set of the command line is loaded as, whatever it is read from."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_lab import data


class LoadedData(NamedTuple):
    """Training and test data, and the clients if they come with the data.

    Attributes:
      train, test: examples.
      clients: the federation of training examples; None: a partition divides them.
      tests: the same clients with their own test examples; None if there are none.
      classes: number of classes; None: those of the training labels, or a regression.
      table: hash of all rows, if a seed divides a table into training and test examples; or None.
        A missing value counts as the mean of all rows there, not as that of the training rows.
      with_means_of: rows [m] of ``train`` -> the same data, where the means of these rows alone
        fill gaps; None: no mean fills any.
    """

    train: data.Examples
    test: data.Examples
    clients: data.FederatedArrays | None = None
    tests: data.FederatedArrays | None = None
    classes: int | None = None
    table: str | None = None
    with_means_of: Callable[[np.ndarray], "LoadedData"] | None = None
