"""Arithmetic on pytrees that keeps each leaf's dtype, whatever the dtype of the scalar.

A scalar is not rounded to the dtype of a narrow leaf. In bfloat16 a momentum of 0.99 would be
0.988, and the sum of all steps 15 % too small.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_lab.checks import repeated
from fedjax_lab.types import Key, PyTree, Scalar

add = optax.tree.add
subtract = optax.tree.sub
zeros_like = optax.tree.zeros_like

_TINY = 1e-12  # a vector of a smaller norm has no direction
_SMALL = 4096  # numbers of a leaf that is cheaper to copy than to sum alone


def add_scaled(tree: PyTree, scalar: Scalar, other: PyTree) -> PyTree:
    """Compute ``tree + scalar * other`` leaf by leaf, in the dtype of ``tree``.

    Args:
      tree: pytree of arrays.
      scalar: a number or a traced scalar.
      other: pytree like ``tree``.
    """

    def add(a, b):
        wide = widen(a)
        return (wide + jnp.asarray(scalar, wide.dtype) * b).astype(a.dtype)

    return jax.tree.map(add, tree, other)


def descend(params: PyTree, rate: Scalar, direction: PyTree) -> PyTree:
    """Take a step against ``direction``: ``params - rate * direction``, in the dtype of ``params``.

    Args:
      params: pytree of arrays.
      rate: a number or a traced scalar.
      direction: pytree like ``params``.
    """

    def step(p, u):
        wide = widen(p)
        return (wide - jnp.asarray(rate, wide.dtype) * u).astype(p.dtype)

    return jax.tree.map(step, params, direction)


def scale(tree: PyTree, scalar: Scalar) -> PyTree:
    """Compute ``scalar * tree`` in the dtype of ``tree``.

    Args:
      tree: pytree of arrays.
      scalar: a number or a traced scalar.
    """

    def times(a):
        wide = widen(a)
        return (jnp.asarray(scalar, wide.dtype) * wide).astype(a.dtype)

    return jax.tree.map(times, tree)


def average(old: PyTree, new: PyTree, decay: Scalar) -> PyTree:
    """Compute ``decay * old + (1 - decay) * new`` in the dtype of ``old``: a moving average.

    Args:
      old: pytree of arrays.
      new: pytree like ``old``.
      decay: a number or a traced scalar; at 0 and 1 the result is exactly one of the two.
    """

    def mix(a, b):
        wide = widen(a)
        weight = jnp.asarray(decay, wide.dtype)
        return (weight * wide + (1 - weight) * b).astype(a.dtype)

    return jax.tree.map(mix, old, new)


def path_text(path: Any) -> str:
    """Return the path of a leaf as text, such as "dense_0/kernel"; "" of a tree of one leaf.

    Args:
      path: of ``jax.tree_util.tree_leaves_with_path``.
    """
    return jax.tree_util.keystr(named_keys(path), simple=True, separator="/")


def named_keys(path: Any) -> Any:
    """Return the keys of a path that are names: flax's boxes around an array have none.

    An ``nnx.Variable`` in an ``nnx.State`` has the path ``["kernel"].value``.

    Args:
      path: of ``jax.tree_util.tree_leaves_with_path``.
    """
    is_box = len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
    return path[:-1] if is_box and isinstance(path[-2], jax.tree_util.DictKey) else path


def by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by their paths.

    Args:
      tree: any pytree.

    Raises:
      ValueError: two leaves have the same path, such as those of {"a/b": x, "a": {"b": y}}.
    """
    leaves = [(path_text(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
    if (twice := repeated(path for path, _ in leaves)) is not None:
        raise ValueError(f"two leaves have the path {twice!r}; rename one of them.")
    return dict(leaves)


def wide_dtype(dtype: Any) -> np.dtype:
    """Return the dtype of sums and norms, which narrow floats would round: float32, or a wider one.

    Args:
      dtype: dtype of the numbers.
    """
    return jnp.promote_types(dtype, jnp.float32)


def widen(tree: PyTree) -> PyTree:
    """Convert floating-point leaves narrower than float32 to it, as for a sum over many.

    Args:
      tree: pytree of arrays.
    """

    def one(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf.astype(wide_dtype(leaf.dtype))

    return jax.tree.map(one, tree)


def norm(tree: PyTree, squared: bool = False) -> jax.Array:
    """Compute the Euclidean norm of a tree; a scalar, float32 or wider.

    Args:
      tree: pytree of floating-point arrays.
      squared: return its square.
    """
    total = sum(jnp.square(leaf).sum() for leaf in _few(widen(tree)))
    return jnp.asarray(total if squared else jnp.sqrt(total))


def _few(tree: PyTree, axes: int = 0) -> list[jax.Array]:
    """Join the small leaves of each dtype, so that sums over all leaves need fewer kernels.

    ``axes`` leading axes are kept, because devices may divide them.

    A compiler makes up to three kernels of each sum, whatever its length. With small leaves joined,
    the norm of an MLP compiles and runs in about half the time.
    """
    small = [jnp.size(leaf) <= _SMALL for leaf in jax.tree.leaves(tree)]
    arrays = Joined.of(tree, small, axes).arrays
    return [_flat(array, axes) if array.size <= _SMALL else array for array in arrays]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined:
    """A pytree whose small leaves of each dtype are one array, so that programs are small.

    Attributes:
      arrays: leaves that stay alone, then one array [..., n] for each dtype of the small ones; a
        map over clients may add leading axes.
      groups: for each array, the indices of its leaves.
      shapes: shapes of the leaves, without leading axes.
      structure: structure of the tree.
    """

    arrays: list[jax.Array]
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: PyTree, small: Sequence[bool] | None = None, axes: int = 0) -> "Joined":
        """Join the small leaves of a tree.

        Args:
          tree: pytree of arrays.
          small: for each leaf, whether it is joined. None: all are.
          axes: number of leading axes, which all leaves share and which are kept.
        """
        leaves, structure = jax.tree.flatten(tree)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        alone: list[list[int]] = []
        together: dict[jnp.dtype, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if small is None or small[index]:
                together.setdefault(leaf.dtype, []).append(index)
            else:
                alone.append([index])
        groups = [*alone, *together.values()]
        arrays = [_concatenated([leaves[index] for index in group], axes) for group in groups]
        shapes = tuple(leaf.shape[axes:] for leaf in leaves)
        return cls(arrays, tuple(map(tuple, groups)), shapes, structure)

    def separate(self) -> PyTree:
        """Return the tree."""
        leaves: dict[int, jax.Array] = {}
        for array, group in zip(self.arrays, self.groups, strict=True):
            shapes = [self.shapes[index] for index in group]
            leaves.update(zip(group, _cut(array, shapes), strict=True))
        return jax.tree.unflatten(self.structure, [leaves[i] for i in range(len(leaves))])


def _concatenated(leaves: list[jax.Array], axes: int) -> jax.Array:
    """Concatenate leaves behind their leading axes; a single leaf keeps its shape."""
    if len(leaves) == 1:
        return leaves[0]
    return jnp.concatenate([_flat(leaf, axes) for leaf in leaves], axis=axes)


def _flat(leaf: jax.Array, axes: int) -> jax.Array:
    return leaf.reshape(*leaf.shape[:axes], math.prod(leaf.shape[axes:]))


def _cut(array: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Undo ``_concatenated``, with any number of leading axes."""
    if len(shapes) == 1:
        return [array]
    sizes = [math.prod(shape) for shape in shapes]
    ends = np.cumsum(sizes)
    return [
        jax.lax.slice_in_dim(array, end - size, end, axis=-1).reshape(*array.shape[:-1], *shape)
        for end, size, shape in zip(ends, sizes, shapes, strict=True)
    ]


def scale_rows(stacked: PyTree, factors: jax.Array) -> PyTree:
    """Multiply each client's row or message by its factor, in the dtype of ``stacked``.

    Args:
      stacked: pytree of arrays [S, ...].
      factors: float [S].
    """

    def times(leaf):
        wide = widen(leaf)
        return (along(factors.astype(wide.dtype), leaf) * wide).astype(leaf.dtype)

    return jax.tree.map(times, stacked)


def along(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Reshape one number per client so that it broadcasts over a leaf.

    Args:
      values: [S].
      leaf: [S, ...].

    Returns:
      [S, 1, ...], with as many axes as the leaf.
    """
    return values.reshape(-1, *(1,) * (leaf.ndim - 1))


def normal_like(key: Key, tree: PyTree) -> PyTree:
    """Draw standard normal numbers with the structure, shapes and dtypes of a tree.

    Args:
      key: typed PRNG key; consumed.
      tree: pytree of floating-point arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))

    def draw(key, leaf):  # in bfloat16 JAX draws one of 128 numbers, with a mean of -0.01
        return jax.random.normal(key, leaf.shape, wide_dtype(leaf.dtype)).astype(leaf.dtype)

    return jax.tree.unflatten(structure, list(map(draw, keys, leaves)))


def where(condition: jax.Array, tree: PyTree, other: PyTree) -> PyTree:
    """Return ``tree`` if the scalar ``condition`` is true, else ``other``.

    Args:
      condition: bool scalar.
      tree: pytree of arrays.
      other: pytree like ``tree``.
    """
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), tree, other)


def zero_unless(condition: jax.Array, tree: PyTree) -> PyTree:
    """Return ``tree`` if the scalar ``condition`` is true, else zeros, even for NaN values.

    Args:
      condition: bool scalar.
      tree: pytree of arrays.
    """
    return jax.tree.map(lambda a: jnp.where(condition, a, jnp.zeros_like(a)), tree)


def weighted_sum(stacked: PyTree, weights: jax.Array) -> PyTree:
    """Compute sum_i weights[i] * stacked[i] over the leading axis, in the dtype of ``stacked``.

    Args:
      stacked: pytree of arrays [S, ...].
      weights: float [S].
    """

    def total(leaf):
        wide = widen(leaf)
        coefficients = weights.astype(wide.dtype)
        summed = jnp.tensordot(coefficients, wide, axes=1, precision=jax.lax.Precision.HIGHEST)
        return summed.astype(leaf.dtype)

    return jax.tree.map(total, stacked)


def all_finite(tree: PyTree, axes: int = 0) -> jax.Array:
    """Return a bool scalar: whether all floating-point numbers of a tree are finite.

    Args:
      tree: pytree of arrays.
      axes: number of leading axes that all leaves share and devices may divide.
    """
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    # 0 * x is NaN if x is not finite. Adding these products takes half as long as isfinite. Leaves
    # of one shape, such as those of params and momentum, are added first, in the same kernel.
    groups: dict[Any, jax.Array] = {}
    for leaf in leaves:
        alike = jnp.shape(leaf), jnp.result_type(leaf)
        groups[alike] = groups[alike] + leaf * 0 if alike in groups else leaf
    return jnp.asarray(sum((leaf * 0).sum() for leaf in _few(list(groups.values()), axes)) == 0)


def stack(trees: list[PyTree]) -> PyTree:
    """Stack trees of the same structure along a new leading axis.

    Args:
      trees: S pytrees of equal shapes.

    Returns:
      Pytree of arrays [S, ...].
    """
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def with_rows(tree: PyTree, count: int) -> PyTree:
    """Return the shapes of a tree with another number of rows.

    Args:
      tree: pytree [n, ...] of arrays, or of shapes.
      count: number of rows, the new n.
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), tree)


def flatten(tree: PyTree, leading: int = 0) -> jax.Array:
    """Concatenate all numbers of a tree into one array [..., d], keeping ``leading`` axes.

    Args:
      tree: pytree of arrays.
      leading: number of leading axes that all leaves share.
    """
    leaves = jax.tree.leaves(tree)
    return jnp.concatenate([_flat(leaf, leading) for leaf in leaves], axis=-1)


def unflatten(vector: jax.Array, like: PyTree) -> PyTree:
    """Reverse ``flatten`` for a tree with the structure, shapes and dtypes of ``like``.

    Args:
      vector: [d].
      like: pytree of arrays with d numbers in total.
    """
    leaves, structure = jax.tree.flatten(like)
    parts = _cut(vector, [leaf.shape for leaf in leaves])
    parts = [
        part.reshape(leaf.shape).astype(leaf.dtype)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def unit(tree: PyTree) -> PyTree:
    """Divide ``tree`` by its norm; the result and its derivative are 0 for a norm below 1e-12.

    Args:
      tree: pytree of arrays.
    """
    squared = norm(tree, squared=True)
    has_direction = squared > _TINY**2
    length = jnp.sqrt(jnp.where(has_direction, squared, 1))
    return scale(tree, jnp.where(has_direction, 1 / length, 0))


def nbytes(tree: PyTree) -> int:
    """Compute the size of all leaves in bytes.

    Args:
      tree: pytree of arrays or of ``jax.ShapeDtypeStruct``.
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def safe_divide(numerator: Scalar, denominator: Scalar) -> jax.Array:
    """Compute ``numerator / denominator``; the result is 0 where the denominator is 0.

    Args:
      numerator: a number, or an array [...].
      denominator: a number, or an array [...].
    """
    denominator = jnp.asarray(denominator)
    nonzero = denominator != 0
    return jnp.where(nonzero, numerator / jnp.where(nonzero, denominator, 1), 0)
