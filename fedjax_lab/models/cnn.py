"""The convolutional network of CFedAvg (MNIST and Fashion-MNIST).

Source: Yang, Liu, Bentley: CFedAvg: Achieving Efficient Communication and Fast Convergence in
Non-IID Federated Learning. MobiHoc 2021, Table 1, which prints the layers only. That there is no
padding follows from the 1024 inputs of its first dense layer (28-24-12-8-4); initialisation and
dropout, which are not stated, are PyTorch's and none.
"""

from fedjax_lab.checks import check_choice
from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import Classifier, ConvBlock, DenseBlock


def cnn(num_classes: int = 10, *, padding: str = "VALID") -> Model:
    """conv5x5 32, pool, conv5x5 64, pool, dense 512: float [B, H, W, C] -> [B, num_classes].

    582,026 parameters for 28 x 28 x 1 and 10 classes.

    Args:
      num_classes: the number of logits.
      padding: "VALID" as in the paper (images of at least 16 x 16 pixels), or "SAME" (4 x 4).

    Raises:
      ValueError: ``padding`` is neither.
    """
    check_choice("padding", padding, ("VALID", "SAME"))
    blocks = (ConvBlock(32, padding=padding), ConvBlock(64, padding=padding), DenseBlock(512))
    return from_linen(Classifier(num_classes, blocks))
