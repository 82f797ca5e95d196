"""The planner: which client map fits the machine, the method, the model and the cohort.

- CPU: clients one after the other on each of as many devices (cores) as shorten the round. A
  batched matrix product over weights that differ from client to client is slow there.
- GPU and TPU: as many clients at once as memory allows, on every device. What a client needs is
  measured on the traced round, before anything is compiled or allocated.

Convolutions choose their lowering by the same facts (``fedjax_lab.models.convolution``).
``simulate(client_map="measure")`` times the two best plans instead and remembers the winner.
"""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedjax_lab.checks import check_int
from fedjax_lab.clients.memory import device_memory

# Of a device's memory, what a plan may fill; the rest is for what XLA adds.
_SHARE_OF_MEMORY = 0.6

# client map -> the round's function (state, batch) -> (state, metrics)
RoundOf = Callable[[str], Callable[..., Any]]


class Plan(NamedTuple):
    """A client map, and why.

    Attributes:
      client_map: its name, for ``build_round``.
      reason: in words.
    """

    client_map: str
    reason: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.client_map} ({self.reason})"


def plan(round_of: RoundOf, state: Any, batch: Any, max_bytes: int | None = None) -> Plan:
    """Choose the client map of a round.

    Args:
      round_of: client map -> round function; only traced, on one device.
      state: the method's state, or its shapes.
      batch: a ``CohortBatch``, or its shapes.
      max_bytes: memory of one device; None: as ``device_memory`` finds.

    Raises:
      ValueError: ``max_bytes`` is below 1.
    """
    if max_bytes is not None:
        check_int("max_bytes", max_bytes, minimum=1)
    slots = batch.client_ids.shape[0]
    platform, available = jax.default_backend(), jax.device_count()
    devices = useful_devices(slots, available)
    spread = "" if devices == 1 else "shard_map" if devices == available else f"shard_map:{devices}"
    where = f"{platform}, {devices} of {available} device{'s' * (available > 1)}"
    if platform == "cpu":
        return Plan(spread or "scan", f"{where}; clients one after the other on each")
    share = -(-slots // devices)
    limit = int(_SHARE_OF_MEMORY * (max_bytes or device_memory()))
    at_once, needed = _clients_at_once(round_of, state, batch, share, limit)
    memory = f"{needed / 2**20:,.0f} MiB a client, {limit / 2**20:,.0f} MiB to use"
    if at_once >= share:
        return Plan(spread or "vmap", f"{where}; {share} clients at once on each, {memory}")
    chunk = f"chunk:{at_once}" if at_once > 1 else "scan"
    name = f"{spread}/{chunk}" if spread else chunk
    return Plan(name, f"{where}; {at_once} of {share} clients at once on each, {memory}")


def useful_devices(slots: int, available: int) -> int:
    """The smallest number of devices on which the longest share is as short as can be."""
    share = -(-slots // available)
    return -(-slots // share)


def _clients_at_once(round_of, state, batch, share, limit) -> tuple[int, int]:
    """(clients that one device may run at once, bytes that each of them needs)."""
    slots = batch.client_ids.shape[0]

    def peak(client_map):
        return peak_bytes(jax.make_jaxpr(round_of(client_map))(state, batch))

    one = peak("scan")
    if slots == 1 or share == 1:
        return 1, 0
    needed = max((peak("vmap") - one) // (slots - 1), 1)
    most = 1 + max(limit - one, 0) // needed
    if most >= share:
        return share, needed
    return -(-share // -(-share // most)), needed


def peak_bytes(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """The most bytes that are alive at once while a program runs step by step.

    Arguments live throughout, every other value from its equation to its last use; a loop's body
    or a called function adds its own peak. XLA fuses and reuses, so that it mostly needs less.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in _variables(eqn.invars)}
    kept = _variables([*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars])
    live = peak = sum(map(_nbytes, {*jaxpr.invars, *jaxpr.constvars}))
    for i, eqn in enumerate(jaxpr.eqns):
        live += sum(map(_nbytes, eqn.outvars))
        peak = max(peak, live + max(map(_scratch_bytes, _inner(eqn.params)), default=0))
        used = _variables([*eqn.invars, *eqn.outvars]) - kept
        live -= sum(_nbytes(v) for v in used if last_use.get(v, i) == i)
    return peak


def _scratch_bytes(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """The peak of an inner program without its arguments and results, which are alive outside."""
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    outside = _variables([*inner.invars, *inner.constvars, *inner.outvars])
    return max(peak_bytes(inner) - sum(map(_nbytes, outside)), 0)


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _inner(params: dict[str, Any]) -> list[ClosedJaxpr | Jaxpr]:
    leaves = jax.tree.leaves(
        list(params.values()), is_leaf=lambda v: isinstance(v, (ClosedJaxpr, Jaxpr))
    )
    return [leaf for leaf in leaves if isinstance(leaf, (ClosedJaxpr, Jaxpr))]


def _nbytes(variable: Any) -> int:
    aval = variable.aval
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return getattr(aval, "size", 0) * itemsize


# --- the measured mode


def alternatives(planned: str, slots: int) -> tuple[str, str]:
    """The plan, and the client map that is most likely to beat it."""
    whole, _, share = planned.partition("/")
    if jax.default_backend() == "cpu":
        return planned, "scan" if whole != "scan" else f"chunk:{min(2, slots)}"
    half = max(slots // 2, 1)
    if share.startswith("chunk") or whole.startswith("chunk"):
        half = max(int(planned.rpartition(":")[2]) // 2, 1)
    if whole.startswith(("shard_map", "pmap")):
        return planned, f"{whole}/chunk:{max(half // jax.device_count(), 1)}"
    return planned, f"chunk:{half}"


def fastest(
    candidates: Sequence[str],
    seconds_of: Callable[[str], float],
    key: Any,
    cache: Path | None = None,
) -> tuple[str, bool]:
    """(the fastest client map, whether the answer was remembered).

    Args:
      candidates: client maps, the expected best one first.
      seconds_of: times one of them.
      key: what decides the answer, as a JSON value: method, shapes, machine, versions.
      cache: folder of the answers; None: ``plan_cache()``.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    file = (cache or plan_cache()) / f"{digest[:32]}.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["client_map"]
        if found in candidates:
            return found, True
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no answer yet, or one that cannot be read: measured again
    seconds = {name: seconds_of(name) for name in candidates}
    best = min(seconds, key=seconds.__getitem__)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f"{file.name}.{os.getpid()}")
        scratch.write_text(json.dumps({"client_map": best, "seconds": seconds}), encoding="utf-8")
        os.replace(scratch, file)
    except OSError as error:
        warnings.warn(
            f"the measured client map cannot be remembered in {file.parent} ({error}); the next "
            "run measures again.",
            UserWarning,
            stacklevel=2,
        )
    return best, False


def plan_cache() -> Path:
    """The folder in which measured plans are remembered: below ``XDG_CACHE_HOME``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fedjax_lab" / "plans"


def timed(run: Callable[[], Any]) -> float:
    """Seconds of the second of two calls; the first one warms up."""
    jax.block_until_ready(run())
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began
