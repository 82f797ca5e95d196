"""Softmax regression."""

from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import Classifier


def linear(num_classes: int = 10) -> Model:
    """Build softmax regression: flattened input float [B, ...] -> logits [B, num_classes].

    Its loss is convex. 7,850 parameters for 784 inputs and 10 classes.

    Args:
      num_classes: the number of logits.
    """
    return from_linen(Classifier(num_classes))
