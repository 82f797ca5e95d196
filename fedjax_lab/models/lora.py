"""Low-rank adapters (LoRA): small trained matrices beside large frozen kernels.

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: Low-Rank Adaptation of Large Language
Models. ICLR 2022, section 4: h = W_0 x + (α / r) B A x, with A random and B = 0 at the start. Here
inputs are rows, so that A^T is ``down`` and B^T is ``up``; α / r is ``scale``.

Departure: the standard deviation of A's numbers, of which the paper does not speak, is 1/√m.

Axes: m inputs and n outputs of a kernel as a matrix, r the rank, L layers with stacked kernels.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_int, check_number
from fedjax_lab.tree import by_path, path_text, wide_dtype
from fedjax_lab.types import Key, Params

# path of a leaf -> whether it is selected; or patterns such as "layers/*/kernel", of which one fits
Paths = Callable[[str], bool] | str | Sequence[str]


class Adapter(NamedTuple):
    """A low-rank update ``down @ up`` of a kernel, in the kernel's shape."""

    down: jax.Array  # float [m, r]; of stacked kernels [L, m, r]
    up: jax.Array  # float [r, n]; [L, r, n]


def init_adapters(
    key: Key, params: Params, is_adapted: Paths, rank: int, *, stacked: Paths = ()
) -> dict[str, Adapter]:
    """Create adapters with no effect yet: ``down`` is normal, ``up`` is 0.

    A kernel of more than two axes counts as a matrix: its first axes are the rows, and the others
    the columns, split where m + n is smallest. An attention's query [F, heads, F/heads] is F x F,
    and a convolution [3, 3, 64, 64] is 576 x 64.

    Args:
      key: typed PRNG key; consumed.
      params: the model's parameters, or their shapes.
      is_adapted: path of a leaf, such as "blocks_0/attention/query/kernel" -> whether it gets one;
        or a pattern, or several, such as ("layers/query/kernel", "layers/value/kernel").
      rank: r, from 1 to the smaller of m and n.
      stacked: paths of leaves whose first axis counts layers, such as ``"layers/*"`` of
        ``models.decoder``; each layer gets an adapter. If given, it must select an adapted leaf.

    Returns:
      {path: ``Adapter``}, the pytree to train, in float32 or the kernel's dtype if that is wider.

    Raises:
      TypeError: ``rank`` is not an integer, or an adapted leaf does not hold floats.
      ValueError: ``rank`` is out of range, no leaf is adapted, one has fewer than two axes, or
        ``stacked`` selects none of them.
    """
    check_int("rank", rank, minimum=1)
    leaves = by_path(params)
    adapted, in_layers = _predicate("is_adapted", is_adapted), _predicate("stacked", stacked)
    chosen = {path: leaf for path, leaf in leaves.items() if adapted(path)}
    if not chosen:
        raise ValueError(
            f"is_adapted matches no leaf of the params. The leaves are: {', '.join(leaves)}."
        )
    if stacked and not any(map(in_layers, chosen)):
        raise ValueError(
            f"stacked is {stacked!r}, which matches no adapted leaf; omit it, or match some of "
            f"{', '.join(chosen)}."
        )
    adapters = {}
    for number, (path, leaf) in enumerate(chosen.items()):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"{path} is adapted, but holds {leaf.dtype}; it must hold floats.")
        layers = leaf.shape[:1] if in_layers(path) else ()
        m, n = _as_matrix(path, leaf.shape[len(layers) :])
        check_int(f"rank for {path}, {m} x {n},", rank, minimum=1, maximum=min(m, n))
        dtype = wide_dtype(leaf.dtype)
        down = jax.random.normal(jax.random.fold_in(key, number), (*layers, m, rank), dtype)
        adapters[path] = Adapter(down / math.sqrt(m), jnp.zeros((*layers, rank, n), dtype))
    return adapters


