"""Traces a function once, where its results are needed more than once.

``jax.eval_shape`` traces a function for its shapes, and calling it traces it again. The local steps
of a client are most of what there is to trace in a round.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from fedjax_lab.machine.liveness import is_elementwise
from fedjax_lab.types import PyTree

# Operations whose results a compiler writes to memory, and elementwise ones that cost little.
_WRITTEN = {"cond", "scan", "while"}
_CHEAP = {
    *("abs", "add", "broadcast_in_dim", "convert_element_type", "div", "max", "min", "mul", "neg"),
    *("and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or", "select_n", "sign", "sqrt", "sub"),
    *("integer_pow", "square"),
}


def trace_once(function: Callable[..., PyTree], *like: Any) -> tuple[Callable[..., PyTree], PyTree]:
    """Trace a function; returns (the same function without a trace of its own, result's shapes).

    Args:
      function: pytrees of arrays -> pytree of arrays. It may close over traced values.
      like: arguments with the structure, shapes and dtypes of all later ones; values do not matter.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*like)
    expected: Any = jax.tree.structure(like)
    structure = jax.tree.structure(shapes)

    def run(*arguments):
        leaves, given = jax.tree.flatten(arguments)
        assert given == expected, f"traced for {expected}, called with {given}"
        return jax.tree.unflatten(structure, jaxpr_as_fun(traced)(*leaves))

    return run, shapes


def with_ending(
    function: Callable[..., PyTree], *arguments: Any
) -> tuple[PyTree, Callable[[], PyTree]]:
    """Call a function; returns (its result, a function that computes the result's ending again).

    A compiler writes the operands of a condition to memory, even for a branch that is not taken.
    If the branch computes the last elementwise operations itself, such as a difference of params,
    only their operands are needed, which are in memory already.

    Args:
      function: pytrees of arrays -> pytree of arrays. It may close over traced values.
      arguments: its arguments.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    whole, structure = closed.jaxpr, jax.tree.structure(shapes)
    last = _ending(whole)
    computed = {var for equation in last for var in equation.outvars}
    read = [*(var for equation in last for var in equation.invars), *whole.outvars]
    operands = [var for var in dict.fromkeys(filter(_is_var, read)) if var not in computed]
    results = [*whole.outvars, *operands]
    info = whole.debug_info._replace(arg_names=None, result_paths=None)
    first = Jaxpr(whole.constvars, whole.invars, results, whole.eqns, whole.effects, info)
    found = jaxpr_as_fun(ClosedJaxpr(first, closed.consts))(*jax.tree.leaves(arguments))
    result, values = found[: len(whole.outvars)], found[len(whole.outvars) :]

    def again():
        ending = Jaxpr([], operands, whole.outvars, last, debug_info=info)
        return jax.tree.unflatten(structure, jaxpr_as_fun(ClosedJaxpr(ending, []))(*values))

    return jax.tree.unflatten(structure, result), again


def _is_var(value: Any) -> bool:
    return isinstance(value, Var)


def _ending(whole: Jaxpr) -> list[JaxprEqn]:
    """Return the elementwise operations between values in memory and the results."""
    written, computed = {*whole.constvars, *whole.invars}, set[Any]()
    last = []
    for equation in whole.eqns:
        arrays = {var for var in filter(_is_var, equation.invars) if getattr(var.aval, "shape", ())}
        if equation.primitive.name in _WRITTEN:
            written.update(equation.outvars)
        elif is_elementwise(equation, _CHEAP) and arrays <= written | computed:
            computed.update(equation.outvars)
            last.append(equation)
    needed, kept = set(filter(_is_var, whole.outvars)), []
    for equation in reversed(last):
        if not needed.isdisjoint(equation.outvars):
            needed.update(filter(_is_var, equation.invars))
            kept.append(equation)
    return kept[::-1]
