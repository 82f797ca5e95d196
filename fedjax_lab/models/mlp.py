"""The multi-layer perceptron of GradMA's MNIST runs.

Source: Luo, Li, Lan, Gao: GradMA: A Gradient-Memory-based Accelerated Federated Learning with
Alleviated Catastrophic Forgetting. CVPR 2023. The paper says "three linear hidden layers"; the
widths, with two hidden layers, are those of the authors' code.
Departure: that code has BatchNorm after both hidden layers (178,710 parameters, 600 running
statistics and two counters), which is ``norm="batch"`` here; the default has no norm.
"""

from collections.abc import Sequence

from fedjax_lab.checks import check_int
from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import Classifier, DenseBlock, check_norm


def mlp(
    num_classes: int = 10, *, hidden: Sequence[int] = (200, 100), norm: str | None = None
) -> Model:
    """Dense layers with ReLU: float [B, ...] -> logits [B, num_classes].

    178,110 parameters for 784 inputs and 10 classes (178,710 with a norm, and BatchNorm's 600
    running statistics).

    Args:
      num_classes: C.
      hidden: the widths of the hidden layers.
      norm: a policy of ``layers.Norm``, between each hidden layer and its ReLU; "group" needs
        even widths.

    Raises:
      ValueError: ``norm`` is no policy; a width is below 1.
      TypeError: a width is no integer.
    """
    check_norm(norm)
    widths = [check_int("hidden", width, minimum=1) for width in hidden]
    return from_linen(Classifier(num_classes, tuple(DenseBlock(width, norm) for width in widths)))
