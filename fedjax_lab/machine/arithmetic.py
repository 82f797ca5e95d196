"""Counts the operations of a traced program, without a compiler."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedjax_lab.machine.liveness import WRITTEN_OUT
from fedjax_lab.machine.program import SKIPPED, UNLESS_FINITE

_PRODUCTS = {"dot_general", "conv_general_dilated"}


def count_flops(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Count the floating-point operations of a program's matrix products and convolutions.

    A multiplication with its addition counts as two; other operations do not count. A loop counts
    as often as it runs, or once if its length is unknown. Of several branches the largest counts,
    except for the second turn of a round, as in ``fedjax_lab.machine.program``.

    Args:
      jaxpr: result of ``jax.make_jaxpr(function)(...)``.
    """
    return round(count_products(jaxpr, _flops))


def count_products(jaxpr: ClosedJaxpr | Jaxpr, of_product: Callable[[Any], int]) -> float:
    """Sum a number over a program's matrix products and convolutions; see ``count_flops``.

    Args:
      jaxpr: as in ``count_flops``.
      of_product: equation of a product or a convolution in the jaxpr -> its number.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _PRODUCTS:
            total += of_product(eqn)
            continue
        values = [WRITTEN_OUT[name](eqn)] if name in WRITTEN_OUT else list(eqn.params.values())
        leaves = jax.tree.leaves(values, is_leaf=_is_jaxpr)
        inner = [count_products(leaf, of_product) for leaf in leaves if _is_jaxpr(leaf)]
        if name == "cond":
            skipped = str(eqn.source_info.name_stack).endswith(UNLESS_FINITE)
            total += max(inner, default=0) * (SKIPPED if skipped else 1)
        else:
            total += sum(inner) * (eqn.params["length"] if name == "scan" else 1)
    return total


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (ClosedJaxpr, Jaxpr))


def _flops(eqn: Any) -> int:
    left, right = (v.aval.shape for v in eqn.invars[:2])
    results = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * results * math.prod(left[axis] for axis in contracted)
    features = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * results * math.prod(right) // features
