"""Inner products of long vectors in float32, with compensated sums and scaling against overflow.

A row is a vector of d numbers, stored as a pytree of leaves; C rows are that pytree with a leading
axis C. If devices divide the leaves (``clients.model_axis``), each device computes the products of
its parts, and these are summed. ``divided`` tells for each leaf whether it is divided.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from fedjax_lab.clients.model_axis import MODEL, are_divided, held_layout, on_each_part
from fedjax_lab.machine.target import traced_for
from fedjax_lab.qp.joined_leaves import FEW_ROWS
from fedjax_lab.types import PyTree

_MIN_BLOCK = 16_384  # numbers per row in one product; the sums over blocks are compensated
_MAX_BLOCKS = 128  # per leaf; longer leaves have longer blocks
_SAFE_SQUARE = 2.0**60  # squared norms outside [1 / this, this] are computed from scaled rows
_MANY_ROWS, _MANY_NUMBERS = 32, 2**12  # above both, a TPU uses matrix products


def inner_products(rows: PyTree, *others: PyTree) -> jax.Array:
    """Return each leaf's inner products of all rows with all others, float [leaves, C, K].

    It takes one pass over ``rows``, with the same compensated sums as in ``project_to_cone``.

    Args:
      rows: pytree of arrays [C, ...].
      others: pytrees like ``rows``, with K_1, K_2, ... in place of C; K is their sum.
    """
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(rows))
    layout = held_layout()

    def of_leaves(divided, *trees):
        products = []
        for is_divided, leaf, *other in zip(divided, *map(jax.tree.leaves, trees), strict=True):
            left = rows_of(leaf)
            right = RowBlocks(left.shape, [part.reshape(len(part), *left.shape) for part in other])
            products.append(_product([left], [right], dtype, [is_divided]))
        return jnp.stack(products)

    if layout is None:
        return of_leaves([False] * len(jax.tree.leaves(rows)), rows, *others)
    specs = tuple(layout.specs(tree) for tree in (rows, *others))
    of_parts = functools.partial(of_leaves, are_divided(specs[0]))
    return on_each_part(of_parts, layout, specs, PartitionSpec())(rows, *others)


def _split(divided: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Return the indices of leaves that each device holds entirely, and of divided leaves."""
    whole = [i for i, is_divided in enumerate(divided) if not is_divided]
    return whole, [i for i, is_divided in enumerate(divided) if is_divided]


