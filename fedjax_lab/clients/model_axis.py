"""The mesh axis ``model``: how a model and arrays of its shape are divided over devices.

With the client map ``shard_map:CxM`` a cohort has C shares with M devices each, and each device
stores a part of every large array. Arrays that belong to a leaf of the params (its update, its
momentum, a client's state) are divided like the leaf. They are recognised by the end of their path,
which is the path of the leaf. Their additional leading axes are those of clients or of a memory.

Only the axis ``clients`` is manual in a round. The compiler divides products and sums within a
model; it only needs the shardings of the results.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_lab.checks import errors_about
from fedjax_lab.tree import path_text
from fedjax_lab.types import Params, PyTree

MODEL = "model"  # the name of the axis

# (path of a leaf, such as "dense_0/kernel", the leaf or its shape) -> its ``PartitionSpec``
SpecOf = Callable[[str, Any], PartitionSpec]
# Such a function, or a prefix tree of specs; None: ``shard_largest``.
ParamsSharding = SpecOf | PyTree


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """The division of a model over devices.

    Attributes:
      mesh: mesh with the axes ``clients`` and ``model``.
      leaves: path of each leaf -> (shape, spec).
      frozen: specs of the frozen weights, with their tree structure; () without frozen weights.
    """

    mesh: Mesh
    leaves: dict[tuple[Any, ...], tuple[tuple[int, ...], PartitionSpec]]
    frozen: PyTree = ()

    def specs(self, values: PyTree, leading: Any = None) -> PyTree:
        """Return the specs of a pytree; arrays that belong to a leaf are divided like the leaf.

        Args:
          values: pytree of arrays or of shapes, such as a state.
          leading: name of a mesh axis, or None, for the first additional leading axis; or
            ``PartitionSpec.UNCONSTRAINED``: the compiler chooses for all leading axes.
        """
        follows = leading is PartitionSpec.UNCONSTRAINED

        def spec(path, leaf):
            own = self._of(path, leaf.shape)
            extra = len(leaf.shape) - (0 if own is None else own[0])
            front = [leading] * extra if follows else [leading, *[None] * (extra - 1)][:extra]
            return PartitionSpec(*front, *(() if own is None else own[1]))

        return jax.tree_util.tree_map_with_path(spec, values)

    def constrain(self, values: PyTree) -> PyTree:
        """Divide traced values that belong to the model as it is divided; others are unchanged."""
        around = jax.sharding.get_abstract_mesh()  # ``clients`` is manual
        mesh = self.mesh if around.empty else around
        specs = self.specs(values, PartitionSpec.UNCONSTRAINED)

        def constrain(spec, leaf):
            if all(axis is PartitionSpec.UNCONSTRAINED for axis in spec):
                return leaf
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

        return jax.tree.map(constrain, specs, values, is_leaf=_is_spec)

    def shardings(self, specs: PyTree) -> PyTree:
        """Convert specs to shardings on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec)

    def _of(self, path: tuple[Any, ...], shape: tuple[int, ...]):
        """Return (axes, spec) of the leaf that a path belongs to; None if there is none."""
        for start in range(len(path) + 1):
            found = self.leaves.get(path[start:])
            if found is not None and shape[len(shape) - len(found[0]) :] == found[0]:
                return len(found[0]), found[1]
        return None


def model_layout(
    params: Params, mesh: Mesh | None, params_sharding: ParamsSharding = None, frozen: PyTree = ()
) -> ModelLayout | None:
    """Compute how a model is divided; None if the mesh has no axis ``model``.

    Args:
      mesh: mesh of the client map, or None.

    Raises:
      TypeError: ``params_sharding`` contains or returns something other than a ``PartitionSpec``.
      ValueError: ``params_sharding`` is used without an axis ``model``, its structure differs from
        the params, or a spec has too many axes, a name other than ``model``, or an axis whose
        length is no multiple of the number of devices.
    """
    if mesh is None or not divides_models(mesh, params_sharding):
        return None
    of_params = of_frozen = params_sharding
    if not jax.tree.leaves(frozen):
        of_frozen = None
    elif not (params_sharding is None or callable(params_sharding)):
        if not (isinstance(params_sharding, tuple) and len(params_sharding) == 2):
            raise ValueError(
                "params_sharding is a tree, and the method has frozen weights; it must be a pair "
                "of trees (for the params, for the frozen weights)."
            )
        of_params, of_frozen = params_sharding
    size = mesh.shape[MODEL]
    specs = _specs(params, of_params, size)
    paths = jax.tree_util.tree_leaves_with_path(params)
    own = jax.tree.leaves(specs, is_leaf=_is_spec)
    leaves = {p: (tuple(leaf.shape), s) for (p, leaf), s in zip(paths, own, strict=True)}
    return ModelLayout(mesh, leaves, _specs(frozen, of_frozen, size))


