"""What a data set of the command line is loaded as, whatever it is read from."""

from typing import NamedTuple

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
    """

    train: data.Examples
    test: data.Examples
    clients: data.FederatedArrays | None = None
    tests: data.FederatedArrays | None = None
    classes: int | None = None
    table: str | None = None
