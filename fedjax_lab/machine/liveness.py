"""How much memory a traced program needs, before any compiler: what is alive at once."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import tree
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_LANES, _SUBLANE_BYTES = 128, 32  # a TPU stores tiles of so many columns, and rows of so many bytes
_ELEMENTWISE = {
    *("abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type", "div"),
    *("eq", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le"),
    *("log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow"),
    *("rem", "reshape", "round", "rsqrt", "select_n", "sign", "slice", "sqrt", "square"),
    *("stop_gradient", "sub", "tanh", "xor"),
}
_UPDATES = {"scatter", "scatter-add", "dynamic_update_slice"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}


def peak_bytes(
    jaxpr: ClosedJaxpr | Jaxpr,
    size_of: Callable[[Any], int] | None = None,
    recomputes: bool = False,
    replaces: bool = False,
    donated: int = 0,
) -> int:
    """The most bytes that are alive at once while a program runs step by step.

    Arguments live throughout, but donated ones to their last use, every other value from its
    equation to its last use; a loop's body or a called function adds its own peak. What is updated
    in place takes no second one. An elementwise value that elementwise steps or reductions alone
    read is not stored but computed where it is read, as XLA does if there is one reader, and off
    the CPU also if there are more and its operands are no larger than it, or if it is a slice.

    Args:
      jaxpr: the traced program.
      size_of: the bytes of a variable; None: of its elements, without padding.
      recomputes: whether values with several readers are computed for each of them.
      replaces: whether elementwise values take the place of an operand that ends there, and
        products are added where they are computed, as on TPUs.
      donated: so many of the first arguments may be overwritten.
    """
    size_of = size_of or _nbytes
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    kept = _variables([*jaxpr.invars[donated:], *jaxpr.constvars, *jaxpr.outvars])
    readers: dict[Any, list[int]] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for variable in _variables(eqn.invars):
            readers.setdefault(variable, []).append(i)
    # When an equation is computed: its own turn, or that of the one that it is fused into.
    turn, fused = list(range(len(jaxpr.eqns))), set()
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        read_by = {reader for v in eqn.outvars for reader in readers.get(v, ())}
        if not read_by or not kept.isdisjoint(eqn.outvars):
            continue
        takers = [jaxpr.eqns[reader] for reader in read_by]
        is_layout = replaces and _transposes(eqn)
        is_product = replaces and eqn.primitive.name == "dot_general" and len(read_by) == 1
        if not is_layout:
            if not (is_product or _is_elementwise(eqn)):
                continue
            if not all(_takes_in(e) or (replaces and _transposes(e)) for e in takers):
                continue
        operands, results = (sum(map(size_of, v)) for v in (_variables(eqn.invars), eqn.outvars))
        is_slice = eqn.primitive.name == "slice"
        is_cheap = recomputes and (is_slice or operands <= 1.1 * results)
        if is_layout or is_cheap or len(read_by) == 1:
            turn[i] = max(turn[reader] for reader in read_by)
            fused.update(eqn.outvars)
    last_use = {v: max(turn[i] for i in read_by) for v, read_by in readers.items()}
    freed: dict[int, list[Any]] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in _variables(eqn.outvars) - kept - fused:
            freed.setdefault(last_use.get(v, i), []).append(v)
    for v in set(jaxpr.invars[:donated]) - kept:
        freed.setdefault(last_use.get(v, -1), []).append(v)
    live = peak = sum(map(size_of, {*jaxpr.invars, *jaxpr.constvars}))
    for i, eqn in enumerate(jaxpr.eqns):
        live += sum(size_of(v) for v in eqn.outvars if v not in fused)
        scratch = [
            _scratch_bytes(inner, size_of, recomputes, replaces) for inner in _inner(eqn.params)
        ]
        leaving = freed.get(i, [])
        results = sum(map(size_of, eqn.outvars))
        room = max(map(size_of, _replaced(eqn, leaving, replaces)), default=0)
        peak = max(peak, live - min(room, results) + max(scratch, default=0))
        live -= sum(map(size_of, leaving))
    return peak


def _is_elementwise(eqn: Any) -> bool:
    """Whether each element of its results depends on one element of each operand, or on none."""
    inner = _inner(eqn.params)
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call") and inner:
        bodies = (part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in inner)
        return all(_is_elementwise(e) for body in bodies for e in body.eqns)
    return eqn.primitive.name in _ELEMENTWISE


def _transposes(eqn: Any) -> bool:
    return eqn.primitive.name == "transpose"


def _replaced(eqn: Any, leaving: list[Any], replaces: bool) -> list[Any]:
    """Of what it and what is fused into it read last: where its result may be put."""
    if eqn.primitive.name in _UPDATES:
        return [v for v in leaving if v is eqn.invars[0]]
    return leaving if replaces and (_is_elementwise(eqn) or _transposes(eqn)) else []


def _takes_in(eqn: Any) -> bool:
    """Whether compilers compute an elementwise operand inside it."""
    return eqn.primitive.name in _REDUCTIONS or _is_elementwise(eqn)


def _scratch_bytes(
    jaxpr: ClosedJaxpr | Jaxpr, size_of: Callable[[Any], int], recomputes: bool, replaces: bool
) -> int:
    """The peak of an inner program without its arguments and results, which are alive outside."""
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    outside = _variables([*inner.invars, *inner.constvars, *inner.outvars])
    return max(peak_bytes(inner, size_of, recomputes, replaces) - sum(map(size_of, outside)), 0)


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _inner(params: dict[str, Any]) -> list[ClosedJaxpr | Jaxpr]:
    leaves = tree.leaves(
        list(params.values()), is_leaf=lambda v: isinstance(v, (ClosedJaxpr, Jaxpr))
    )
    return [leaf for leaf in leaves if isinstance(leaf, (ClosedJaxpr, Jaxpr))]


def _nbytes(variable: Any) -> int:
    aval = getattr(variable, "aval", variable)
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return getattr(aval, "size", 0) * itemsize


def tiled_bytes(variable: Any) -> int:
    """Bytes on a TPU: in tiles, over those two axes that need the least padding.

    Of five axes or more the first, which counts clients or images, is not in tiles.

    Args:
      variable: of a traced program, or an array's shape and dtype.
    """
    aval = getattr(variable, "aval", variable)
    shape = getattr(aval, "shape", ())
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    if len(shape) < 2 or not itemsize:
        return _nbytes(variable)
    rows = max(_SUBLANE_BYTES // itemsize, 1)
    shape = shape[1:] if len(shape) > 4 else shape

    def padding(size, step):
        return -(-size // step) * step / max(size, 1)

    least = min(
        padding(lane, _LANES) * padding(row, rows)
        for i, lane in enumerate(shape)
        for j, row in enumerate(shape)
        if i != j
    )
    return math.ceil(_nbytes(variable) * least)
