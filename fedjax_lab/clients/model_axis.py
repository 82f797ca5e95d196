"""The mesh axis ``model``: how a model, and all that is shaped like it, is divided over devices.

With the client map ``shard_map:CxM`` each of C shares of a cohort has M devices, and each of these
holds a part of every large array. What belongs to a leaf of the params (its update, its momentum,
its row in a client's state) is found by its path, which ends like that of the leaf, and lies like
it; the axes in front of the leaf's own are those of clients or of a memory.

Manual in a round is the axis ``clients`` alone. The products and sums within a model are divided
by the compiler, who needs to be told where the results lie and nothing else.
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

from fedjax_lab.types import Params, PyTree

MODEL = "model"  # the name of the axis

# (path of a leaf, such as "dense_0/kernel", the leaf or its shape) -> how it is divided
SpecOf = Callable[[str, Any], PartitionSpec]
# That; or the specs themselves, a prefix of the params' tree; None: ``shard_largest``.
ParamsSharding = SpecOf | PyTree


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """Where the leaves of a model lie.

    Attributes:
      mesh: with the axes ``clients`` and ``model``.
      leaves: path of each leaf -> its shape and how it is divided.
      frozen: the specs of the frozen weights, a tree like theirs; ().
    """

    mesh: Mesh
    leaves: dict[tuple[Any, ...], tuple[tuple[int, ...], PartitionSpec]]
    frozen: PyTree = ()

    def specs(self, values: PyTree, leading: Any = None) -> PyTree:
        """How ``values`` are divided, those that belong to a leaf of the params like that leaf.

        Args:
          values: pytree of arrays or of shapes, such as a state.
          leading: an axis' name, or None, for the first of the axes in front of a leaf's own; or
            ``PartitionSpec.UNCONSTRAINED``, for all of them, where the compiler is to choose.
        """
        follows = leading is PartitionSpec.UNCONSTRAINED

        def spec(path, leaf):
            own = self._of(path, leaf.shape)
            extra = len(leaf.shape) - (0 if own is None else own[0])
            front = [leading] * extra if follows else [leading, *[None] * (extra - 1)][:extra]
            return PartitionSpec(*front, *(() if own is None else own[1]))

        return jax.tree_util.tree_map_with_path(spec, values)

    def constrain(self, values: PyTree) -> PyTree:
        """``values``, traced, whose parts of a model are divided like it; all else is left alone.

        Args:
          values: pytree of arrays.
        """
        around = jax.sharding.get_abstract_mesh()  # within a client map ``clients`` is manual
        mesh = self.mesh if around.empty else around
        specs = self.specs(values, PartitionSpec.UNCONSTRAINED)

        def constrain(spec, leaf):
            if all(axis is PartitionSpec.UNCONSTRAINED for axis in spec):
                return leaf
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

        return jax.tree.map(constrain, specs, values, is_leaf=_is_spec)

    def shardings(self, specs: PyTree) -> PyTree:
        """The same as placements.

        Args:
          specs: pytree of ``PartitionSpec``.
        """
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec)

    def _of(self, path: tuple[Any, ...], shape: tuple[int, ...]):
        """(axes, spec) of the leaf that a path belongs to; None: of none."""
        for start in range(len(path) + 1):
            found = self.leaves.get(path[start:])
            if found is not None and shape[len(shape) - len(found[0]) :] == found[0]:
                return len(found[0]), found[1]
        return None


def model_layout(
    params: Params, mesh: Mesh | None, params_sharding: ParamsSharding = None, frozen: PyTree = ()
) -> ModelLayout | None:
    """Where a model lies; None if the mesh has no axis ``model``.

    Args:
      params: the server model, or its shapes.
      mesh: of the client map; None: it has none.
      params_sharding: as of ``simulate``.
      frozen: frozen weights, or their shapes.

    Raises:
      TypeError: ``params_sharding`` gives something else than a ``PartitionSpec``.
      ValueError: ``params_sharding`` is given where there is no axis ``model``, its structure is
        not that of the params, or a spec has too many axes, another name than ``model``, or an
        axis whose length the devices do not divide.
    """
    if mesh is None or not divides_models(mesh, params_sharding):
        return None
    of_params = of_frozen = params_sharding
    if not jax.tree.leaves(frozen):
        of_frozen = None
    elif not (params_sharding is None or callable(params_sharding)):
        if not (isinstance(params_sharding, tuple) and len(params_sharding) == 2):
            raise ValueError(
                "params_sharding is no function, and the method has frozen weights; it must be a "
                "pair (of the params, of the frozen weights)."
            )
        of_params, of_frozen = params_sharding
    size = mesh.shape[MODEL]
    specs = _specs(params, of_params, size)
    paths = jax.tree_util.tree_leaves_with_path(params)
    own = jax.tree.leaves(specs, is_leaf=_is_spec)
    leaves = {p: (tuple(leaf.shape), s) for (p, leaf), s in zip(paths, own, strict=True)}
    return ModelLayout(mesh, leaves, _specs(frozen, of_frozen, size))


def divides_models(mesh: Mesh | None, params_sharding: ParamsSharding = None) -> bool:
    """Whether a mesh has the axis ``model``.

    Args:
      mesh: of the client map; None: it has none.
      params_sharding: as of ``simulate``.

    Raises:
      ValueError: it has not, and ``params_sharding`` is given.
    """
    divides = mesh is not None and MODEL in mesh.axis_names
    if params_sharding is not None and not divides:
        raise ValueError(
            "params_sharding is given, but the client map has no devices for a part of a model; "
            "client_map must be 'shard_map:CxM', such as 'shard_map:2x4'."
        )
    return divides


def shard_largest(leaf: Any, devices: int) -> PartitionSpec:
    """Divide an array along its longest axis that ``devices`` divide, the last of several.

    An array without such an axis is whole on each device.

    Args:
      leaf: an array, or its shape.
      devices: of the axis ``model``.
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
    if not callable(sharding):
        try:
            given = jax.tree.broadcast(sharding, values, is_leaf=_is_spec)
        except ValueError as error:
            raise ValueError(
                f"params_sharding has another structure than params: {error}"
            ) from error
    else:
        given = jax.tree_util.tree_map_with_path(lambda p, leaf: sharding(_name(p), leaf), values)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, spec: _checked(_name(path), leaf, spec, size), values, given
    )


