"""The multi-layer perceptron of GradMA's MNIST runs.

Source: Luo, Li, Lan, Gao: GradMA: A Gradient-Memory-based Accelerated Federated Learning with
Alleviated Catastrophic Forgetting. CVPR 2023. The paper says "three linear hidden layers". The
authors' code has two hidden layers, whose widths are used here.
Departure: that code has BatchNorm after both hidden layers (178,710 parameters, 600 running
statistics and two counters), which is ``norm="batch"`` here; the default has no norm.
"""

from collections.abc import Sequence

import numpy as np

from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import Classifier, DenseBlock, check_norm, check_widths


def mlp(
    num_classes: int = 10, *, hidden: Sequence[int] | int = (200, 100), norm: str | None = None
) -> Model:
    """Build dense layers with ReLU: float [B, ...] -> logits [B, num_classes].

    178,110 parameters for 784 inputs and 10 classes; 178,710 with a norm, and BatchNorm adds 600
    running statistics.

    Args:
      num_classes: C.
      hidden: the widths of the hidden layers, or that of a single one.
      norm: a policy of ``layers.Norm``, between each hidden layer and its ReLU; "group" needs
        even widths.

    Raises:
      ValueError: ``norm`` is not a policy, or a width is below 1.
      TypeError: a width is not an integer.
    """
    check_norm(norm)
    widths = check_widths("hidden", (hidden,) if isinstance(hidden, (int, np.integer)) else hidden)
    return from_linen(Classifier(num_classes, tuple(DenseBlock(width, norm) for width in widths)))
