"""A small decoder-only transformer for text that is trained from scratch.

The layers are those of ``decoder`` (Llama's: RMSNorm, rotary positions, a gated perceptron), where
their sources and departures are: Touvron et al., LLaMA, 2023. The sizes suit clients. No dropout.
"""

from fedjax_lab.checks import check_int
from fedjax_lab.models.base import Model
from fedjax_lab.models.decoder import decoder
from fedjax_lab.models.decoder_config import DecoderConfig


def transformer(
    num_classes: int,
    *,
    width: int = 128,
    depth: int = 2,
    num_heads: int = 4,
    mlp_width: int | None = None,
    tie: bool = False,
    max_length: int = 2048,
) -> Model:
    """Build a decoder-only transformer: tokens int [B, L] -> float32 [B, L, num_classes].

    The results are the logits of each next token. 461,440 parameters for 256 bytes.

    Args:
      num_classes: size of the vocabulary, V.
      width: size of a token's vector, a multiple of twice ``num_heads``.
      depth: number of layers.
      num_heads: number of attention heads.
      mlp_width: size of the perceptron's hidden layer; None: 8/3 of ``width``, rounded up to a
        multiple of 8.
      tie: whether the last layer is the transpose of the embedding.
      max_length: the longest sequence, L.

    Raises:
      TypeError: a size is not an integer.
      ValueError: a size is out of range; when called: tokens are not integers [B, L], or are longer
        than ``max_length``.
    """
    for name, size in (("width", width), ("depth", depth), ("num_heads", num_heads)):
        check_int(name, size, minimum=1)
    if width % (2 * num_heads):
        raise ValueError(
            f"width is {width} and num_heads {num_heads}; width must be a multiple of twice "
            "num_heads."
        )
    hidden = (
        -(-width // 3) * 8 if mlp_width is None else check_int("mlp_width", mlp_width, minimum=1)
    )
    return decoder(
        DecoderConfig(
            vocab_size=check_int("num_classes", num_classes, minimum=2),
            width=width,
            num_layers=depth,
            num_heads=num_heads,
            mlp_width=hidden,
            tie=tie,
            max_length=max_length,
        )
    )
