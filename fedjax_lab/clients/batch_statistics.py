"""Finds losses with statistics over a mini-batch that would be wrong.

A masked place of a mini-batch holds a copy of a real example. Its loss is not counted, but a layer
such as BatchNorm averages over the examples before there is a loss. The mean is then wrong, and
nothing fails. The traced loss shows it: the axis of the examples is followed from operation to
operation. A sum along it that reaches the losses is a statistic, unless its terms were multiplied
by the mask, or selected by it.

Where the axis cannot be followed (loops, unusual operations), nothing is found: no warning at all
is better than a false one. Maxima do not count, because copies do not change them.

With ``example_clip`` a loss gets each example alone, so that BatchNorm has no mini-batch: the same
search finds that.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fedjax_lab.checks import warn
from fedjax_lab.clients.metrics import apply_loss, original_of
from fedjax_lab.machine.target import tracing_with
from fedjax_lab.models.axis_order import ELEMENTWISE
from fedjax_lab.models.batch_norm import running_statistics
from fedjax_lab.types import Key, LossFn, Params, PyTree


class _Along(NamedTuple):
    """A value with an axis of examples.

    Attributes:
      axis: the axis.
      alone: whether it consists of the examples only; else it also has other things, such as the
        pixels of each.
      weighted: whether padding is 0 in it, or it is the mask.
    """

    axis: int
    alone: bool = True
    weighted: bool = False


class _Other(NamedTuple):
    """A value that depends on the examples in another way."""

    is_statistic: bool


_STATISTIC, _UNKNOWN = _Other(True), _Other(False)
_Value = _Along | _Other | None  # None: it does not depend on the examples, or not on padding
_CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}
_SAME = {"optimization_barrier", "stop_gradient"}
_WEIGHTING = {"mul", "and", "select_n"}
_REDUCTIONS = ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin")
# Losses that were examined, for padding and for examples alone.
_padded: weakref.WeakSet[Any] = weakref.WeakSet()
_alone: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_of_batch_statistics(
    loss_fn: LossFn, params: Params, examples: PyTree, key: Key, mask: jax.Array
) -> None:
    """Warn once of a loss that counts padding in a statistic over a mini-batch.

    Args:
      loss_fn: as in ``apply_loss``. Of a function with an attribute ``original``, that function is
        remembered.
      params, examples, key, mask: arguments of ``apply_loss``; only shapes are used.
    """
    if _is_first(loss_fn, _padded) and counts_padding(loss_fn, params, examples, key, mask):
        warn(
            "loss_fn computes statistics over a mini-batch, and the mini-batches may have masked "
            "places. They hold copies of a real example, which the statistics count. Use "
            "fedjax_lab.models.batch_norm.BatchNorm in a model of from_linen, which excludes them, "
            "and a loss that passes its argument mask to model.apply(params, x, key, mask=mask); "
            "or weight your own statistics by the argument mask of loss_fn; or avoid masked places "
            "(replace=True, or batch sizes that divide the clients' sizes).",
        )


def warn_of_lone_examples(loss_fn: LossFn, params: Params, examples: PyTree, key: Key) -> None:
    """Warn once of a loss that trains with BatchNorm, and gets each example alone.

    A loss without running statistics may compare examples: it is told that there is one.

    Args:
      loss_fn, params, examples, key: as in ``warn_of_batch_statistics``.
    """
    has_statistics = any(jax.tree.leaves(running_statistics(params)))
    several = jax.tree.leaves(examples)[0].shape[0] > 1
    if not (has_statistics and several and _is_first(loss_fn, _alone)):
        return
    if counts_padding(loss_fn, params, examples, key, None):
        warn(
            "loss_fn has a BatchNorm, but with example_clip it gets each example alone: each is "
            "normalised by itself in training, and by running statistics in evaluation. Use "
            "GroupNorm (norm='group').",
        )


def _is_first(loss_fn: LossFn, examined: weakref.WeakSet[Any]) -> bool:
    """Return True if a loss is not among those that were examined, and add it to them."""
    original = original_of(loss_fn)
    try:
        is_first = original not in examined
        examined.add(original)
    except TypeError:  # it cannot be remembered
        return True
    return is_first


def counts_padding(
    loss_fn: LossFn, params: Params, examples: PyTree, key: Key, mask: jax.Array | None
) -> bool:
    """Return True if a sum over the examples, padding included, reaches the losses.

    Args:
      mask: bool [B]; None: any sum over the examples counts.
    """
    given = (params, examples, key, mask)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)
    with tracing_with("lax"):  # convolutions as they are written are the easiest to follow
        closed = jax.make_jaxpr(lambda *given: apply_loss(loss_fn, *given)[0])(*shapes)
    sizes = [len(jax.tree.leaves(part)) for part in given]
    starts = [None, _Along(0), None, _Along(0, weighted=True)]
    values = [start for start, size in zip(starts, sizes, strict=True) for _ in range(size)]
    (losses,) = _follow(closed.jaxpr, values)
    return losses == _STATISTIC


def _follow(jaxpr: Jaxpr, values: Sequence[_Value]) -> list[_Value]:
    """Compute what the results of a program are, of what its arguments are."""
    known = dict(zip(jaxpr.invars, values, strict=True))

    def read(variable):
        return None if isinstance(variable, Literal) else known.get(variable)

    for eqn in jaxpr.eqns:
        found = _results(eqn, [read(variable) for variable in eqn.invars])
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _results(eqn: JaxprEqn, values: list[_Value]) -> list[_Value]:
    name, number = eqn.primitive.name, len(eqn.outvars)
    if all(value is None for value in values):
        return [None] * number
    if name in _CALLS:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
        if isinstance(inner, Jaxpr) and len(inner.invars) == len(values):
            return _follow(inner, values)
    if name in _SAME:
        return values
    for other in (_STATISTIC, _UNKNOWN):
        if other in values:
            return [other] * number
    rule = _RULES.get(name)
    found = _UNKNOWN if rule is None else rule(eqn, values)
    return [found] * number


def _common(values: Sequence[_Value]) -> _Along | None:
    """Return the axis that all values with one have in common; None if there are several."""
    along = [value for value in values if isinstance(value, _Along)]
    if len({value.axis for value in along}) != 1:
        return None
    return _Along(along[0].axis, all(v.alone for v in along), all(v.weighted for v in along))


def _elementwise(eqn, values):
    found = _common(values)
    if found is None:
        return _UNKNOWN
    if eqn.primitive.name in _WEIGHTING:
        found = found._replace(weighted=any(v is not None and v.weighted for v in values))
    return found


def _sum(eqn, values):
    if len(values) > 1:  # of a psum
        return _UNKNOWN
    (value,) = values
    axes = [axis for axis in eqn.params["axes"] if isinstance(axis, int)]  # others are of a mesh
    if value.axis in axes:
        return None if value.weighted else _STATISTIC
    return _without(value, axes)


def _reduction(eqn, values):
    (value,) = values
    axes = eqn.params["axes"]
    return None if value.axis in axes else _without(value, axes)


def _without(value, axes):
    return value._replace(axis=value.axis - sum(axis < value.axis for axis in axes))


def _broadcast(eqn, values):
    return values[0]._replace(axis=eqn.params["broadcast_dimensions"][values[0].axis])


def _reshape(eqn, values):
    """Find the new axis that holds the old one, alone or together with its neighbours."""
    value, before, after = values[0], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    outside, size = math.prod(before[: value.axis]), before[value.axis]
    for axis, new in enumerate(after):
        ahead = math.prod(after[:axis])
        if ahead == outside and new == size:
            return value._replace(axis=axis)
        if ahead <= outside and ahead * new >= outside * size and new > size:
            fits = outside % ahead == 0 and (ahead * new) % (outside * size) == 0
            return value._replace(axis=axis, alone=False) if fits else _UNKNOWN
    return _UNKNOWN


def _transpose(eqn, values):
    return values[0]._replace(axis=tuple(eqn.params["permutation"]).index(values[0].axis))


def _squeeze(eqn, values):
    return _without(values[0], eqn.params["dimensions"])


def _kept(is_kept: Callable[[dict[str, Any], int, tuple[int, ...]], bool]):
    """Build the rule of an operation that leaves the axis alone under a condition."""

    def rule(eqn, values):
        value = values[0]
        if not isinstance(value, _Along) or any(v is not None for v in values[1:]):
            return _UNKNOWN
        return value if is_kept(eqn.params, value.axis, eqn.invars[0].aval.shape) else _UNKNOWN

    return rule


def _concatenate(eqn, values):
    found = _common(values)
    if found is None:
        return _UNKNOWN
    if None in values:
        found = found._replace(weighted=False)
    return found._replace(alone=found.alone and eqn.params["dimension"] != found.axis)


def _product(eqn, values):
    (contracting, batching), offset = eqn.params["dimension_numbers"], 0
    places, is_summed = set(), False
    for value, variable, summed, paired in zip(
        values, eqn.invars, contracting, batching, strict=True
    ):
        free = [d for d in range(variable.aval.ndim) if d not in (*summed, *paired)]
        if value is not None:
            axis = value.axis
            is_summed |= axis in summed
            if axis in paired:
                places.add(tuple(paired).index(axis))
            elif axis in free:
                places.add(len(paired) + offset + free.index(axis))
        offset += len(free)
    if is_summed:
        return None if any(v is not None and v.weighted for v in values) else _STATISTIC
    if len(places) != 1:
        return _UNKNOWN
    along = [v for v in values if v is not None]
    weighted = any(v.weighted for v in along)
    return _Along(places.pop(), all(v.alone for v in along), weighted)


def _convolution(eqn, values):
    image, kernel = values
    numbers = eqn.params["dimension_numbers"]
    groups = eqn.params["batch_group_count"]
    if kernel is not None or image.axis != numbers.lhs_spec[0] or groups != 1:
        return _UNKNOWN
    return image._replace(axis=numbers.out_spec[0])


def _gather(eqn, values):
    table, places = values
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    kept = [d for d in range(eqn.outvars[0].aval.ndim) if d not in numbers.offset_dims]
    if places is not None:  # one look-up for each example
        last = eqn.invars[1].aval.ndim - 1
        if places.axis == last:
            return _UNKNOWN
        if table is not None:
            paired = tuple(numbers.operand_batching_dims)
            pairs = tuple(numbers.start_indices_batching_dims)
            if table.axis not in paired or pairs[paired.index(table.axis)] != places.axis:
                return _UNKNOWN
        return _Along(kept[places.axis], places.alone)
    if table.axis in numbers.operand_batching_dims:
        place = numbers.operand_batching_dims.index(table.axis)
        return table._replace(axis=kept[numbers.start_indices_batching_dims[place]])
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    is_whole = eqn.params["slice_sizes"][table.axis] == shape[table.axis]
    if table.axis in gone or table.axis in numbers.start_index_map or not is_whole:
        return _UNKNOWN
    inside = [d for d in range(len(shape)) if d not in gone]
    return table._replace(axis=numbers.offset_dims[inside.index(table.axis)])


_RULES: dict[str, Callable[[JaxprEqn, list[Any]], _Value]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "reduce_sum": _sum,
    "psum": _sum,
    **dict.fromkeys(_REDUCTIONS, _reduction),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "concatenate": _concatenate,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "slice": _kept(
        lambda p, axis, shape: (
            p["start_indices"][axis] == 0
            and p["limit_indices"][axis] == shape[axis]
            and (p["strides"] is None or p["strides"][axis] == 1)
        )
    ),
    "dynamic_slice": _kept(lambda p, axis, shape: p["slice_sizes"][axis] == shape[axis]),
    "pad": _kept(lambda p, axis, shape: tuple(p["padding_config"][axis]) == (0, 0, 0)),
    "rev": _kept(lambda p, axis, shape: axis not in p["dimensions"]),
    "split": _kept(lambda p, axis, shape: p["axis"] != axis),
    "sort": _kept(lambda p, axis, shape: p["dimension"] != axis),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        _kept(lambda p, axis, shape: p["axis"] != axis),
    ),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        _kept(lambda p, axis, shape: p["window_dimensions"][axis] == 1),
    ),
}
