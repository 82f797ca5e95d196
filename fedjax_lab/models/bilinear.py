"""Operations that are linear in each of two operands, with all derivatives.

An operation ``features(x, kernel)`` that is linear in images and in kernels has two transposes,

    images_of(features, kernel)     kernel_of(x, features),

and the three are derivatives of one another, to any order. ``Bilinear`` makes one operation of JAX
of them, which knows these derivatives and how it is mapped: forward and reverse mode work, and
programs that are traced stay short.
"""

import functools
from collections.abc import Callable, Hashable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fedjax_lab.machine.target import traced_precision

Function = Callable[..., jax.Array]
Places = Mapping[str, tuple[int, int]]


class Bilinear:
    """An operation of JAX: one of three functions, mapped over leading axes of both operands.

    Args:
      name: of the operation, as programs print it.
      functions: "features", "images_of" and "kernel_of": (left, right, size) -> result, each for
        one model. ``size`` is what the three share.
      beside_left, beside_right: function -> axes of (the operand, the result), of one model,
        along which examples, or kernels, of that operand may stand side by side, so that mapping it
        alone takes no more products.
    """

    def __init__(
        self,
        name: str,
        functions: Mapping[str, Function],
        beside_left: Places | None = None,
        beside_right: Places | None = None,
    ):
        self.primitive = Primitive(name)
        self._functions = functions
        self._beside = beside_left or {}, beside_right or {}
        self.primitive.def_abstract_eval(self._shape)
        static = "name", "size", "levels", "precision"
        self.primitive.def_impl(jax.jit(self._run, static_argnames=static))
        ad.defbilinear(self.primitive, self._left_transpose, self._right_transpose)
        batching.primitive_batchers[self.primitive] = self._mapped
        mlir.register_lowering(self.primitive, self._lower)

    def __call__(self, name: str, left: jax.Array, right: jax.Array, size: Hashable) -> jax.Array:
        """Run one of the functions.

        The precision of matrix products is the default of this place, also in the derivatives.

        Args:
          name: "features", "images_of" or "kernel_of".
        """
        return self._bound(name, left, right, size, 0, traced_precision())

    def _bound(self, name, left, right, size, levels, precision):
        left, right = _varying_alike(left, right)
        return self.primitive.bind(
            left, right, name=name, size=size, levels=levels, precision=precision
        )

    def _run(self, left, right, *, name, size, levels, precision):
        function = functools.partial(self._functions[name], size=size)
        for _ in range(levels):
            function = jax.vmap(function)
        with jax.default_matmul_precision(precision):  # traced long after the call
            return function(left, right)

    def _shape(self, left, right, *, name, size, levels, precision):
        one = [jax.ShapeDtypeStruct(array.shape[levels:], array.dtype) for array in (left, right)]
        result = jax.eval_shape(functools.partial(self._functions[name], size=size), *one)
        return left.update(shape=(*left.shape[:levels], *result.shape), weak_type=False)

    def _left_transpose(self, cotangent, left, right, *, name, size, levels, precision):
        if name == "features":
            return self._bound("images_of", cotangent, right, size, levels, precision)
        if name == "images_of":
            return self._bound("features", cotangent, right, size, levels, precision)
        return self._bound("images_of", right, cotangent, size, levels, precision)

    def _right_transpose(self, cotangent, left, right, *, name, size, levels, precision):
        if name == "features":
            return self._bound("kernel_of", left, cotangent, size, levels, precision)
        if name == "images_of":
            return self._bound("kernel_of", cotangent, left, size, levels, precision)
        return self._bound("features", left, cotangent, size, levels, precision)

    def _mapped(self, operands, axes, *, name, size, levels, precision):
        (left, right), (of_left, of_right) = operands, axes
        if of_left is None or of_right is None:
            places = self._beside[of_left is None].get(name)
            if places is not None:
                return self._side_by_side(left, right, axes, places, name, size, levels, precision)
        count = left.shape[of_left] if of_left is not None else right.shape[of_right]
        left, right = (
            jnp.broadcast_to(array, (count, *array.shape))
            if axis is None
            else jnp.moveaxis(array, axis, 0)
            for array, axis in ((left, of_left), (right, of_right))
        )
        return self._bound(name, left, right, size, levels + 1, precision), 0

    def _side_by_side(self, left, right, axes, places, name, size, levels, precision):
        """Put the mapped axis of one operand beside another axis of it: [n, a] -> [n a]."""

        def joined(array, axis):
            inward = places[0] + (levels if places[0] >= 0 else array.ndim - 1)
            array = jnp.moveaxis(array, axis, inward)
            return array.reshape(*array.shape[:inward], -1, *array.shape[inward + 2 :])

        of_left, of_right = axes
        if of_right is None:
            count, left = left.shape[of_left], joined(left, of_left)
        else:
            count, right = right.shape[of_right], joined(right, of_right)
        result = self._bound(name, left, right, size, levels, precision)
        shape, outward = result.shape, places[1] + (levels if places[1] >= 0 else result.ndim)
        return result.reshape(*shape[:outward], count, -1, *shape[outward + 1 :]), outward

    def _lower(self, context, *operands, **params):
        """Write the operation out, without the axes of devices over which ``shard_map`` varies."""
        plain = [jax.core.ShapedArray(value.shape, value.dtype) for value in context.avals_in]
        rule = mlir.lower_fun(self._run, multiple_results=False)
        return rule(context.replace(avals_in=plain), *operands, **params)


def _varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Inside ``shard_map``, let all arrays vary over the same axes of devices."""
    axes = [jax.typeof(array).mat.varying for array in arrays]
    missing = [tuple(sorted(frozenset().union(*axes) - own)) for own in axes]
    return [
        lax.pcast(array, names, to="varying") if names else array
        for array, names in zip(arrays, missing, strict=True)
    ]
