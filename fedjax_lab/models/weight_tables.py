"""Tables of names and layouts that map params to the arrays of weight files.

A table maps the path of each leaf, such as "layers/query/kernel", to how it is ``Stored``. The same
table is used for reading and for writing.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import repeated
from fedjax_lab.models.decoder_config import DecoderConfig
from fedjax_lab.tree import by_path
from fedjax_lab.types import Params

# Buffers in files that can be computed from the configuration.
DECODER_IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Stored(NamedTuple):
    """Storage of a leaf in a file.

    Attributes:
      name: name of the array. If it contains "{layer}", the leaf is stacked, and each layer is an
        array.
      axes: permutation of the stored array's axes that gives the leaf (of one layer); None: no
        change.
      image: (C, H, W) if the rows of a dense kernel are the pixels of flattened images: they are
        stored in this order, and in the order H, W, C in the leaf; ``axes`` is then (1, 0). None:
        no images.
    """

    name: str
    axes: tuple[int, ...] | None = None
    image: tuple[int, int, int] | None = None

    def names(self, shape: tuple[int, ...]) -> list[str]:
        """Return the names of the arrays in which a leaf of this shape is stored.

        Args:
          shape: shape of the leaf, with the axis of layers.
        """
        if not self.is_stacked:
            return [self.name]
        return [self.name.format(layer=layer) for layer in range(shape[0])]

    def parts(self, leaf: Any) -> dict[str, tuple[int, Callable[[], np.ndarray]]]:
        """Return name -> (bytes, function that returns the array), of each array of a leaf.

        Args:
          leaf: array [...], with the axis of layers.
        """

        def part(layer: int) -> np.ndarray:
            return self.to_stored(np.asarray(leaf[layer] if self.is_stacked else leaf))

        names = self.names(leaf.shape)
        size = leaf.size * leaf.dtype.itemsize // max(len(names), 1)
        return {name: (size, functools.partial(part, i)) for i, name in enumerate(names)}

    @property
    def is_stacked(self) -> bool:
        """Return True if the leaf's first axis counts layers."""
        return "{layer}" in self.name

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of each stored array.

        Args:
          shape: shape of the leaf.
        """
        shape = shape[1:] if self.is_stacked else shape
        if self.axes is None:
            return shape
        return tuple(shape[self.axes.index(axis)] for axis in range(len(self.axes)))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if a leaf of this shape can be stored in this way.

        Args:
          shape: shape of the leaf.
        """
        inner = shape[1:] if self.is_stacked else shape
        if len(inner) < len(shape) - 1 or (self.is_stacked and not shape):
            return False
        if self.axes is not None and sorted(self.axes) != list(range(len(inner))):
            return False
        return self.image is None or (self.axes == (1, 0) and math.prod(self.image) == inner[0])

    def to_leaf(self, stored: np.ndarray) -> np.ndarray:
        """Convert a stored array to the leaf's layout, as a view if possible.

        Args:
          stored: the complete array [...].
        """
        if self.image is not None:
            stored = stored.reshape(-1, *self.image).transpose(0, 2, 3, 1)
            stored = stored.reshape(len(stored), -1)
        return stored if self.axes is None else stored.transpose(self.axes)

    def to_stored(self, leaf: np.ndarray) -> np.ndarray:
        """Convert a leaf to the stored layout: the inverse of ``to_leaf``.

        Args:
          leaf: array [...], of one layer.
        """
        stored = leaf if self.axes is None else leaf.transpose(np.argsort(self.axes))
        if self.image is not None:
            channels, height, width = self.image
            stored = stored.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
            stored = stored.reshape(len(stored), -1)
        return stored


Table = Mapping[str, Stored | str]


def stored_leaves(
    leaves: Mapping[str, Any], table: Table, of_leaves: str, of_table: str
) -> dict[str, tuple[Any, Stored]]:
    """Return each leaf with how it is stored, by its path.

    Args:
      leaves: path -> array, or its shape.
      table: path of a leaf -> its name, or how it is stored.
      of_leaves, of_table: names of the two arguments, for errors.

    Raises:
      ValueError: the table does not fit the leaves.
    """
    if unlike := sorted(leaves.keys() ^ table.keys()):
        raise ValueError(
            f"{of_table} and {of_leaves} differ: {few(unlike)} is in one of them alone."
        )
    found, names = {}, []
    for path, leaf in leaves.items():
        source = table[path]
        stored = Stored(source) if isinstance(source, str) else source
        if not stored.fits(leaf.shape):
            raise ValueError(f"{of_leaves} has {leaf.shape} at {path!r}, which cannot be {stored}.")
        found[path] = leaf, stored
        names += stored.names(leaf.shape)
    if (twice := repeated(names)) is not None:
        raise ValueError(f"{of_table} has two leaves for {twice!r}.")
    return found


