"""The two networks that the papers call LeNet-5 (neither has LeCun's widths by default).

Sources: Liu et al.: Improving Generalization in Federated Learning with Highly Heterogeneous Data
via Momentum-Based Stochastic Controlled Weight Averaging (FedSWA, FedMoSWA), ICML 2025, and the
benchmark FL-Simulator; Luo et al.: GradMA, CVPR 2023. The papers name the model; the layers are
those of the authors' code. The log-softmax at the end of the first network is omitted, because
cross-entropy applies it again, which makes no difference.
"""

from fedjax_lab.checks import check_choice, check_number
from fedjax_lab.models.base import Model, from_linen
from fedjax_lab.models.layers import Classifier, ConvBlock, DenseBlock, check_norm, check_widths


def lenet5(
    num_classes: int = 10,
    *,
    widths: tuple[int, int, int, int] = (64, 64, 384, 192),
    norm: str | None = None,
    padding: str = "VALID",
) -> Model:
    """Build the LeNet-5 of FedSWA and FL-Simulator: two conv5x5 64 with pool, dense 384 and 192.

    float [B, H, W, C] -> logits [B, num_classes]. 797,962 parameters for 32 x 32 x 3 and 10
    classes, 815,332 with 100.

    Args:
      num_classes: the number of logits.
      widths: channels of the two convolutions, units of the two dense layers; LeCun's own are
        (6, 16, 120, 84), a thirteenth of the parameters.
      norm: None as in the papers, or a policy of ``layers.Norm`` before every ReLU.
      padding: "VALID" as in the papers (images of at least 16 x 16 pixels), or "SAME" (4 x 4).

    Raises:
      TypeError, ValueError: ``widths`` are not four positive integers, or ``norm`` or ``padding``
        is not one of these.
    """
    sizes = check_widths("widths", widths)
    if len(sizes) != 4:
        raise ValueError(f"widths is {widths!r}; it must be four integers.")
    check_norm(norm)
    check_choice("padding", padding, ("VALID", "SAME"))
    convs = [ConvBlock(width, norm, padding) for width in sizes[:2]]
    dense = [DenseBlock(width, norm) for width in sizes[2:]]
    return from_linen(Classifier(num_classes, (*convs, *dense)))


def lenet5_gradma(
    num_classes: int = 10,
    *,
    norm: str | None = "group",
    dropout: float = 0.5,
    padding: str = "VALID",
) -> Model:
    """Build GradMA's LeNet-5: conv5x5 32, pool, conv5x5 64, pool, dense 512 and 128.

    float [B, H, W, C] -> logits [B, num_classes]. The dense layers have norm and dropout. For
    32 x 32 x 3 and 10 classes 941,834 parameters with a norm, 940,362 without. The authors'
    BatchNorm, ``norm="batch"``, adds 1,472 running statistics (in PyTorch also four counters).

    Departure: the default is GroupNorm, which normalises each example separately (two groups of
    channels, or of units in the dense layers).

    Args:
      num_classes: the number of logits.
      norm: a policy of ``layers.Norm``, before every ReLU.
      dropout: dropout rate of the two hidden dense layers in training.
      padding: "VALID" as in the code (images of at least 16 x 16 pixels), or "SAME" (4 x 4).

    Raises:
      ValueError: ``norm``, ``dropout`` or ``padding`` is not one of these.
    """
    check_norm(norm)
    check_number("dropout", dropout, minimum=0.0, maximum=1.0)
    check_choice("padding", padding, ("VALID", "SAME"))
    convs = (ConvBlock(32, norm, padding), ConvBlock(64, norm, padding))
    dense = (DenseBlock(512, norm, dropout), DenseBlock(128, norm, dropout))
    return from_linen(Classifier(num_classes, (*convs, *dense)))