def divides_models(mesh: Mesh | None, params_sharding: ParamsSharding = None) -> bool:
    """Return True if a mesh has the axis ``model``.

    Raises:
      ValueError: the mesh has no such axis, but ``params_sharding`` is not None.
    """
    divides = mesh is not None and MODEL in mesh.axis_names
    if params_sharding is not None and not divides:
        raise ValueError(
            "params_sharding is set, but the client map does not divide models over devices; "
            "client_map must be 'shard_map:CxM', such as 'shard_map:2x4'."
        )
    return divides


def shard_largest(leaf: Any, devices: int) -> PartitionSpec:
    """Divide an array along its longest axis that is a multiple of ``devices``.

    Of several such axes, the last one is divided. An array without such an axis is copied to each
    device.
    """
    shape = tuple(leaf.shape)
    fits = [axis for axis, length in enumerate(shape) if length and length % devices == 0]
    if not fits:
        return PartitionSpec()
    chosen = max(fits, key=lambda axis: (shape[axis], axis))
    return PartitionSpec(*[None] * chosen, MODEL)


def _specs(values: PyTree, sharding: ParamsSharding, size: int) -> PyTree:
    if sharding is None:
        return jax.tree.map(lambda leaf: shard_largest(leaf, size), values)
    if callable(sharding):
        given = jax.tree_util.tree_map_with_path(
            lambda p, leaf: sharding(path_text(p), leaf), values
        )
    else:
        with errors_about("params_sharding has another structure than params", ValueError):
            given = jax.tree.broadcast(sharding, values, is_leaf=_is_spec)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, spec: _checked(path_text(path), leaf, spec, size), values, given
    )


def _checked(name: str, leaf: Any, spec: Any, size: int) -> PartitionSpec:
    subject = f"params_sharding has {spec!r} for {name}, {list(np.shape(leaf))}"
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"{subject}; it must be a jax.sharding.PartitionSpec.")
    if len(spec) > len(np.shape(leaf)):
        raise ValueError(f"{subject}; the array has fewer axes.")
    for length, axis in zip(np.shape(leaf), spec, strict=False):
        if axis not in (None, MODEL):
            raise ValueError(f"{subject}; each of its axes must be None or {MODEL!r}.")
        if axis == MODEL and length % size:
            raise ValueError(f"{subject}; {size} devices do not divide {length}.")
    if list(spec).count(MODEL) > 1:
        raise ValueError(f"{subject}; {MODEL!r} must occur only once.")
    return spec


def are_divided(specs: PyTree) -> list[bool]:
    """Return for each leaf whether devices divide it."""
    return [MODEL in spec for spec in jax.tree.leaves(specs, is_leaf=_is_spec)]


def divided_over(values: PyTree) -> Mesh | None:
    """Return the mesh with the axis ``model`` on which arrays are placed, or None.

    Args:
      values: pytree of arrays; the first one that is placed on such a mesh determines the result.
    """
    for leaf in jax.tree.leaves(values):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and MODEL in mesh.axis_names:
            return mesh
    return None


def on_mesh(values: PyTree, mesh: Mesh, divide: bool = False) -> PyTree:
    """Place arrays on the devices of a mesh; arrays that ``model`` already divides stay in place.

    Args:
      divide: divide the others with ``shard_largest``, if the mesh has the axis ``model``; else
        each device gets a copy.
    """

    def where(leaf):
        if divided_over(leaf) == mesh:
            return leaf.sharding
        is_divided = divide and divides_models(mesh)
        spec = shard_largest(leaf, mesh.shape[MODEL]) if is_divided else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.device_put(values, jax.tree.map(where, values))


def bytes_of_a_device(values: PyTree, shardings: PyTree) -> int:
    """Compute the bytes of an array tree that one device stores."""
    parts = jax.tree.map(
        lambda leaf, place: math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        values,
        shardings,
    )
    return sum(jax.tree.leaves(parts))


# --- the layout of the round that is being traced

# It is a context variable because it concerns the devices, not the mathematics: the code that needs
# it (rows of a table, the Gram matrix of a QP) is called by methods, which know nothing of devices.
_HELD: contextvars.ContextVar[ModelLayout | None] = contextvars.ContextVar("layout", default=None)


@contextlib.contextmanager
def hold_layout(layout: ModelLayout) -> Iterator[None]:
    """Set the layout that ``held_layout`` returns inside the context."""
    token = _HELD.set(layout)
    try:
        yield
    finally:
        _HELD.reset(token)


def on_each_part(
    function: Callable[..., PyTree], layout: ModelLayout, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """Apply a function to the parts on each device; it can sum over the axis ``model``."""
    around = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        mesh=layout.mesh if around.empty else around,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={MODEL},
        check_vma=False,
    )


def held_layout() -> ModelLayout | None:
    """Return the layout of the round that is traced; None if models are not divided."""
    return _HELD.get()


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)
