"""VGG-11 for small images, with the short heads of the federated-learning papers.

Sources: Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition.
ICLR 2015, configuration A. Liu et al. (FedSWA, FedMoSWA), ICML 2025, and Luo et al. (GradMA), CVPR
2023, name the model; its last layers are those of their code. The log-softmax at the end of
FedSWA's is omitted, because cross-entropy applies it again, which makes no difference.
"""

from collections.abc import Sequence

from fedjax_lab.checks import check_int, check_number
from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import Classifier, ConvBlock, DenseBlock, check_norm, check_widths

# Width in units of the first layer's width, and whether a max-pool follows.
_LAYERS = (
    *((1, True), (2, True), (4, False), (4, True)),
    *((8, False), (8, True), (8, False), (8, True)),
)


def vgg11(
    num_classes: int = 10,
    *,
    norm: str | None = None,
    hidden: Sequence[int] | None = None,
    dropout: float = 0.0,
    width: int = 64,
) -> Model:
    """Build VGG-11: eight conv3x3 in five blocks with pools, then hidden dense layers.

    float [B, H, W, C] -> logits [B, num_classes], for at least 32 x 32 pixels. For 32 x 32 x 3:
    9,272,790 parameters with 10 classes, 9,377,508 with 100 (FedSWA). GradMA's is
    ``norm="batch", hidden=(128,), dropout=0.5``: 9,304,548 with 100 classes, and 5,504 running
    statistics (the authors' code defines it, but offers no way to choose it).

    Args:
      num_classes: the number of logits.
      norm: None as in FedSWA, or a policy of ``layers.Norm``, before the ReLU of each convolution.
      hidden: the widths of the hidden dense layers. None: 100 for up to 10 classes and 256 for
        more, as in FedSWA.
      dropout: dropout rate of the hidden dense layers in training.
      width: the width of the first convolution; the others are 2, 4 and 8 times as wide.

    Raises:
      ValueError: an argument is out of range.
      TypeError: a width is not an integer, or ``hidden`` is not a sequence.
    """
    check_norm(norm)
    check_number("dropout", dropout, minimum=0.0, maximum=1.0)
    width = check_int("width", width, minimum=1)
    if hidden is None:
        hidden = (100,) if check_int("num_classes", num_classes, minimum=1) <= 10 else (256,)
    convs = [
        ConvBlock(factor * width, norm, padding=1, kernel_size=3, pool=pool)
        for factor, pool in _LAYERS
    ]
    dense = [DenseBlock(size, dropout=dropout) for size in check_widths("hidden", hidden)]
    return from_linen(Classifier(num_classes, (*convs, *dense)))
