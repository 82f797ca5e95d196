"""The planner chooses a client map for a machine, a method, a model and a cohort.

- CPU: each device (core) runs its clients one after the other, because batched matrix products with
  different weights for each client are slow there. It uses as many devices as shorten the round.
  In a loop of one's own a small round takes a single device; in ``simulate`` it does not, so that
  all stores and any number of processes give the same bits.
- GPU and TPU: every device runs as many clients at once as its memory allows. The device's compiler
  reports the memory that the program needs, before anything is allocated; the answer is stored.
  Without a compiler, and over several processes, all clients run at once.

Convolutions choose their lowering for the same target (``fedjax_lab.models.convolution``).
``simulate(client_map="measure")`` times the two best plans and stores the faster one.
"""

import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_lab.checks import warn
from fedjax_lab.clients.mapping import ON_SEVERAL, single_device_map, split_name
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.machine.compiler import abstract, try_compile
from fedjax_lab.machine.program_cache import user_cache
from fedjax_lab.machine.target import Target, here

# Share of a device's memory that a plan may use. The rest is for other data, such as the test set
# and a copy of the state.
_SHARE_OF_MEMORY = 0.9
# Up to here, one CPU core computes a round before two have exchanged their sums
# (`python -m experiments.benchmarks.small_rounds`).
FEW_STEPS = 50  # local steps of a cohort
_FEW_PRODUCTS = 3.2e7  # of a weight and a number of an example, at most, in a round

# client map -> the round's function (state, batch) -> (state, metrics)
RoundOf = Callable[[str], Callable[..., Any]]
# client map -> bytes that its compiled program needs on one device
Needs = Callable[[str], int]


class MapChoice(NamedTuple):
    """A client map and the reason for its choice.

    Attributes:
      client_map: name of the client map, for ``build_round``.
      reason: the reason, in words.
      memory_bytes: memory of one device that its program needs, from the compiler; None: the
        compiler was not asked.
    """

    client_map: str
    reason: str
    memory_bytes: int | None = None

    def __str__(self) -> str:
        """Format the plan in one line."""
        return f"{self.client_map} ({self.reason})"


