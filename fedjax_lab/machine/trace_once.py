"""Traces a function once, where its results are needed more than once; and says what it uses.

``jax.eval_shape`` traces a function for its shapes, and calling it traces it again. The local steps
of a client are most of what there is to trace in a round.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_lab.types import PyTree


def trace_once(function: Callable[..., PyTree], *like: Any) -> tuple[Callable[..., PyTree], PyTree]:
    """Trace a function; returns (the same function without a trace of its own, result's shapes).

    Args:
      function: pytrees of arrays -> pytree of arrays. It may close over traced values.
      like: arguments with the structure, shapes and dtypes of all later ones; values do not matter.
    """
    run, values, shapes = trace_open(function, *like)
    return functools.partial(run, values), shapes


def trace_open(
    function: Callable[..., PyTree], *like: Any
) -> tuple[Callable[..., PyTree], list[jax.Array], PyTree]:
    """As ``trace_once``, with the arrays that the function closes over as its first argument.

    Returns:
      (the function of (these arrays, arguments), these arrays, the result's shapes).
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*like)
    expected: Any = jax.tree.structure(like)
    structure = jax.tree.structure(shapes)

    def run(values, *arguments):
        leaves, given = jax.tree.flatten(arguments)
        assert given == expected, f"traced for {expected}, called with {given}"
        results = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, values))(*leaves)
        return jax.tree.unflatten(structure, results)

    return run, traced.consts, shapes


def used_inputs(traced: ClosedJaxpr) -> list[bool]:
    """Say of each input of a traced function whether a result depends on it."""
    return _used(traced)[1]


def used_operations(traced: ClosedJaxpr) -> Jaxpr:
    """Return what of a traced function the results depend on."""
    return _used(traced)[0]


def _used(traced: ClosedJaxpr) -> tuple[Jaxpr, list[bool]]:
    return dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
