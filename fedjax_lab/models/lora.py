"""Low-rank adapters: fine-tuning a model by small matrices beside its large ones.

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: Low-Rank Adaptation of Large Language
Models. ICLR 2022, section 4: h = W_0 x + (α / r) B A x, with A random and B = 0 at the start. Here
inputs are rows, so that A^T is ``down`` and B^T is ``up``; α / r is ``scale``.

Departure: the standard deviation of A's numbers, of which the paper does not speak, is 1/√m.

Axes: m inputs and n outputs of a kernel as a matrix, r the rank.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_int
from fedjax_lab.types import Key, Params


class Adapter(NamedTuple):
    """What is added to a kernel: ``down @ up``, in the kernel's shape."""

    down: jax.Array  # float [m, r]
    up: jax.Array  # float [r, n]


def init_adapters(
    key: Key, params: Params, is_adapted: Callable[[str], bool], rank: int
) -> dict[str, Adapter]:
    """Adapters that change nothing yet: ``down`` is normal, ``up`` is 0.

    A kernel of more than two axes is taken as a matrix whose rows are its first axes, cut where
    m + n is smallest: an attention's query [F, heads, F/heads] as F x F, a convolution
    [3, 3, 64, 64] as 576 x 64.

    Args:
      key: typed PRNG key; consumed.
      params: of the model, or their shapes.
      is_adapted: path of a leaf, such as "blocks_0/attention/query/kernel" -> whether it gets one.
      rank: r, from 1 to the smaller of m and n.

    Returns:
      {path: ``Adapter``}, a pytree to be trained, in float32 or the kernel's dtype if it is wider.

    Raises:
      TypeError: ``rank`` is no integer, or an adapted leaf holds no floats.
      ValueError: ``rank`` is out of range, no leaf is adapted, or one has fewer than two axes.
    """
    check_int("rank", rank, minimum=1)
    leaves = _by_path(params)
    chosen = {path: leaf for path, leaf in leaves.items() if is_adapted(path)}
    if not chosen:
        raise ValueError(
            f"is_adapted holds for no leaf of the params. They are: {', '.join(leaves)}."
        )
    adapters = {}
    for number, (path, leaf) in enumerate(chosen.items()):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"{path} is adapted, but holds {leaf.dtype}; it must hold floats.")
        m, n = _as_matrix(path, leaf.shape)
        check_int(f"rank for {path}, {m} x {n},", rank, minimum=1, maximum=min(m, n))
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        down = jax.random.normal(jax.random.fold_in(key, number), (m, rank), dtype)
        adapters[path] = Adapter(down / np.sqrt(m), jnp.zeros((rank, n), dtype))
    return adapters


def merge_adapters(params: Params, adapters: Mapping[str, Adapter], scale: float = 1.0) -> Params:
    """The params with ``scale * down @ up`` added to each adapted kernel, in the kernel's dtype.

    Args:
      params: of the model.
      adapters: {path: ``Adapter``}, as ``init_adapters`` gives them.
      scale: α / r of the paper.

    Raises:
      ValueError: there is no leaf of an adapter's path, or its shape does not fit.
    """
    if missing := adapters.keys() - _by_path(params).keys():
        raise ValueError(f"adapters has {', '.join(sorted(missing))}; params have no such leaf.")

    def merge(path, leaf):
        name = _name(path)
        if name not in adapters:
            return leaf
        down, up = adapters[name]
        if (down.shape[0], up.shape[1]) != _as_matrix(name, leaf.shape):
            raise ValueError(
                f"adapters[{name!r}] is for {down.shape[0]} x {up.shape[1]} numbers; the leaf has "
                f"the shape {leaf.shape}."
            )
        return leaf + (scale * (down @ up)).reshape(leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(merge, params)


def _by_path(params: Params) -> dict[str, jax.Array]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _as_matrix(path: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(m, n) of a kernel as a matrix, with the smallest m + n."""
    if len(shape) < 2:
        raise ValueError(f"{path} is adapted, but has the shape {shape}; it must have two axes.")
    cuts = [(int(np.prod(shape[:i])), int(np.prod(shape[i:]))) for i in range(1, len(shape))]
    return min(cuts, key=sum)
