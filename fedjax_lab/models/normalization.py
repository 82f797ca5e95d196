"""``(x - centre) * scale``, as normalization layers have it, with a shorter gradient.

Centre and scale have one number for many pixels. JAX's own gradient writes ``x - centre`` and the
cotangent times the scale out, and sums over the pixels three times. This one keeps ``x`` alone, and
sums the cotangent, and its product with ``x``. Values have the same bits; gradients of centre and
scale differ by rounding. (A round of the zoo's network of inverted residuals takes 0.91 times as
long with it, one of ResNet-20 0.95 times.)
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

# In a shorter one, the gradient of the scale, a difference of two sums, would lose too much.
_DTYPES = (jnp.float32, jnp.float64)


@jax.custom_jvp
def centred_and_scaled(x: jax.Array, centre: jax.Array, scale: jax.Array) -> jax.Array:
    """Return ``(x - centre) * scale``.

    Args:
      x: array [...] of floats.
      centre, scale: arrays of as many axes, some of which have size 1.
    """
    return (x - centre) * scale


@centred_and_scaled.defjvp
def _with_tangents(primals, tangents):
    x, centre, scale = primals
    of_x, of_centre, of_scale = tangents
    of_pixels = of_x * scale + x * of_scale
    return centred_and_scaled(*primals), of_pixels - (of_centre * scale + centre * of_scale)


def operands_of(equation: JaxprEqn, producers: Mapping[Any, JaxprEqn]) -> list[Any] | None:
    """Return the variables x, centre and scale of ``(x - centre) * scale``; None: it is no such.

    Centre and scale have size 1 along axes where x has more.

    Args:
      equation: the last one of the expression.
      producers: variable -> the equation that computes it, in the same program.
    """
    if equation.primitive.name != "mul":
        return None
    for difference, scale in (equation.invars, equation.invars[::-1]):
        of = _producer(difference, producers)
        if of is None or of.primitive.name != "sub":
            continue
        x, centre = of.invars
        arrays: list[Any] = [variable.aval for variable in (x, centre, scale)]
        shapes = [array.shape for array in arrays]
        if len({len(shape) for shape in shapes}) > 1 or arrays[0].dtype not in _DTYPES:
            continue
        along = [i for i, sizes in enumerate(zip(*shapes, strict=True)) if sizes[1] < sizes[0]]
        if along and all(shapes[2][axis] == 1 for axis in along):
            return [x, centre, scale]
    return None


def _producer(variable: Any, producers: Mapping[Any, JaxprEqn]) -> JaxprEqn | None:
    return None if isinstance(variable, Literal) else producers.get(variable)