def choose_map(
    round_of: RoundOf,
    state: Any,
    batch: Any,
    *,
    target: Target | None = None,
    model: Any = None,
    needs: Needs | None = None,
    also: Any = (),
) -> MapChoice:
    """Choose the client map of a round.

    Args:
      round_of: client map -> round function for ``target``. The function is only traced; it is
        compiled if ``needs`` is None.
      target: the machine; None: the current machine.
      model: the weights of the loss, or their shapes, if one device of a CPU may run a small round;
        None: it may not.
      needs: client map -> bytes of its program, from the compiler; not called for a CPU. None: if
        the target has devices, their compiler is asked about the round.
      also: other values that the compiler's answer depends on, as JSON, in addition to the round,
        the memory and the device.

    Raises:
      OSError: the target has devices, but their memory is unknown.
    """
    target = here() if target is None else target
    slots = batch.client_ids.shape[0]
    available = target.num_devices
    devices = useful_devices(slots, available)
    spread = over_devices(devices, available)
    is_small = model is not None and _is_small(batch, model)
    if target.platform == "cpu" and devices > 1 and is_small:
        return MapChoice("scan", f"cpu, 1 of {available} devices, because the round is small")
    where = f"{target.platform}, {devices} of {available} device{'s' * (available > 1)}"
    if target.platform == "cpu":
        return MapChoice(spread or "scan", f"{where}; clients one after the other on each")
    share = -(-slots // devices)

    def map_of(many: int) -> str:
        if many >= share:
            return spread or "vmap"
        chunk = f"chunk:{many}" if many > 1 else "scan"
        return f"{spread}/{chunk}" if spread else chunk

    if needs is None and not target.devices:
        reason = f"{where}; all {share} at once on each, because no compiler was asked"
        return MapChoice(map_of(share), reason)
    if target.memory_bytes is None:
        raise OSError(
            f"the memory of {target.device_kind} is unknown; name a client_map, such as 'vmap'."
        )
    needs = needs or _asking(round_of, state, batch, target)
    limit = int(_SHARE_OF_MEMORY * target.memory_bytes)
    key = [
        traced_text(round_of("vmap"), state, batch),
        [target.device_kind, target.convolution, share, limit, jax.__version__],
        also,
    ]
    asked = functools.partial(_most_at_once, needs, map_of, share, limit)
    many, memory_bytes = _recalled(key, asked)
    text = f"{memory_bytes / 2**20:,.0f} of {limit / 2**20:,.0f} MiB, by its compiler"
    of = f"{many}" if many >= share else f"{many} of {share}"
    reason = f"{where}; {of} client{'s' * (share > 1)} at once on each, {text}"
    return MapChoice(map_of(many), reason, memory_bytes)


def _asking(round_of: RoundOf, state: Any, batch: Any, target: Target) -> Needs:
    """Build a function: client map -> bytes that the compiled round needs."""

    def needs(client_map: str) -> int:
        kind, count, _, _ = split_name(client_map)
        number = (count or target.num_devices) if kind == "shard_map" else 1
        shapes = abstract((state, batch), target.devices[:number])
        return try_compile(target, jax.jit(round_of(client_map), donate_argnums=0), *shapes)[1]

    return needs


def _most_at_once(
    needs: Needs, map_of: Callable[[int], str], share: int, limit: int
) -> tuple[int, int]:
    """Return (clients that one device may run at once, bytes): all clients, or as many as fit."""
    many, before = share, (0, 0)  # first guess: no client needs no memory
    while True:
        wanted = needs(map_of(many))
        if wanted <= limit or many == 1:
            return many, wanted
        # The memory grows linearly with the number of clients.
        each = max((before[1] - wanted) / (before[0] - many), 1)
        fewer = min(max(int(many - (wanted - limit) / each), 1), many - 1)
        before = many, wanted
        many = -(-share // -(-share // fewer))


def _is_small(batch: Any, model: Any) -> bool:
    """Return True if one CPU core computes a round sooner than several do.

    A dense, convolutional or recurrent layer uses each of its weights at most once for each number
    of an example, as long as no layer enlarges the example.
    """
    slots, steps, size = jax.tree.leaves(batch.examples)[0].shape[:3]
    axes, data = (3, batch.examples) if batch.source is None else (1, batch.source)
    numbers = sum(math.prod(leaf.shape[axes:]) for leaf in jax.tree.leaves(data))
    weights = sum(leaf.size for leaf in jax.tree.leaves(model))
    full = 0 if batch.full_mask is None else batch.full_mask.shape[1]
    products = slots * (steps * size + full) * numbers * weights
    return slots * steps <= FEW_STEPS and products <= _FEW_PRODUCTS


def useful_devices(slots: int, available: int) -> int:
    """Return the smallest number of devices for which the longest share is as short as possible."""
    share = -(-slots // available)
    return -(-slots // share)


def over_devices(count: int, available: int) -> str:
    """Return the map over some of the available devices; "" for a single device."""
    return "" if count == 1 else "shard_map" if count == available else f"shard_map:{count}"


def traced_text(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the traced function as text, without addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jax.make_jaxpr(function)(*arguments)))


def at_once(client_map: str, slots: int, target: Target) -> int:
    """Return the number of clients that a device runs at once under a client map.

    Args:
      client_map: name of a client map, except "auto" and "measure".
    """
    kind, count, _, share = split_name(client_map)
    if kind in ON_SEVERAL:
        slots = -(-slots // (count or target.num_devices))
        kind, count, _, _ = split_name(share or single_device_map(target))
    return slots if kind == "vmap" else min(count or 1, slots)


# --- client_map="measure"


def alternatives(planned: str, slots: int, target: Target | None = None) -> tuple[str, str]:
    """Return the plan and the client map that is most likely to be faster."""
    target = here() if target is None else target
    outer, _, share = planned.partition("/")
    if target.platform == "cpu":
        return planned, "scan" if outer != "scan" else f"chunk:{min(2, slots)}"
    half = max(slots // 2, 1)
    if share.startswith("chunk") or outer.startswith("chunk"):
        half = max(int(planned.rpartition(":")[2]) // 2, 1)
    if outer.startswith(ON_SEVERAL):
        return planned, f"{outer}/chunk:{max(half // target.num_devices, 1)}"
    return planned, f"chunk:{half}"


def fastest(
    candidates: Sequence[str], seconds_of: Callable[[str], float], key: Any
) -> tuple[str, bool]:
    """Find the fastest client map; returns (client map, whether the answer was stored before).

    Args:
      seconds_of: client map -> measured seconds.
      key: values that the answer depends on, as JSON: method, shapes, machine, versions.
    """
    measured: dict[str, float] = {}

    def measure() -> str:
        measured.update({name: seconds_of(name) for name in candidates})
        return min(measured, key=measured.__getitem__)

    beside = {"seconds": measured}
    return _recalled(key, measure, candidates.__contains__, beside), not measured


def _recalled(
    key: Any,
    find: Callable[[], Any],
    is_answer: Callable[[Any], bool] = lambda answer: True,
    beside: Mapping[str, Any] | None = None,
) -> Any:
    """Return the stored answer to ``key``, or compute it with ``find`` and store it."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    name = f"{digest[:32]}.json"
    try:
        found = json.loads((user_cache() / "plans" / name).read_text(encoding="utf-8"))["answer"]
        if is_answer(found):
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no answer yet, or one that cannot be read
    answer, folder = find(), Path("~/.cache")
    try:
        folder = user_cache() / "plans"
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, json.dumps({"answer": answer, **(beside or {})}))
    except OSError as error:
        warn(f"the plan cannot be stored in {folder} ({error}); the next run will plan again.")
    return answer


def timed(run: Callable[[], Any]) -> float:
    """Measure the seconds of the second of two calls; the first one is a warm-up."""
    jax.block_until_ready(run())
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began