def _checked(name: str, leaf: Any, spec: Any, size: int) -> PartitionSpec:
    told = f"params_sharding has {spec!r} for {name}, {list(np.shape(leaf))}"
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"{told}; it must be a jax.sharding.PartitionSpec.")
    if len(spec) > len(np.shape(leaf)):
        raise ValueError(f"{told}; the array has fewer axes.")
    for length, axis in zip(np.shape(leaf), spec, strict=False):
        if axis not in (None, MODEL):
            raise ValueError(f"{told}; each of its axes must be None or {MODEL!r}.")
        if axis == MODEL and length % size:
            raise ValueError(f"{told}; {size} devices do not divide {length}.")
    if list(spec).count(MODEL) > 1:
        raise ValueError(f"{told}; {MODEL!r} must be in one place.")
    return spec


def are_divided(specs: PyTree) -> list[bool]:
    """Of each leaf, whether devices divide it.

    Args:
      specs: pytree of ``PartitionSpec``.
    """
    return [MODEL in spec for spec in jax.tree.leaves(specs, is_leaf=_is_spec)]


def divided_over(values: PyTree) -> Mesh | None:
    """The mesh with the axis ``model`` on which arrays lie; None: on another, or on none.

    Args:
      values: pytree of arrays, of which the first that lies on such a mesh counts.
    """
    for leaf in jax.tree.leaves(values):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and MODEL in mesh.axis_names:
            return mesh
    return None


def on_mesh(
    values: PyTree, mesh: Mesh, place: Callable[[Any, int], PartitionSpec] | None = None
) -> PyTree:
    """``values`` on the devices of a mesh; what lies there divided over ``model`` stays as it is.

    Args:
      values: pytree of arrays.
      mesh: the mesh.
      place: (leaf, length of the axis ``model``) -> where the others go; None: a copy to each.
    """

    def where(leaf):
        if divided_over(leaf) == mesh:
            return leaf.sharding
        divides = place is not None and MODEL in mesh.axis_names
        spec = place(leaf, mesh.shape[MODEL]) if place and divides else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.device_put(values, jax.tree.map(where, values))


def bytes_of_a_device(values: PyTree, shardings: PyTree) -> int:
    """What one device holds of ``values``.

    Args:
      values: pytree of arrays or of shapes.
      shardings: pytree like it, of placements.
    """
    parts = jax.tree.map(
        lambda leaf, place: math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        values,
        shardings,
    )
    return sum(jax.tree.leaves(parts))


# --- the layout of the round that is traced

# It belongs to the devices, not to the mathematics: what asks for it (a table's rows, the Gram
# matrix of a QP) lies below methods whose halves, also users' own, know of no devices.
_HELD: contextvars.ContextVar[ModelLayout | None] = contextvars.ContextVar("layout", default=None)


@contextlib.contextmanager
def hold_layout(layout: ModelLayout | None) -> Iterator[None]:
    """Inside, ``held_layout`` returns ``layout``.

    Args:
      layout: of the round that is traced; None: its models are whole.
    """
    token = _HELD.set(layout)
    try:
        yield
    finally:
        _HELD.reset(token)


def on_each_part(
    function: Callable[..., PyTree], layout: ModelLayout, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """``function`` of the parts that one device has, with the axis ``model`` to be summed over.

    Args:
      function: of traced arrays.
      layout: of the round that is traced.
      in_specs, out_specs: of its arguments and results, as ``ModelLayout.specs`` gives them.
    """
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
    """The layout of the round that is traced; None: models are whole on each device."""
    return _HELD.get()


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
