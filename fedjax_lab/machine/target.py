"""The machine for which a round is planned: this one, or another one by name.

``Target`` is a value that planner, client maps and convolutions take; None means the running
machine. If an accelerator's compiler is installed, programs can be compiled for its devices without
the hardware: see ``fedjax_lab.machine.compiler``.
"""

import dataclasses
import math
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax

from fedjax_lab.checks import check_choice
from fedjax_lab.machine.device_memory import device_memory


@dataclasses.dataclass(frozen=True)
class Target:
    """The properties of a machine that a plan depends on.

    Attributes:
      name: argument of ``named``; "here" for the running machine.
      platform: "cpu", "gpu" or "tpu".
      device_kind: JAX's name of the device, such as "TPU v5 lite".
      num_devices: number of devices that share a cohort.
      memory_bytes: bytes of one device that a program may use; None: unknown.
      devices: JAX devices, running or only for compilation; empty if there are none.
      convolution: the lowering that "auto" means (see ``fedjax_lab.models.convolution``); None: the
        platform's default.
    """

    name: str
    platform: str
    device_kind: str
    num_devices: int
    memory_bytes: int | None = None
    devices: tuple[Any, ...] = ()
    convolution: str | None = None

    def __post_init__(self):
        check_choice("platform", self.platform, PLATFORMS)


PLATFORMS = ("cpu", "gpu", "tpu")
LOWERINGS = ("auto", "lax")
_GIB = 2**30


class Chip(NamedTuple):
    """An accelerator, from its vendor's data sheet.

    Attributes:
      platform: "gpu" or "tpu".
      device_kind: as JAX names it.
      memory_bytes: bytes that a program may use: three quarters of a GPU's memory, which is JAX's
        default; the compiler's limit on a v5e; all memory of other TPUs.
      axes: number of axes of a TPU's topology; a GPU has none.
    """

    platform: str
    device_kind: str
    memory_bytes: int
    axes: int = 0


CHIPS = {
    "v4": Chip("tpu", "TPU v4", 32 * _GIB, 3),
    "v5e": Chip("tpu", "TPU v5 lite", int(15.75 * _GIB), 2),
    "v5p": Chip("tpu", "TPU v5", 95 * _GIB, 3),
    "v6e": Chip("tpu", "TPU v6 lite", 32 * _GIB, 2),
    "a100": Chip("gpu", "NVIDIA A100-SXM4-80GB", int(0.75 * 80e9)),
    "h100": Chip("gpu", "NVIDIA H100 80GB HBM3", int(0.75 * 80e9)),
    "h200": Chip("gpu", "NVIDIA H200", int(0.75 * 141e9)),
}


# What a program is being traced for; None: the running machine, one client. JAX caches traces under
# different values separately.
_TRACED_FOR: Any = jax.make_user_context(None)


class Notes(dict[str, str]):
    """What a trace says of a program's operations: kind -> form; equal to itself alone."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __ne__ = object.__ne__


class TracedFor(NamedTuple):
    """What a program is being traced for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      convolution: as in ``Target``.
      at_once: whether ``vmap`` maps over clients, each with weights of its own.
      notes: where the forms of convolutions are noted; None: nowhere.
    """

    platform: str
    convolution: str | None = None
    at_once: bool = False
    notes: Notes | None = None


def traced_for() -> TracedFor:
    """Return what the current program is being traced for."""
    return _TRACED_FOR.value or TracedFor(jax.default_backend())


def traced_precision() -> str | None:
    """Return the default precision of matrix products in the current program; None: JAX's own."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


def tracing_for(target: Target | None) -> AbstractContextManager[None]:
    """Return a context in which programs are traced for a machine.

    Args:
      target: a machine; None: no change.
    """
    if target is None:
        return nullcontext()
    now = traced_for()
    convolution = target.convolution or now.convolution
    return _TRACED_FOR(TracedFor(target.platform, convolution, notes=now.notes))


def tracing_with(lowering: str) -> AbstractContextManager[None]:
    """Return a context in which convolutions and poolings take a lowering.

    Args:
      lowering: "auto": what is fast on the machine; "lax": as they are written.

    Raises:
      ValueError: ``lowering`` is neither.
    """
    if check_choice("lowering", lowering, LOWERINGS) == "auto":
        return nullcontext()
    return tracing(convolution=lowering)


def tracing(**changes: Any) -> AbstractContextManager[None]:
    """Return a context in which programs are traced for another ``TracedFor``.

    Args:
      **changes: its fields that change.
    """
    return _TRACED_FOR(traced_for()._replace(**changes))


def here() -> Target:
    """Return the running machine with all devices of JAX."""
    devices = tuple(jax.devices())
    first = jax.local_devices()[0]
    try:
        memory = device_memory(first)
    except OSError:  # neither the device nor the system reports it
        memory = None
    return Target("here", first.platform, first.device_kind, len(devices), memory, devices)


def named(name: str) -> Target:
    """Return the machine of that name, without devices; ``compiler.with_devices`` adds them.

    Args:
      name: "here"; a chip, alone ("v5e", "h200") or several: a TPU with its topology ("v5e:2x2",
        "v4:2x2x1"), a GPU with a number ("h200:8"); "cpu" or "cpu:8".

    Raises:
      ValueError: the name is unknown, or its number or topology is invalid.
    """
    if name == "here":
        return here()
    kind, colon, size = name.partition(":")
    if kind != "cpu" and kind not in CHIPS:
        allowed = ", ".join(("here", "cpu", *CHIPS))
        raise ValueError(f"target is {name!r}; it must be one of {allowed}, alone or as KIND:SIZE.")
    axes = 1 if kind == "cpu" else CHIPS[kind].axes or 1
    if colon and not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{axes - 1}}}", size):
        example = "x".join("2" * axes) if axes > 1 else "8"
        raise ValueError(f"target is {name!r}; write its size like {kind}:{example}.")
    count = math.prod(int(n) for n in size.split("x")) if size else 1
    if kind == "cpu":
        return Target(name, "cpu", "cpu", count)
    chip = CHIPS[kind]
    return Target(name, chip.platform, chip.device_kind, count, chip.memory_bytes)


def platform_of(target: Target | None) -> str:
    """Return the platform of a target, or of the running machine for None.

    Args:
      target: a machine, or None.
    """
    return jax.default_backend() if target is None else target.platform
