"""Estimates the memory of a traced program from the liveness of its values."""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import tree
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_LANES, _SUBLANE_BYTES = 128, 32  # a TPU stores tiles of so many columns, and rows of so many bytes
_ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type"),
    *("cos", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt"),
    *("integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min"),
    *("mul", "ne", "neg", "not", "or", "pow", "rem", "reshape", "round", "rsqrt", "select_n"),
    *("sign", "sin", "slice", "sqrt", "square", "squeeze", "sub", "tanh", "xor"),
}
_UPDATES = {"scatter", "scatter-add", "dynamic_update_slice"}
_CONTROL = {"cond", "scan", "while"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}


class _Machine(NamedTuple):
    platform: str
    near_bytes: int
    in_loop: bool = False


def peak_bytes(
    jaxpr: ClosedJaxpr | Jaxpr, platform: str = "cpu", donated: int = 0, near_bytes: int = 0
) -> int:
    """Estimate the peak of live bytes while a program runs step by step.

    Arguments live throughout, donated ones to their last use, and every other value from its
    equation to its last use. A called function or a branch adds its own peak. An update in place
    needs no second copy. Neither does a loop's carry, if the loop reads the old value before the
    new one exists. An elementwise value that only elementwise steps or reductions read is not
    stored but computed where it is read. XLA does so for one reader; off the CPU also for several
    readers if the operands are no larger than the value, or if it is a slice.

    On a TPU, values are in tiles (``tiled_bytes``). An elementwise result takes the place of an
    operand whose life ends, and the result of a loop or a branch that of its initial value, if
    nothing else reads it. Products are computed where they are added, and a value that several
    slices read is stored.

    Args:
      jaxpr: the traced program.
      platform: "cpu", "gpu" or "tpu".
      donated: number of leading arguments that may be overwritten.
      near_bytes: size of a separate near memory. It holds values that a function, branch or loop
        body without inner loops and branches makes and does not return; up to this size they take
        no other memory.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return _peak(jaxpr, _Machine(platform, near_bytes), set(jaxpr.invars[:donated]))


def _peak(jaxpr: Jaxpr, machine: _Machine, donated: set[Any]) -> int:
    """Compute ``peak_bytes`` of a program whose arguments ``donated`` may be overwritten."""
    recomputes, replaces = machine.platform != "cpu", machine.platform == "tpu"
    size_of: Callable[[Any], int] = tiled_bytes if replaces else _nbytes
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    eqns, results = _simplified(jaxpr, replaces)
    if replaces:
        size_of = _as_reshaped(eqns, arguments)
    kept = _variables([*(arguments - donated), *results])
    readers: dict[Any, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for variable in _variables(eqn.invars):
            readers.setdefault(variable, []).append(i)
    # The position at which an equation is computed: its own, or that of its fused reader.
    turn, fused = list(range(len(eqns))), set()
    for i, eqn in reversed(list(enumerate(eqns))):
        read_by = {reader for v in eqn.outvars for reader in readers.get(v, ())}
        if not read_by or not kept.isdisjoint(eqn.outvars):
            continue
        takers = [eqns[reader] for reader in read_by]
        if replaces and len(takers) > 1 and all(e.primitive.name == "slice" for e in takers):
            continue  # computed once for all readers
        is_layout = replaces and _transposes(eqn)
        is_product = replaces and eqn.primitive.name == "dot_general" and len(read_by) == 1
        if not is_layout:
            if not (is_product or is_elementwise(eqn)):
                continue
            if not all(_takes_in(e) or (replaces and _transposes(e)) for e in takers):
                continue
        read, made = (sum(map(_nbytes, v)) for v in (_variables(eqn.invars), eqn.outvars))
        is_slice = eqn.primitive.name == "slice"
        is_cheap = recomputes and (is_slice or read <= 1.1 * made)
        if is_layout or is_cheap or len(read_by) == 1:
            turn[i] = max(turn[reader] for reader in read_by)
            fused.update(eqn.outvars)
    last_use = {v: max(turn[i] for i in read_by) for v, read_by in readers.items()}
    freed: dict[int, list[Any]] = {}
    for i, eqn in enumerate(eqns):
        for v in _variables(eqn.outvars) - kept - fused:
            freed.setdefault(last_use.get(v, i), []).append(v)
    for v in donated - kept:
        freed.setdefault(last_use.get(v, -1), []).append(v)
    live = peak = sum(map(size_of, arguments))
    for i, eqn in enumerate(eqns):
        live += sum(size_of(v) for v in eqn.outvars if v not in fused)
        leaving = freed.get(i, [])
        peak = max(peak, live + _besides(eqn, leaving, machine, size_of))
        live -= sum(map(size_of, leaving))
    return peak


def _simplified(jaxpr: Jaxpr, ignores_names: bool) -> tuple[list[Any], list[Any]]:
    """Remove equations that return an operand unchanged: (equations, results).

    A branch under ``vmap`` begins with such selections between a value and itself. A value with a
    name, which is saved for the gradient, is stored, unless names are ignored.
    """
    same: dict[Any, Any] = {}
    identities = {"copy", "select_n", "stop_gradient", *(["name"] if ignores_names else [])}

    def whole(atoms):
        return [atom if isinstance(atom, Literal) else same.get(atom, atom) for atom in atoms]

    eqns = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=whole(eqn.invars))
        name = eqn.primitive.name
        cases = eqn.invars[1:] if name == "select_n" else eqn.invars
        if name in identities and all(v is cases[0] for v in cases):
            same[eqn.outvars[0]] = cases[0]
        else:
            eqns.append(eqn)
    return eqns, whole(jaxpr.outvars)


def _as_reshaped(eqns: list[Any], arguments: set[Any]) -> Callable[[Any], int]:
    """Return bytes on a TPU, which does not tile two axes together that a reshape separates."""
    least = {
        eqn.invars[0]: _in_tiles(eqn.outvars[0].aval, eqn.outvars[0].aval.shape)
        for eqn in eqns
        if eqn.primitive.name == "reshape" and eqn.invars[0] not in arguments
    }
    return lambda v: max(tiled_bytes(v), least.get(v, 0))


def _besides(eqn: Any, leaving: list[Any], machine: _Machine, size_of: Callable[[Any], int]) -> int:
    """Return the bytes of an equation besides operands and results, less those that are both."""
    is_tpu = machine.platform == "tpu"
    programs = _programs(eqn, machine.platform)
    if not programs or eqn.primitive.name in _UPDATES or is_elementwise(eqn):
        room = max(map(size_of, _replaceable(eqn, leaving, is_tpu)), default=0)
        return -min(room, sum(map(size_of, eqn.outvars)))
    operands, carried = eqn.invars, _carried(eqn)
    ending = leaving if is_tpu else []  # a GPU copies a loop's initial values
    given = [i for i, v in enumerate(operands) if v in ending and operands.count(v) == 1]
    copied = [operands[i] for i in carried if i not in given]
    copies = sum(size_of(v) for v in copied if not isinstance(v, Literal))
    if is_tpu and carried and not machine.in_loop:  # inside a loop they are already in order
        copies += sum(map(_copied_in_order, _variables(operands[: carried.start])))
    machine = machine._replace(in_loop=machine.in_loop or bool(carried))
    besides = []
    for inner in programs:
        shift = len(operands) - len(inner.invars)
        donated = {inner.invars[i - shift] for i in carried or given if i >= shift}
        outside = [*inner.invars, *inner.constvars, *_variables(inner.outvars)]
        is_step = all(e.primitive.name not in _CONTROL for e in inner.eqns)
        most = _peak(inner, machine._replace(near_bytes=0) if is_step else machine, donated)
        if is_step:
            lasting = [*set(inner.invars) - donated, *_variables(inner.outvars)]
            least = max(sum(map(size_of, group)) for group in (inner.invars, lasting))
            most = max(most - machine.near_bytes, min(most, least))
        besides.append(most - sum(map(size_of, outside)))
    return copies + max(besides)


def _carried(eqn: Any) -> range:
    """Return which of a loop's operands are the initial values of its carry.

    A scan takes constants, the carry and the scanned arrays; it returns the carry and the stacked
    outputs. They are distinguished by the axis of steps, which the body lacks, because the names of
    a scan's parameters differ between JAX versions.
    """
    params, name = eqn.params, eqn.primitive.name
    if name == "while":
        return range(params["cond_nconsts"] + params["body_nconsts"], len(eqn.invars))
    if name == "scan":
        (body,) = _programs(eqn, "cpu")
        over = _count_stacked(eqn.invars, body.invars)
        carried = len(eqn.outvars) - _count_stacked(eqn.outvars, body.outvars)
        return range(len(eqn.invars) - over - carried, len(eqn.invars) - over)
    return range(0)


def _count_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Count a scan's operands or results that have one axis more than in its body."""
    pairs = zip(outside, inside, strict=True)
    return sum(len(o.aval.shape) > len(i.aval.shape) for o, i in pairs)