def merge_adapters(params: Params, adapters: Mapping[str, Adapter], scale: float = 1.0) -> Params:
    """Add ``scale * down @ up`` to each adapted kernel, in the kernel's dtype.

    Args:
      params: the model's parameters.
      adapters: {path: ``Adapter``}, as ``init_adapters`` returns them.
      scale: α / r of the paper; may be traced.

    Raises:
      TypeError: a value of ``adapters`` is no ``Adapter``, or ``scale`` no number.
      ValueError: an adapter's path is not that of a leaf, its shape does not fit, or ``scale`` is
        not finite.
    """
    _check_adapters(by_path(params), adapters)
    check_number("scale", scale)

    def merge(path, leaf):
        name = path_text(path)
        if name not in adapters:
            return leaf
        down, up = adapters[name]
        _check_fits(name, leaf, adapters[name])
        return leaf + (scale * (down @ up)).reshape(leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(merge, params)


def attach_adapters(params: Params, adapters: Mapping[str, Adapter], scale: float = 1.0) -> Params:
    """Attach adapters beside their kernels, for a model that reads them there.

    ``models.decoder`` does: it adds ``scale * (x @ down) @ up`` to ``x @ kernel``, without a merged
    kernel. With bfloat16 kernels and float32 adapters, small products are not lost by rounding.
    In training, dropout applies to the inputs of adapters (``adapter_dropout``).

    Args:
      params: nested dicts; "layers/query/kernel" gets neighbours ``adapter_down``, ``adapter_up``.
        A kernel of three axes has stacked layers.
      adapters: {path: ``Adapter``}, as ``init_adapters`` returns them.
      scale: α / r of the paper; may be traced.

    Raises:
      TypeError: a value of ``adapters`` is no ``Adapter``, or ``scale`` no number.
      ValueError: an adapter's path is not that of a leaf, its shape does not fit, a kernel of
        stacked layers gets an adapter that is not, the leaf is not called "kernel" or has an
        adapter already, or ``scale`` is not finite.
    """
    leaves = by_path(params)
    _check_adapters(leaves, adapters)
    check_number("scale", scale)
    for path, adapter in adapters.items():
        folder, _, name = path.rpartition("/")
        if name != "kernel":
            raise ValueError(f"adapters has {path!r}; only a kernel can have neighbours.")
        if f"{path.removesuffix(name)}adapter_down" in leaves:
            raise ValueError(
                f"adapters has {path!r}, where params have an adapter already; merge_adapters it "
                "into the kernel first."
            )
        _check_fits(path, leaves[path], adapter)
        if leaves[path].ndim == 3 and adapter.down.ndim == 2:
            raise ValueError(
                f"adapters[{path!r}] is for one matrix; the leaf has the shape "
                f"{leaves[path].shape}, of stacked layers: pass stacked= to init_adapters."
            )
        added = {"adapter_down": adapter.down, "adapter_up": scale * adapter.up}
        params = _with_neighbours(params, folder.split("/") if folder else [], added)
    return params


def split_adapters(
    adapters: Mapping[str, Adapter],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Split adapters into (``down``, ``up``) by path, to train one and freeze the other.

    FFA-LoRA (Sun, Li, Li, Ding: Improving LoRA in Privacy-preserving Federated Learning. ICLR 2024)
    trains ``up`` only. The mean of the clients' products is then the product of the means, and
    messages are half as large.

    Args:
      adapters: {path: ``Adapter``}, as ``init_adapters`` returns them.

    Returns:
      ({path: float [m, r]}, {path: float [r, n]}); for stacked kernels with a first axis L.
    """
    return tuple(  # type: ignore[return-value]
        {path: getattr(adapter, side) for path, adapter in adapters.items()}
        for side in ("down", "up")
    )


def join_adapters(down: Mapping[str, jax.Array], up: Mapping[str, jax.Array]) -> dict[str, Adapter]:
    """Join the two parts of adapters: the inverse of ``split_adapters``.

    Args:
      down: {path: float [m, r]}, or [L, m, r].
      up: {path: float [r, n]}, or [L, r, n], of the same paths.

    Raises:
      ValueError: the paths differ.
    """
    if unlike := sorted(down.keys() ^ up.keys()):
        raise ValueError(f"down and up differ: {', '.join(unlike)} is in one of them alone.")
    return {path: Adapter(down[path], up[path]) for path in down}


def _with_neighbours(tree: Any, path: list[str], added: dict[str, Any]) -> Any:
    if not path:
        return {**tree, **added}
    return {**tree, path[0]: _with_neighbours(tree[path[0]], path[1:], added)}


def _check_adapters(leaves: Mapping[str, Any], adapters: Mapping[str, Adapter]) -> None:
    if not isinstance(adapters, Mapping):
        raise TypeError(
            f"adapters is a {type(adapters).__name__}; it must be {{path: Adapter}}, as "
            "init_adapters returns it."
        )
    for path, adapter in adapters.items():
        if not isinstance(adapter, Adapter):
            raise TypeError(
                f"adapters[{path!r}] is a {type(adapter).__name__}, not an Adapter; read "
                "adapters of a run by load_run(..., like=adapters)."
            )
    if missing := adapters.keys() - leaves.keys():
        raise ValueError(f"adapters has {', '.join(sorted(missing))}; params have no such leaf.")


def _check_fits(path: str, leaf: Any, adapter: Adapter) -> None:
    down, up = adapter
    layers = leaf.shape[: down.ndim - 2]
    m, n = _as_matrix(path, leaf.shape[len(layers) :])
    if (*layers, m) != down.shape[:-1] or (*layers, n) != (*up.shape[:-2], up.shape[-1]):
        raise ValueError(
            f"adapters[{path!r}] is for {down.shape[-2]} x {up.shape[-1]} numbers"
            f"{f' in {down.shape[0]} layers' if down.ndim > 2 else ''}; the leaf has the shape "
            f"{leaf.shape}."
        )


def _predicate(argument: str, paths: Paths) -> Callable[[str], bool]:
    if callable(paths):
        return paths
    patterns = [paths] if isinstance(paths, str) else list(paths)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{argument} is {paths!r}; it must be a function, a pattern, or several.")
    return lambda path: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _as_matrix(path: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the (m, n) of a kernel as a matrix with the smallest m + n."""
    if len(shape) < 2:
        raise ValueError(f"{path} is adapted, but has the shape {shape}; it must have two axes.")
    cuts = [(int(np.prod(shape[:i])), int(np.prod(shape[i:]))) for i in range(1, len(shape))]
    return min(cuts, key=sum)