def few(names: Sequence[str]) -> str:
    """Return the first three of several names, and how many more there are."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + rest


def decoder_table(config: DecoderConfig) -> dict[str, Stored]:
    """Return the table of Llama and Qwen2 names for the params of ``models.decoder``.

    Args:
      config: the decoder's configuration.
    """
    modules = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    with_bias = {
        **dict.fromkeys(("query", "key", "value"), config.qkv_bias),
        "out": config.out_bias,
        **dict.fromkeys(("gate", "up", "down"), config.mlp_bias),
    }
    table = {"embedding": Stored(EMBEDDING)}
    for ours, theirs in modules.items():
        name = f"model.layers.{{layer}}.{theirs}"
        if ours.endswith("norm"):
            table[f"layers/{ours}/scale"] = Stored(f"{name}.weight")
            continue
        table[f"layers/{ours}/kernel"] = Stored(f"{name}.weight", (1, 0))
        if with_bias[ours]:
            table[f"layers/{ours}/bias"] = Stored(f"{name}.bias")
    table["norm/scale"] = Stored("model.norm.weight")
    if not config.tie:
        table["head/kernel"] = Stored(HEAD, (1, 0))
    return table


def torch_table(params: Params, layers: Mapping[str, str] | None = None) -> dict[str, Stored]:
    """Return the table of a PyTorch state dict for a network of this package.

    Kernels of convolutions become [h, w, C, F], dense kernels [m, n]. The rows of the first dense
    kernel are permuted from PyTorch's order of flattened images (C, H, W) to H, W, C; the images
    are assumed to be square. The first one is that after the last convolution in the order of the
    paths. A norm's ``scale`` is PyTorch's ``weight``. A leaf that is called ``weight`` already, as
    in Equinox, has PyTorch's layout and stays as it is, and so do flattened images behind it.

    A transposed convolution fits if it is flax's with ``transpose_kernel=True``. Without this, and
    in Equinox, its kernel has another order of axes and is not mirrored, which its shape need not
    show: convert it by hand.

    Args:
      params: the model's parameters, or their shapes.
      layers: path of a layer -> name of PyTorch's module, such as {"blocks_0/conv": "conv1"}. None:
        convolutions are conv1, conv2, ... in order and dense layers fc1, fc2, ..., as in ``cnn``,
        ``lenet5`` and the like without norms.

    Raises:
      ValueError: a layer has no name or is not in the model, a leaf is of an unknown kind, the
        rows of the first dense kernel are not square images, or a dense kernel that may be the
        first one behind the convolutions comes before them in the order of the paths.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {}  # layer -> its leaves' shapes
    for path, leaf in by_path(params).items():
        layer, _, name = path.rpartition("/")
        found.setdefault(layer, {})[name] = leaf.shape
    paths = sorted(found, key=_in_order)
    if layers is None:
        layers = dict(_numbered(paths, found))
    if unknown := sorted({*layers} ^ {*paths}):
        raise ValueError(
            f"layers has {sorted(layers)}, the params have {paths}; {unknown} is in one alone."
        )
    table: dict[str, Stored] = {}
    kernels = [found[path].get("kernel", ()) for path in paths]
    later = [shape[3] for shape in kernels if len(shape) == 4]  # channels, if none has come yet
    channels = None  # of the last convolution, until the first dense layer
    for layer in paths:
        for leaf, shape in found[layer].items():
            end = {"kernel": "weight", "scale": "weight"}.get(leaf, leaf)
            if end not in ("weight", "bias", "running_mean", "running_var"):
                raise ValueError(
                    f"params have {layer}/{leaf}, a leaf of an unknown kind; it must be kernel, "
                    "scale, weight, bias, running_mean or running_var, or in a table of your own."
                )
            if leaf == "bias" and len(shape) != 1:
                raise ValueError(
                    f"{layer}/bias has shape {shape}; reshape it to one axis, as PyTorch has it."
                )
            axes: tuple[int, ...] | None = None
            image: tuple[int, int, int] | None = None
            if leaf == "kernel" and len(shape) == 4:
                axes, channels, later = (2, 3, 1, 0), shape[3], []
            elif leaf == "kernel":
                axes = (1, 0)
                if channels is not None:
                    image, channels = _square(layer, shape, channels), None
                elif shape[0] not in later and any(shape[0] % c == 0 for c in later):
                    raise ValueError(
                        f"{layer} comes before the convolutions in the order of the paths, and its "
                        f"{shape[0]} inputs may be their images. Rename it to come behind them, or "
                        "write the table by hand, with Stored(..., (1, 0), image=(C, H, W))."
                    )
            path = f"{layer}/{leaf}" if layer else leaf  # of a network of one layer, its leaves
            table[path] = Stored(f"{layers[layer]}.{end}", axes, image)
    return table


def _numbered(
    paths: list[str], found: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> Iterator[tuple[str, str]]:
    counts = {"conv": 0, "fc": 0}
    for path in paths:
        shape = found[path].get("kernel", found[path].get("weight", ()))
        if len(shape) < 2:
            raise ValueError(f"layers is None, and {path} has no kernel; give the names of layers.")
        kind = "conv" if len(shape) == 4 else "fc"
        counts[kind] += 1
        yield path, f"{kind}{counts[kind]}"


def _square(layer: str, shape: tuple[int, ...], channels: int) -> tuple[int, int, int]:
    side = math.isqrt(shape[0] // channels)
    if side * side * channels != shape[0]:
        raise ValueError(
            f"{layer} has {shape[0]} inputs, which are no square images of {channels} channels."
        )
    return channels, side, side


def _in_order(path: str) -> list[Any]:
    """Return a sort key of paths by their numbers: blocks_2 comes before blocks_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]
