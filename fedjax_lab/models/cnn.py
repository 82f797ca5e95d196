"""The convolutional networks of CFedAvg and FAFED (MNIST, Fashion-MNIST, CIFAR-10).

Sources: Yang, Liu, Bentley: CFedAvg: Achieving Efficient Communication and Fast Convergence in
Non-IID Federated Learning. MobiHoc 2021, Table 1, which lists the layers only. The 1024 inputs of
its first dense layer imply that there is no padding (28-24-12-8-4). Wu, Huang, Hu, Huang: Faster
Adaptive Federated Learning. AAAI 2023 (FAFED), Tables 3, 4 and 5; only the third lists padding, so
the others have none. Neither paper states initialisation or dropout: here initialisation is
PyTorch's, and there is no dropout.
"""

import flax.linen as nn

from fedjax_lab.checks import check_choice, check_flag
from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import Classifier, ConvBlock, DenseBlock


def cnn(num_classes: int = 10, *, padding: str = "VALID") -> Model:
    """Build CFedAvg's CNN: conv5x5 32, pool, conv5x5 64, pool, dense 512.

    float [B, H, W, C] -> logits [B, num_classes]. 582,026 parameters for 28 x 28 x 1 and 10
    classes.

    Args:
      num_classes: the number of logits.
      padding: "VALID" as in the paper (images of at least 16 x 16 pixels), or "SAME" (4 x 4).

    Raises:
      ValueError: ``padding`` is neither.
    """
    check_choice("padding", padding, ("VALID", "SAME"))
    blocks = (ConvBlock(32, padding=padding), ConvBlock(64, padding=padding), DenseBlock(512))
    return from_linen(Classifier(num_classes, blocks))


def fafed_cnn(num_classes: int = 10, *, padding: str = "VALID", bounded: bool = True) -> Model:
    """Build FAFED's CNN: conv3x3 5, pool, conv3x3 10, pool, dense 100.

    float [B, H, W, C] -> logits [B, num_classes]. 26,620 parameters for 28 x 28 x 1 and 10 classes.
    tanh follows every layer, including the last one, as in the paper. So logits lie in [-1, 1], and
    cross-entropy over 10 classes cannot fall below log(1 + 9 / e^2) = 0.797.

    Args:
      num_classes: the number of logits.
      padding: "VALID" (images of at least 10 x 10 pixels), or "SAME" (4 x 4).
      bounded: False omits the last tanh.

    Raises:
      ValueError: ``padding`` is neither.
      TypeError: ``bounded`` is not a truth value.
    """
    check_choice("padding", padding, ("VALID", "SAME"))
    convs = [ConvBlock(size, None, padding, 3, nn.tanh) for size in (5, 10)]
    blocks = (*convs, DenseBlock(100, activation=nn.tanh))
    return from_linen(
        Classifier(num_classes, blocks, nn.tanh if check_flag("bounded", bounded) else None)
    )


def fafed_cnn_mnist(
    num_classes: int = 10, *, padding: str = "VALID", bounded: bool = True
) -> Model:
    """Build FAFED's CNN for MNIST: conv5x5 20, pool, conv5x5 50, pool, dense 500.

    float [B, H, W, C] -> logits [B, num_classes]. 431,080 parameters for 28 x 28 x 1 and 10
    classes. ReLU follows every layer, including the last one, as in the paper. So logits are at
    least 0, and a logit of 0 has no gradient.

    Args:
      num_classes: the number of logits.
      padding: "VALID" (images of at least 16 x 16 pixels), or "SAME" (4 x 4).
      bounded: False omits the last ReLU.

    Raises:
      ValueError: ``padding`` is neither.
      TypeError: ``bounded`` is not a truth value.
    """
    check_choice("padding", padding, ("VALID", "SAME"))
    blocks = (ConvBlock(20, padding=padding), ConvBlock(50, padding=padding), DenseBlock(500))
    last = nn.relu if check_flag("bounded", bounded) else None
    return from_linen(Classifier(num_classes, blocks, last))


def fafed_cnn_cifar10(num_classes: int = 10, *, bounded: bool = True) -> Model:
    """Build FAFED's CNN for CIFAR-10: three conv3x3 (16, 32, 64) with pool, dense 512 and 64.

    float [B, H, W, C] -> logits [B, num_classes], for at least 8 x 8 pixels. 581,866 parameters for
    32 x 32 x 3 and 10 classes. ReLU follows every layer, including the last one, as in
    ``fafed_cnn_mnist``.

    Args:
      num_classes: the number of logits.
      bounded: False omits the last ReLU.

    Raises:
      TypeError: ``bounded`` is not a truth value.
    """
    convs = [ConvBlock(size, padding=1, kernel_size=3) for size in (16, 32, 64)]
    blocks = (*convs, DenseBlock(512), DenseBlock(64))
    last = nn.relu if check_flag("bounded", bounded) else None
    return from_linen(Classifier(num_classes, blocks, last))
