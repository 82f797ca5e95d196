"""Models as pure functions on parameters, and the losses that train and score them.

``base`` defines the model interface, ``layers`` the common layers, and ``losses`` turns a model
into a loss function. Each family of models has a file. Your own model needs none of this: see
``docs/your_own_model.md``.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax

from fedjax_lab.checks import check_choice, check_int
from fedjax_lab.models.adapter_files import load_adapters, save_adapters
from fedjax_lab.models.base import Apply, Model, from_linen
from fedjax_lab.models.batch_norm import (
    hold_statistics,
    recompute_statistics,
    running_statistics,
)
from fedjax_lab.models.cnn import cnn, fafed_cnn, fafed_cnn_cifar10, fafed_cnn_mnist
from fedjax_lab.models.convolution import convolution
from fedjax_lab.models.decoder import decoder
from fedjax_lab.models.decoder_config import DecoderConfig, read_decoder_config
from fedjax_lab.models.generation import generate
from fedjax_lab.models.layers import Conv, GroupNorm
from fedjax_lab.models.lenet import lenet5, lenet5_gradma
from fedjax_lab.models.linear import linear
from fedjax_lab.models.lora import (
    attach_adapters,
    init_adapters,
    join_adapters,
    merge_adapters,
    split_adapters,
)
from fedjax_lab.models.losses import (
    accuracy_counts,
    classification_loss,
    language_model_loss,
    regression_loss,
    squared_error_counts,
    token_counts,
)
from fedjax_lab.models.lstm import lstm
from fedjax_lab.models.mlp import mlp
from fedjax_lab.models.pooling import max_pool
from fedjax_lab.models.precision import COMPUTE_DTYPES, mixed_precision
from fedjax_lab.models.pretrained import load_pretrained, load_safetensors, save_pretrained
from fedjax_lab.models.resnet import resnet18, resnet20
from fedjax_lab.models.state_dicts import load_state_dict, to_state_dict
from fedjax_lab.models.token_losses import answer_counts, answer_loss
from fedjax_lab.models.transformer import transformer
from fedjax_lab.models.vgg import vgg11
from fedjax_lab.models.vit import vit, vit_base
from fedjax_lab.models.weight_tables import Stored, decoder_table, torch_table
from fedjax_lab.types import Params

__all__ = [
    "COMPUTE_DTYPES",
    "LANGUAGE_MODELS",
    "MODELS",
    "Apply",
    "Conv",
    "DecoderConfig",
    "GroupNorm",
    "Model",
    "Stored",
    "accuracy_counts",
    "answer_counts",
    "answer_loss",
    "attach_adapters",
    "build",
    "classification_loss",
    "cnn",
    "convolution",
    "count_params",
    "decoder",
    "decoder_table",
    "fafed_cnn",
    "fafed_cnn_cifar10",
    "fafed_cnn_mnist",
    "from_linen",
    "generate",
    "hold_statistics",
    "init_adapters",
    "join_adapters",
    "language_model_loss",
    "lenet5",
    "lenet5_gradma",
    "linear",
    "load_adapters",
    "load_pretrained",
    "load_safetensors",
    "load_state_dict",
    "lstm",
    "max_pool",
    "merge_adapters",
    "mixed_precision",
    "mlp",
    "read_decoder_config",
    "recompute_statistics",
    "regression_loss",
    "resnet18",
    "resnet20",
    "running_statistics",
    "save_adapters",
    "save_pretrained",
    "split_adapters",
    "squared_error_counts",
    "to_state_dict",
    "token_counts",
    "torch_table",
    "transformer",
    "vgg11",
    "vit",
    "vit_base",
]

# name -> factory(num_classes=10, **options) -> Model
_FACTORIES: tuple[Callable[..., Model], ...] = (
    *(linear, mlp, cnn, fafed_cnn, fafed_cnn_mnist, fafed_cnn_cifar10, lenet5, lenet5_gradma),
    *(vgg11, resnet18, resnet20, vit, vit_base, lstm, transformer),
)
MODELS = {factory.__name__: factory for factory in _FACTORIES}

# Those that map sequences of tokens to logits of the next token; the others are classifiers.
LANGUAGE_MODELS = ("lstm", "transformer")


def build(name: str, num_classes: int, **options: Any) -> Model:
    """Build a model by name.

    Args:
      name: a key of ``MODELS``.
      num_classes: number of logits, at least 2.
      **options: keyword arguments of the model's factory.

    Raises:
      ValueError: no model has this name, or an argument is out of range.
      TypeError: the model has no such option, or an argument has the wrong type.
    """
    factory = MODELS[check_choice("name", name, MODELS)]
    allowed = [
        option for option in inspect.signature(factory).parameters if option != "num_classes"
    ]
    for option in options:
        if option not in allowed:
            raise TypeError(
                f"{option} is not an option of the model {name!r}; allowed: "
                f"{', '.join(allowed) or 'none'}."
            )
    return factory(check_int("num_classes", num_classes, minimum=2), **options)


def count_params(params: Params) -> int:
    """Count the parameters d of a pytree of arrays (or of shapes, ``jax.eval_shape``).

    Args:
      params: pytree of arrays or of ``jax.ShapeDtypeStruct``.
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
