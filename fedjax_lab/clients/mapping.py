"""Client maps: how the clients of a cohort are mapped to devices.

A client map runs the function of one client over the S slots of a cohort:

=======================  ============================================
``vmap``                 all clients at once, as one batched program
``scan``                 one after the other, with one client's memory
``chunk:n``              n at once, chunk after chunk
``shard_map``, ``pmap``  an equal share of the cohort on each device
``shard_map:n``          the same on n devices
``shard_map:CxM``        C equal shares, each on M devices that divide the model; see ``model_axis``
``shard_map/chunk:8``    the same, with ``chunk:8`` for the share of a device (default: ``scan`` on
                         CPU, ``vmap`` elsewhere)
=======================  ============================================

With ``auto`` and ``measure`` the planner chooses (see ``fedjax_lab.clients.planner``).

All maps give the same sums up to rounding. Weighted sums over the cohort are accumulated inside the
map, so that memory grows with a chunk and not with the cohort. If clients take unequal numbers of
steps, ``chunk:n`` groups clients with similar numbers, and the maps over several devices give each
the same number of clients with as equal a sum of steps as possible.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_lab import tree
from fedjax_lab.checks import LARGEST_INT, check_choice
from fedjax_lab.clients.exchange import sum_in_order
from fedjax_lab.clients.model_axis import (
    ParamsSharding,
    divides_models,
    held_layout,
    model_layout,
)
from fedjax_lab.clients.store import AXIS, client_mesh
from fedjax_lab.machine.target import Target, platform_of, tracing
from fedjax_lab.machine.trace_once import trace_once
from fedjax_lab.types import Params, PyTree

# (shared, one client, longest) -> ({rule: tree to sum with that rule's coefficients}, unsummed)
# ``longest`` is the number of steps after which all batched clients have finished, or None.
ClientFn = Callable[[PyTree, PyTree, jax.Array | None], tuple[dict[str, PyTree], PyTree]]
CLIENT_MAPS = ("auto", "chunk:n", "measure", "pmap", "scan", "shard_map", "vmap")
ON_SEVERAL = ("pmap", "shard_map")  # the devices divide the cohort
PLANNED = ("auto", "measure")
_COUNTS = f"must be at least 1, and at most {LARGEST_INT}"


def _undecided(*arguments: Any) -> Any:
    raise ValueError("the planner has to choose a client map before clients can run.")


@dataclasses.dataclass(frozen=True)
class ClientMap:
    """A mapping of a cohort's clients to devices; ``parse_client_map`` creates it from a name.

    Attributes:
      name: the full name.
      kind: first word of the name, such as "chunk" or "shard_map".
      multiple: the cohort is padded to a multiple of this number of slots.
      run: (fn, shared, clients [S, ...], coefficients {rule: [S]}, lengths int32 [S] or None)
        -> (sums, unsummed results [S, ...]). ``lengths`` has the number of steps after which each
        client has finished. Calling it is an error before the planner has chosen, and for a target
        without devices.
      shares: number of shares of the cohort, one for each device or group of devices.
      parts: number of devices that divide a model.
      devices: the devices that divide the cohort; empty for a single-device map, and for a target
        without devices.
      sort: lengths [S], traced or in NumPy -> the best order of the slots; None: any order.
      mesh: mesh of the devices with the axis ``clients``, and for ``shard_map:CxM`` also ``model``;
        None if there are no devices.
    """

    name: str
    kind: str
    multiple: int = 1
    run: Callable[..., tuple[PyTree, PyTree]] = _undecided
    shares: int = 1
    parts: int = 1
    devices: tuple[Any, ...] = ()
    sort: Callable[[Any], Any] | None = None
    mesh: Mesh | None = None

    @property
    def is_planned(self) -> bool:
        """True if the planner still has to choose a client map."""
        return self.kind in PLANNED

    @property
    def divides_rows(self) -> bool:
        """True if the table of client rows can be sharded over the devices."""
        return self.kind == "shard_map" and self.shares > 1


def collect(results: PyTree, mesh: Mesh | None) -> PyTree:
    """Copy unsummed results [S, ...] to all devices of a client map, for the server.

    If devices divide a model, each has its part of them. Without this, a compiler sends parts
    of the values more than once, to other divisions of them.

    Args:
      mesh: of the client map.
    """
    if not divides_models(mesh):
        return whole(results, mesh)
    if (layout := held_layout()) is None:
        return results
    return jax.lax.with_sharding_constraint(results, layout.shardings(layout.specs(results)))


def whole(values: PyTree, mesh: Mesh | None) -> PyTree:
    """Let each device compute traced values for itself; all add in the same order.

    Args:
      mesh: of the client map.
    """
    return _placed(values, mesh, PartitionSpec())


def divide(results: PyTree, mesh: Mesh | None) -> PyTree:
    """Give each device the unsummed results [S, ...] of its clients.

    Args:
      mesh: of the client map.
    """
    return results if divides_models(mesh) else _placed(results, mesh, PartitionSpec(AXIS))


def _placed(values: PyTree, mesh: Mesh | None, spec: PartitionSpec) -> PyTree:
    if mesh is None:
        return values
    return jax.lax.with_sharding_constraint(values, NamedSharding(mesh, spec))


def single_device_map(target: Target | None = None) -> str:
    """Return the client map for one device: ``scan`` on CPU, ``vmap`` elsewhere.

    Args:
      target: a machine; None: the current machine.
    """
    return "scan" if platform_of(target) == "cpu" else "vmap"


def check_client_map(client_map: str) -> str:
    """Check that a text is the name of a client map, for any number of devices, and return it.

    Raises:
      TypeError: it is not a string.
      ValueError: the name is unknown, or a number in it is no positive integer.
    """
    if not (isinstance(client_map, str) and client_map in PLANNED):
        split_name(client_map)
    return client_map


def parse_client_map(
    client_map: str | ClientMap, target: Target | None = None, argument: str = "client_map"
) -> ClientMap:
    """Create a ``ClientMap`` from its name; a ``ClientMap`` is returned unchanged.

    Args:
      client_map: such as "scan", "chunk:8", "shard_map:2/vmap" or "auto".
      target: the machine whose devices it uses; None: the current machine.

    Raises:
      TypeError: it is not a string.
      ValueError: the name is unknown, a number in it is no positive integer, or it needs more
        devices than the machine has.
    """
    if isinstance(client_map, ClientMap):
        return client_map
    if client_map in PLANNED:
        return ClientMap(client_map, client_map)
    kind, count, parts, share = split_name(client_map, argument)
    if kind == "chunk":
        chunks = functools.partial(_chunked, count)
        return ClientMap(client_map, kind, count, chunks, sort=_longest_first)
    if kind == "vmap":
        return ClientMap("vmap", kind, 1, _vmapped)
    if kind == "scan":
        return ClientMap("scan", kind, 1, functools.partial(_chunked, 1))
    if target is not None:
        devices, number = target.devices, target.num_devices
    else:
        devices = tuple(jax.local_devices() if kind == "pmap" else jax.devices())
        number = len(devices)
    width = max(parts, 1)  # devices of a share
    if max(count * width, 1) > number:
        raise ValueError(
            f"{argument} is {client_map!r}; there are {number} {platform_of(target)} devices."
        )
    if not devices:  # a target without devices
        shares = count or number // width

        def run(*arguments: Any) -> Any:
            raise ValueError(
                f"client_map is {client_map!r}, and the target is a {platform_of(target)} that is "
                "only described: it has no devices to run on."
            )

        return ClientMap(client_map, kind, 1, run, shares, width)
    devices = devices[: count * width] if count else devices
    mesh = client_mesh(devices, parts)
    shares = mesh.shape[AXIS]
    on_device = parse_client_map(share or single_device_map(target))
    # A device that runs its clients at once takes as long as the longest of them.
    deal = functools.partial(_dealt if on_device.kind == "vmap" else _balanced, shares=shares)
    if kind == "pmap":
        # In the order of the mesh, which all programs use; on a TPU, `jax.devices` differs.
        spread = functools.partial(_pmapped, on_device.run, tuple(mesh.devices.flat))
    else:
        spread = functools.partial(_sharded, on_device.run, mesh)
    multiple = shares * on_device.multiple
    return ClientMap(client_map, kind, multiple, spread, shares, width, devices, deal, mesh)


def model_shardings(
    params: Params,
    client_map: str,
    params_sharding: ParamsSharding = None,
    target: Target | None = None,
) -> PyTree:
    """Return the shardings with which ``simulate`` divides a model over devices.

    Use them to create or load a model that does not fit on one device:
    ``jax.jit(init, out_shardings=model_shardings(...))`` creates each part on its own device, and
    ``jax.device_put(frozen, model_shardings(...))`` copies each part there. An evaluation leaves
    frozen weights that are placed in this way on their devices.

    Args:
      params: a model or frozen weights, or their shapes.
      client_map: "shard_map:CxM".
      params_sharding: as in ``simulate``: a function, or a prefix of the tree of ``params``.
      target: the machine; None: the current machine.

    Returns:
      A pytree of ``NamedSharding`` with the structure of ``params``.

    Raises:
      ValueError, TypeError: the client map does not divide models, or ``params_sharding`` does not
        fit.
    """
    layout = model_layout(params, parse_client_map(client_map, target).mesh, params_sharding)
    if layout is None:
        raise ValueError(f"client_map is {client_map!r}; it must be 'shard_map:CxM'.")
    return layout.shardings(layout.specs(params))


def split_name(client_map: str, argument: str = "client_map") -> tuple[str, int, int, str]:
    """Split a name into (kind, n or C or 0, M or 0, map of a device's share or "").

    Raises:
      TypeError, ValueError: as ``check_client_map``.
    """
    if not isinstance(client_map, str):
        raise TypeError(f"{argument} is {client_map!r}; it must be text, such as 'auto'.")
    outer, _, share = client_map.partition("/")
    kind, colon, size = outer.partition(":")
    choice = "chunk:n" if kind == "chunk" else kind
    check_choice(argument, choice if colon else outer, CLIENT_MAPS)
    spreads = kind in ON_SEVERAL
    parts = "0"
    if kind == "shard_map" and "x" in size:
        size, _, parts = size.partition("x")
        if not _is_count(parts):
            raise ValueError(f"{argument} is {client_map!r}; M in {kind}:CxM {_COUNTS}.")
    if kind == "chunk" or (spreads and colon):
        if not _is_count(size):
            raise ValueError(f"{argument} is {client_map!r}; n in {kind}:n {_COUNTS}.")
    elif colon or kind in PLANNED:
        raise ValueError(f"{argument} is {client_map!r}; {kind} takes no number and no share.")
    if share and not spreads:
        raise ValueError(f"{argument} is {client_map!r}; only shard_map and pmap have a share.")
    if share and split_name(share, argument)[0] in ON_SEVERAL:
        raise ValueError(f"{argument} is {client_map!r}; a share is scan, vmap or chunk:n.")
    return kind, int(size or 0), int(parts), share


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 12 and 1 <= int(text) <= LARGEST_INT


def _longest_first(lengths):
    if isinstance(lengths, np.ndarray):
        return np.argsort(-lengths.astype(int), stable=True)
    return jnp.argsort(-lengths, stable=True)


def _dealt(lengths, shares):
    """Deal the slots to devices, the longest first: [S] places, those of a device side by side."""
    return _longest_first(lengths).reshape(-1, shares).T.reshape(-1)


def _balanced(lengths, shares):
    """Deal the slots likewise, each to the device with the fewest steps among those with room."""
    if shares == 1 or isinstance(lengths, np.ndarray):  # an array: flags of padded slots
        return _dealt(lengths, shares)
    size = lengths.shape[0]
    room = size // shares

    def give(given, slot):
        steps, slots = given
        device = jnp.argmin(jnp.where(slots < room, steps, jnp.iinfo(steps.dtype).max))
        place = device * room + slots[device]
        return (steps.at[device].add(lengths[slot]), slots.at[device].add(1)), place

    nothing = jnp.zeros(shares, lengths.dtype)
    order = _longest_first(lengths)
    _, places = jax.lax.scan(give, (nothing, nothing), order)
    return jnp.zeros_like(order).at[places].set(order)


# Sizes are computed, because reshape cannot infer -1 for an array of size 0.


def _parts(leaf, count):
    """Reshape [n, ...] to [count, n / count, ...]."""
    return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])


def _together(leaf):
    """Reshape [count, m, ...] to [count * m, ...]."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _vmapped(fn: ClientFn, shared, clients, coefficients, lengths):
    longest = None if lengths is None else lengths.max()
    with tracing(at_once=True):
        summed, kept = jax.vmap(fn, in_axes=(None, 0, None))(shared, clients, longest)
    return {rule: tree.weighted_sum(summed[rule], coefficients[rule]) for rule in summed}, kept


def _chunked(size: int, fn: ClientFn, shared, clients, coefficients, lengths):
    """Scan over chunks of ``size`` clients; the sums are the carry."""

    def one_chunk(clients, coefficients, lengths):
        if size > 1:
            return _vmapped(fn, shared, clients, coefficients, lengths)
        summed, kept = fn(shared, clients, None)
        return {rule: tree.scale(summed[rule], coefficients[rule]) for rule in summed}, kept

    chunks = (clients, coefficients, lengths)
    if size > 1:
        chunks = jax.tree.map(lambda leaf: _parts(leaf, leaf.shape[0] // size), chunks)
    first = jax.tree.map(lambda leaf: leaf[0], chunks)
    run_chunk, (shapes, _) = trace_once(one_chunk, *first)
    zeros = tree.zeros_like(shapes)

    def body(sums, chunk):
        partial, kept = run_chunk(*chunk)
        return jax.tree.map(jnp.add, sums, partial), kept

    sums, kept = jax.lax.scan(body, zeros, chunks)
    if size > 1:
        kept = jax.tree.map(_together, kept)
    return sums, kept


def _pmapped(share, devices, fn: ClientFn, shared, clients, coefficients, lengths):
    """Run ``share`` for an equal part of the clients on each device."""

    def on_device(shared, clients, coefficients, lengths):
        return share(fn, shared, clients, coefficients, lengths)

    def split(leaf):
        return _parts(leaf, len(devices))

    mapped = jax.pmap(on_device, in_axes=(None, 0, 0, 0), devices=devices)
    sums, kept = mapped(shared, *jax.tree.map(split, (clients, coefficients, lengths)))
    sums = jax.tree.map(lambda leaf: leaf.sum(0), sums)
    return sums, jax.tree.map(_together, kept)


def _sharded(share, mesh, fn: ClientFn, shared, clients, coefficients, lengths):
    """Run ``share`` for an equal part of the clients on each device, or devices of a model."""
    divided = divides_models(mesh)  # the compiler adds divided arrays

    def on_device(shared, clients, coefficients, lengths):
        sums, kept = share(fn, shared, clients, coefficients, lengths)
        if divided:
            return jax.tree.map(lambda leaf: leaf[None], sums), kept
        return sum_in_order(sums, AXIS, mesh.shape[AXIS]), kept

    split, same = PartitionSpec(AXIS), PartitionSpec()
    sums, kept = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(same, split, split, split),
        out_specs=(split if divided else same, split),
        axis_names={AXIS},
        check_vma=False,  # the carries of `share` start as equal constants
    )(shared, clients, coefficients, lengths)
    return jax.tree.map(lambda leaf: leaf.sum(0), sums) if divided else sums, kept
