"""What a traced program computes, before any compiler: its products, and how exact they are.

Counts are those of one device: inside ``shard_map`` shapes are a device's own.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


class Product(NamedTuple):
    """A matrix product or a convolution of a program.

    Attributes:
      kind: one of ``PRODUCTS``.
      flops: floating-point operations of one call: two for each multiplication with its addition.
      times: how often it is called; loops of unknown length count once.
      precise: whether float32 operands are multiplied as float32 everywhere. A TPU otherwise
        rounds them to bfloat16.
      where: the function and line that asked for it.
    """

    kind: str
    flops: int
    times: int
    precise: bool
    where: str


def products(jaxpr: ClosedJaxpr | Jaxpr, times: int = 1) -> Iterator[Product]:
    """All products of a program.

    Args:
      jaxpr: what ``jax.make_jaxpr(function)(...)`` returned.
      times: how often it is called.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in PRODUCTS:
            yield Product(name, _flops(eqn), times, _is_precise(eqn), _where(eqn))
        inner = [
            leaf
            for leaf in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda v: isinstance(v, (ClosedJaxpr, Jaxpr))
            )
            if isinstance(leaf, (ClosedJaxpr, Jaxpr))
        ]
        if name == "cond":  # one of them is taken: the largest is counted
            branches = [list(products(branch, times)) for branch in inner]
            yield from max(branches, key=lambda found: sum(p.flops * p.times for p in found))
            continue
        for body in inner:
            yield from products(
                body, times * eqn.params.get("length", 1) if name == "scan" else times
            )


def count_flops(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Floating-point operations of a program's products; others are left out.

    Args:
      jaxpr: what ``jax.make_jaxpr(function)(...)`` returned.
    """
    return sum(product.flops * product.times for product in products(jaxpr))


def _flops(eqn: Any) -> int:
    left, right = (v.aval.shape for v in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        features = right[numbers.rhs_spec[0]]
        return 2 * out * math.prod(right) // features
    (contracted, _), _ = eqn.params.get("dimension_numbers", (((), ()), ((), ())))
    return 2 * out * math.prod(left[axis] for axis in contracted)


def _is_precise(eqn: Any) -> bool:
    """Whether no operand is rounded: HIGHEST, or operands that are not float32 to begin with."""
    if all(v.aval.dtype != "float32" for v in eqn.invars[:2]):
        return True
    asked = eqn.params.get("precision")
    asked = asked if isinstance(asked, tuple) else (asked,)
    return all(str(one).rpartition(".")[2].upper() in ("HIGHEST", "FLOAT32") for one in asked)


def _where(eqn: Any) -> str:
    from jax._src import source_info_util

    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return "" if frame is None else f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