def _over_blocks(shape: tuple[int, ...], body: Callable[..., Any], carry: Any) -> Any:
    """Fold ``body(start, length, is_new, carry)`` over blocks along the first axis of a row.

    A row keeps its axes, because flattening would rearrange it on accelerators. All blocks have
    the same length, so that the program contains ``body`` once. If that length does not divide the
    axis, the last block starts early, and ``is_new``, bool [length] or None for all, excludes what
    earlier blocks have covered. On a GPU all is one block.
    """
    size, across = math.prod(shape), math.prod(shape[1:])
    if not size:
        return carry
    if traced_for().platform == "gpu":
        return body(0, shape[0], None, carry)
    block = max(1, max(_MIN_BLOCK, math.ceil(size / _MAX_BLOCKS)) // across)
    if shape[0] <= block:
        return body(0, shape[0], None, carry)
    count = math.ceil(shape[0] / block)
    count = next((c for c in range(count, 2 * count) if shape[0] % c == 0), count)
    length = math.ceil(shape[0] / count)
    whole = length * count == shape[0]

    def one(i, carry):
        start = jnp.minimum(i * length, shape[0] - length)
        is_new = None if whole else start + jnp.arange(length) >= i * length
        return body(start, length, is_new, carry)

    return lax.fori_loop(0, count, one, carry)


def _add(total: tuple[jax.Array, jax.Array], term: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add ``term`` to a sum kept as (sum, rounding error) (Knuth's two-sum)."""
    value, error = total
    new = value + term
    part = new - value
    return new, error + ((value - (new - part)) + (term - part))


class RowBlocks(NamedTuple):
    """A leaf of C rows. Few rows are separate arrays, which avoids a stack.

    Attributes:
      shape: shape of one row, at least one axis.
      parts: arrays of this shape, each a row, or arrays [k, *shape].
    """

    shape: tuple[int, ...]
    parts: list[jax.Array]

    def num_rows(self) -> int:
        """Count the rows."""
        return sum(1 if part.shape == self.shape else len(part) for part in self.parts)

    def blocks(
        self, start: Any, length: int, dtype: Any, is_new: jax.Array | None = None
    ) -> list[jax.Array]:
        """Return a block of all parts, float [length, ...] or [k, length, ...].

        Args:
          start: its start along the first axis of a row, which has ``length``.
          length: of the block.
          dtype: of the block.
          is_new: bool [length], where the block is not 0; None: everywhere.
        """
        found = []
        for part in self.parts:
            axis = part.ndim - len(self.shape)
            block = lax.dynamic_slice_in_dim(part, start, length, axis).astype(dtype)
            if is_new is not None:
                block = jnp.where(is_new.reshape(-1, *[1] * (len(self.shape) - 1)), block, 0)
            found.append(block)
        return found


def rows_of(leaf: jax.Array) -> RowBlocks:
    """Return a leaf of rows as ``RowBlocks``.

    Args:
      leaf: [C, ...].
    """
    leaf = leaf[:, None] if leaf.ndim == 1 else leaf
    return RowBlocks(leaf.shape[1:], list(leaf) if len(leaf) <= FEW_ROWS else [leaf])


def _row_of(leaf: jax.Array) -> RowBlocks:
    return rows_of(leaf[None])


def _joined(*some: RowBlocks) -> RowBlocks:
    return RowBlocks(some[0].shape, [part for rows in some for part in rows.parts])


def _product(
    left: list[RowBlocks], right: list[RowBlocks], dtype: Any, divided: Sequence[bool]
) -> jax.Array:
    """Compute left @ right.T [C, K] of vectors, as lists of leaves, compensated over blocks."""
    whole, parts = _split(divided)
    found = [
        _own_product([left[i] for i in some], [right[i] for i in some], dtype)
        for some in (whole, parts)
        if some
    ]
    if parts:
        found[-1] = lax.psum(found[-1], MODEL)
    return found[0] if len(found) == 1 else found[0] + found[1]


def _own_product(left, right, dtype):
    total = (jnp.zeros((left[0].num_rows(), right[0].num_rows()), dtype),) * 2
    for rows, columns in zip(left, right, strict=True):

        def body(start, length, is_new, total, rows=rows, columns=columns):
            parts = rows.blocks(start, length, dtype, is_new)
            others = columns.blocks(start, length, dtype)
            return _add(total, _times(parts, others, len(rows.shape)))

        total = _over_blocks(rows.shape, body, total)
    return total[0] + total[1]


def _times(rows, columns, axes):
    """Compute inner products [C, K]; on accelerators part by part, which joins none in a copy."""
    if traced_for().platform == "cpu":
        return _matrix_product(_stacked(rows, axes), _stacked(columns, axes))
    return jnp.block([[_pair(part, other, axes) for other in columns] for part in rows])


def _pair(rows, columns, axes):
    """Compute inner products on an accelerator.

    On a GPU without loops, each of whose steps would start its kernels; its sums are trees, which
    need no blocks. On a TPU fast to compile, or fast to run if they are large: a float32 matrix
    product in full precision takes three times as long to compile there.
    """
    if rows.ndim == columns.ndim == axes:
        return jnp.sum(rows * columns).reshape(1, 1)
    rows, columns = _stacked([rows], axes), _stacked([columns], axes)
    fewest = min(len(rows), len(columns))
    if traced_for().platform == "gpu":
        return (sums_of_products if fewest <= FEW_ROWS else product_of_blocks)(rows, columns)
    many = fewest > _MANY_ROWS and rows[0].size > _MANY_NUMBERS
    takes_parts = many and rows.dtype == jnp.float32
    return (product_of_parts if takes_parts else sums_of_products)(rows, columns)


def sums_of_products(rows, columns):
    """Compute inner products [C, K] without a matrix product, whose precision a TPU chooses."""
    return jnp.sum(rows[:, None] * columns[None], axis=range(2, rows.ndim + 1))


def product_of_parts(rows, columns):
    """Compute inner products [C, K] of sums of three bfloat16 numbers, by exact float32 products.

    For 100 rows, this takes a TPU a fifteenth of the cycles of sums of products, according to its
    compiler.
    """
    along = tuple(range(1, rows.ndim))
    thirds = lax.dot_general(
        _in_bfloat16(rows),
        _in_bfloat16(columns),
        ((along, along), ((), ())),
        preferred_element_type=jnp.float32,
    )
    by_part = thirds.reshape(3, len(rows), 3, len(columns))
    pairs = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))  # the other pairs are below rounding
    return sum(by_part[i, :, j] for i, j in pairs)


def _in_bfloat16(rows):
    """Split float32 [C, ...] into bfloat16 [3 C, ...]: leading digits, the next, and the rest."""
    parts = []
    for _ in range(3):
        # XLA may remove a conversion to bfloat16 and back, so it is not used here.
        part = lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rows = rows - part
    return jnp.concatenate(parts)


def product_of_blocks(rows, columns):
    """Compute inner products [C, K] by a matrix product for each block of numbers, all at once."""
    size = rows[0].size
    count = min(_MAX_BLOCKS, math.ceil(size / _MIN_BLOCK))
    length = math.ceil(size / count)
    more = ((0, 0), (0, count * length - size))
    rows, columns = (
        jnp.pad(part.reshape(len(part), -1), more).reshape(len(part), count, length)
        for part in (rows, columns)
    )
    return jnp.einsum("cbl,kbl->bck", rows, columns, precision=lax.Precision.HIGHEST).sum(0)


def _matrix_product(rows, columns):
    """Compute inner products [C, K] by one matrix product in full precision."""
    rows, columns = (part.reshape(len(part), -1) for part in (rows, columns))
    return jnp.matmul(rows, columns.T, precision=lax.Precision.HIGHEST)


def _stacked(parts, axes):
    """Join parts of rows with ``axes`` axes: [C, ...]."""
    return jnp.concatenate([part if part.ndim > axes else part[None] for part in parts])


def _largest(rows, axes):
    return jnp.max(jnp.abs(rows), axis=range(rows.ndim - axes, rows.ndim), initial=0)


def _square(parts, scale, axes):
    """Compute scaled rows' inner products, on accelerators those of two parts once, and largest."""
    if traced_for().platform == "cpu":
        rows = _stacked(parts, axes)
        rows = rows * scale.reshape(-1, *[1] * axes)
        return _matrix_product(rows, rows), _largest(rows, axes)
    rows, start = [], 0
    for part in parts:
        count = len(part) if part.ndim > axes else 1
        factors = scale[start : start + count].reshape(-1, *[1] * axes)
        rows.append(part * factors.reshape(factors.shape[-part.ndim :]))
        start += count
    found = {}
    for i, part in enumerate(rows):
        for j, other in enumerate(rows[: i + 1]):
            found[i, j] = _pair(part, other, axes)
            found[j, i] = found[i, j].T
    square = jnp.block([[found[i, j] for j in range(len(rows))] for i in range(len(rows))])
    return square, jnp.concatenate([_largest(part, axes).reshape(-1) for part in rows])


def _gram(
    vectors: list[RowBlocks], dtype: Any, scale: jax.Array, divided: Sequence[bool]
) -> tuple[jax.Array, jax.Array]:
    """Compute the scaled vectors' inner products [K, K], compensated, and largest numbers [K]."""
    whole, parts = _split(divided)
    found = [_own_gram([vectors[i] for i in some], dtype, scale) for some in (whole, parts) if some]
    if parts:
        gram, largest = found[-1]
        found[-1] = lax.psum(gram, MODEL), lax.pmax(largest, MODEL)
    (gram, largest), *others = found
    for more, larger in others:
        gram, largest = gram + more, jnp.maximum(largest, larger)
    return gram, largest


def _own_gram(vectors, dtype, scale):
    size = len(scale)
    state = (jnp.zeros((size, size), dtype),) * 2, jnp.zeros(size, dtype)
    for rows in vectors:

        def body(start, length, is_new, state, rows=rows):
            total, largest = state
            found, new = _square(rows.blocks(start, length, dtype, is_new), scale, len(rows.shape))
            return _add(total, found), jnp.maximum(largest, new)

        state = _over_blocks(rows.shape, body, state)
    (total, error), largest = state
    return total + error, largest


def are_safe(squares: jax.Array) -> jax.Array:
    """Return whether squared norms are far from the limits of float32, bool [...].

    Args:
      squares: float [...].
    """
    return (squares > 1 / _SAFE_SQUARE) & (squares < _SAFE_SQUARE)


def scaled_gram(
    p: list[jax.Array],
    rows: list[RowBlocks],
    dtype: Any,
    mask: jax.Array | None,
    products: tuple[jax.Array, ...] | None,
    divided: Sequence[bool],
) -> tuple[jax.Array, jax.Array]:
    """Compute scales [C + 1], powers of 2, and the Gram matrix [C + 1, C + 1] of scaled (rows, p).

    A scale is 1 unless a squared norm could leave the range of float32. If all products are known,
    including p'p, nothing is computed and all scales are 1.
    """
    if products is not None and len(products) == 3:
        known, with_p, square = (jnp.asarray(product, dtype) for product in products)
        gram = jnp.block([[known, with_p[:, None]], [with_p, square]])
        return jnp.ones(len(gram), dtype), gram
    own = [_row_of(leaf) for leaf in p]
    vectors = list(map(_joined, rows, own))
    size = rows[0].num_rows() + 1
    counts = jnp.ones(size, bool) if mask is None else jnp.append(mask, True)

    def unsafe(gram):
        return counts & ~are_safe(jnp.diagonal(gram))

    def turn(state):
        _, _, scale, turns = state
        gram, largest = _gram(vectors, dtype, scale, divided)
        rescaled = jnp.ldexp(jnp.ones((), dtype), jnp.clip(-jnp.frexp(largest)[1], -126, 126))
        new = jnp.where(unsafe(gram) & (largest > 0), rescaled, 1)  # 1 for a row of zeros
        return gram, scale, new, turns + 1

    scale = jnp.ones(size, dtype)
    if products is None:
        gram, first = jnp.zeros((size, size), dtype), jnp.bool_(True)
    else:
        known, with_p = (jnp.asarray(product, dtype) for product in products)
        gram = jnp.block([[known, with_p[:, None]], [with_p, _product(own, own, dtype, divided)]])
        first = jnp.any(unsafe(gram))

    def goes_on(state):
        _, _, new, turns = state
        return jnp.where(turns == 0, first, (turns == 1) & jnp.any(new != 1))

    # One loop for unscaled and rescaled rows, so the program contains the pass over them once.
    gram, scale, *_ = lax.while_loop(goes_on, turn, (gram, scale, scale, jnp.int32(0)))
    return scale, gram


def sum_of_rows(
    rows: list[RowBlocks], weights: jax.Array, scale: jax.Array, dtype: Any
) -> list[jax.Array]:
    """Compute sum_c weights[c] rows[c] of the scaled rows.

    Args:
      rows: the leaves.
      weights: float [C].
      scale: float [C + 1], as ``scaled_gram`` returns it.
      dtype: dtype of the result.
    """
    weights = weights * scale[:-1]

    def of_leaf(leaf):
        if leaf.parts[0].shape == leaf.shape:  # one loop; XLA's CPU product is slow on few rows
            return sum(weights[c] * row.astype(dtype) for c, row in enumerate(leaf.parts))
        (leaf,) = leaf.parts
        combine = _weighted_sum if traced_for().platform == "tpu" else _weighted_product
        return combine(weights, leaf.astype(dtype))

    return [of_leaf(leaf) for leaf in rows]


def add_scaled(
    q: list[jax.Array], length: jax.Array, change: list[jax.Array], scale: jax.Array
) -> list[jax.Array]:
    """Compute q + length * change, where change is in units of the scaled q.

    Args:
      q: arrays [...].
      length: a scalar.
      change: arrays [...].
      scale: float [C + 1].
    """
    return [
        ((leaf * scale[-1] + length * new.reshape(leaf.shape)) / scale[-1]).astype(leaf.dtype)
        for leaf, new in zip(q, change, strict=True)
    ]


def _weighted_sum(weights, rows):
    return jnp.sum(weights.reshape(-1, *[1] * (rows.ndim - 1)) * rows, axis=0)


def _weighted_product(weights, rows):
    flat = jnp.matmul(weights, rows.reshape(len(rows), -1), precision=lax.Precision.HIGHEST)
    return flat.reshape(rows.shape[1:])


def along(
    q: list[jax.Array],
    change: list[jax.Array],
    rows: list[RowBlocks],
    scale: jax.Array,
    dtype: Any,
    divided: Sequence[bool],
) -> tuple[jax.Array, jax.Array]:
    """Compute the inner products of q with the scaled rows, [C], and of v with q and v, [2].

    Args:
      q: arrays [...].
      change: v, in units of the scaled q.
      rows: the leaves.
      scale: float [C + 1].
      dtype: dtype of the products.
      divided: for each leaf, whether devices divide it.
    """
    own = [_row_of(leaf.astype(dtype) * scale[-1]) for leaf in q]
    new = [_row_of(leaf) for leaf in change]
    left, right = list(map(_joined, rows, new)), list(map(_joined, own, new))
    products = _product(left, right, dtype, divided)
    return products[:-1, 0] * scale[:-1], products[-1]