# Name of an operation of the package's own -> (its equation) -> the program that it stands for.
WRITTEN_OUT: dict[str, Callable[[Any], ClosedJaxpr]] = {}


def _programs(eqn: Any, platform: str) -> list[Jaxpr]:
    """Return the programs of an equation: a function, a loop's body (without condition), branches.

    Of branches for several platforms, only the one for this platform counts.
    """
    if eqn.primitive.name in WRITTEN_OUT:
        return [WRITTEN_OUT[eqn.primitive.name](eqn).jaxpr]
    params = dict(eqn.params)
    params.pop("cond_jaxpr", None)
    platforms = params.get("branches_platforms")
    if platforms:
        name = {"gpu": "cuda"}.get(platform, platform)
        named = [i for i, some in enumerate(platforms) if some and name in some]
        params["branches"] = params["branches"][(named or [platforms.index(None)])[0]]
    return [part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in _inner(params)]


def is_elementwise(eqn: Any, primitives: Collection[str] = _ELEMENTWISE) -> bool:
    """Return True if a result's elements depend on at most one element of each operand.

    Args:
      eqn: an equation of a traced program.
      primitives: names of the elementwise operations that count.
    """
    inner = _inner(eqn.params)
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call") and inner:
        bodies = (part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in inner)
        return all(is_elementwise(e, primitives) for body in bodies for e in body.eqns)
    return eqn.primitive.name in primitives


def _transposes(eqn: Any) -> bool:
    return eqn.primitive.name == "transpose"


def _replaceable(eqn: Any, leaving: list[Any], replaces: bool) -> list[Any]:
    """Return the operands whose last read is here, which the result may replace."""
    if eqn.primitive.name in _UPDATES:
        return [v for v in leaving if v is eqn.invars[0]]
    return leaving if replaces and (is_elementwise(eqn) or _transposes(eqn)) else []


def _takes_in(eqn: Any) -> bool:
    """Return True if compilers fuse an elementwise operand into this equation."""
    return eqn.primitive.name in _REDUCTIONS or is_elementwise(eqn)


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _inner(params: dict[str, Any]) -> list[ClosedJaxpr | Jaxpr]:
    leaves = tree.leaves(
        list(params.values()), is_leaf=lambda v: isinstance(v, (ClosedJaxpr, Jaxpr))
    )
    return [leaf for leaf in leaves if isinstance(leaf, (ClosedJaxpr, Jaxpr))]


def count_large(jaxpr: ClosedJaxpr | Jaxpr, platform: str) -> int:
    """Count operations, also in loops and functions, with results of more than a row of lanes.

    Args:
      jaxpr: the traced program.
      platform: platform whose branches count.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    found = 0
    for eqn in jaxpr.eqns:
        programs = _programs(eqn, platform)
        is_large = any(getattr(v.aval, "size", 0) > _LANES for v in eqn.outvars)
        found += sum(count_large(inner, platform) for inner in programs) if programs else is_large
    return found


def _nbytes(variable: Any) -> int:
    aval = getattr(variable, "aval", variable)
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return getattr(aval, "size", 0) * itemsize


def tiled_bytes(variable: Any) -> int:
    """Compute bytes on a TPU, in tiles over the two axes that need the least padding.

    With five axes or more, the first one, which counts clients or images, is not tiled.

    Args:
      variable: variable of a traced program, or an array's shape and dtype.
    """
    aval = getattr(variable, "aval", variable)
    shape = getattr(aval, "shape", ())
    return _in_tiles(aval, shape[1:] if len(shape) > 4 else shape)


def _copied_in_order(variable: Any) -> int:
    """Return the bytes of the copy in axis order that a loop reads; 0 if it needs no copy.

    In a table of rows, the axis that needs the least padding becomes the lanes.
    """
    aval = getattr(variable, "aval", variable)
    shape = getattr(aval, "shape", ())
    if len(shape) < 3 or not jnp.issubdtype(aval.dtype, jnp.floating):
        return 0
    least, in_order = tiled_bytes(aval), _in_tiles(aval, shape, in_order=True)
    return in_order if in_order > least else 0


def _in_tiles(aval: Any, shape: Sequence[int], in_order: bool = False) -> int:
    """Compute the bytes of tiles over two of the axes ``shape``, or over the last two."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    if len(shape) < 2 or not itemsize:
        return _nbytes(aval)
    rows = max(_SUBLANE_BYTES // itemsize, 1)

    def padding(size, step):
        return -(-size // step) * step / max(size, 1)

    pairs = [(shape[-1], shape[-2])] if in_order else itertools.permutations(shape, 2)
    least = min(padding(lane, _LANES) * padding(row, rows) for lane, row in pairs)
    return math.ceil(_nbytes(aval) * least)
