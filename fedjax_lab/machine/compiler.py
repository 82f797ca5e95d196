"""Compiles for an accelerator on any machine that has the accelerator's compiler.

libtpu compiles for TPUs, and JAX's CUDA plugin for NVIDIA GPUs, without the hardware: JAX calls
such a target a topology.
"""

import dataclasses
import math
import os
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_lab.machine.program import Collectives, read_traffic
from fedjax_lab.machine.target import CHIPS, Target

# Without these variables, libtpu looks for the TPU host that it runs on.
_NO_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class _Gpu(NamedTuple):
    """XLA's description of a GPU, from NVIDIA's data sheets and the CUDA guide."""

    capability: tuple[int, int]
    processors: int
    lanes: int  # float32 units of a processor
    shared_memory: int  # bytes of a processor
    cache: int  # bytes
    clock: float  # GHz
    memory: float  # bytes


_GPUS = {
    "a100": _Gpu((8, 0), 108, 64, 167936, 41943040, 1.41, 80e9),
    "h100": _Gpu((9, 0), 132, 128, 233472, 52428800, 1.98, 80e9),
    "h200": _Gpu((9, 0), 132, 128, 233472, 52428800, 1.98, 141e9),
}


class Figures(NamedTuple):
    """A compiler's figures of a program. Bytes are those of one device.

    Attributes:
      seconds: compile time.
      arguments: bytes of the arguments.
      results: bytes of results that do not reuse the memory of an argument.
      temporaries: bytes of temporary memory.
      code: bytes of the code; 0 if the compiler does not report them.
      bytes_accessed: bytes read and written by one call; loops count as often as they run.
      collectives: collectives in one call.
      unknown_loops: loops whose length depends on values; their bodies are counted once.
    """

    seconds: float
    arguments: int
    results: int
    temporaries: int
    code: int
    bytes_accessed: int
    collectives: tuple[Collectives, ...]
    unknown_loops: int

    @property
    def memory(self) -> int:
        """Return the bytes that the program occupies on a device."""
        return self.arguments + self.results + self.temporaries + self.code


def with_devices(target: Target) -> Target:
    """Return a target with devices for compilation.

    Args:
      target: a machine; if it has devices, it is returned unchanged.

    Raises:
      ImportError: its compiler is not installed; the message says how to get it.
    """
    if target.devices:
        return target
    if target.platform == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < target.num_devices:
            raise ImportError(
                f"target is {target.name!r}, and JAX has {len(devices)} CPU devices; set "
                f"FEDJAX_LAB_CPU_DEVICES={target.num_devices}."
            )
        devices = devices[: target.num_devices]
    else:
        find = _tpu_devices if target.platform == "tpu" else _gpu_devices
        package = "jax[tpu]" if target.platform == "tpu" else "jax-cuda12-plugin jax-cuda12-pjrt"
        try:
            devices = find(target)
        except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
            raise ImportError(
                f"target is {target.name!r}, whose compiler is not available; install it with "
                f"`pip install {package}`, best in an environment of its own. It needs no "
                f"accelerator. ({' '.join(str(error).split())[:200]})"
            ) from error
    return dataclasses.replace(target, devices=tuple(devices))


def _tpu_devices(target: Target) -> list[Any]:
    from jax.experimental import topologies

    for name, value in _NO_HOST.items():
        os.environ.setdefault(name, value)
    kind, _, size = target.name.partition(":")
    dims = [int(n) for n in size.split("x")] if size else [1] * CHIPS[kind].axes
    options: dict[str, Any] = {}
    if any(n % 2 for n in dims[:2]):  # fewer than the four chips of a host
        options["chips_per_host_bounds"] = (*dims, *[1] * (3 - len(dims)))
    if kind == "v4":  # a chip's two cores are one device
        options["chip_config_name"] = "megacore"
    layout = "x".join(map(str, dims))
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{kind}:{layout}", **options
    )
    return list(found.devices)


def _gpu_devices(target: Target) -> list[Any]:
    from jax.experimental import topologies

    kind = target.name.partition(":")[0]
    found = topologies.get_topology_desc(
        kind,
        platform="cuda",
        topology=f"1x1x{target.num_devices}",
        target_config=_gpu_config(kind),
    )
    return list(found.devices)


def _gpu_config(kind: str) -> str:
    """Return XLA's text form of a GPU."""
    gpu, chip = _GPUS[kind], CHIPS[kind]
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.shared_memory,
        "threads_per_core_limit": 2048,
        "core_count": gpu.processors,
        "fpus_per_core": gpu.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.bytes_per_second),
        "l2_cache_size": gpu.cache,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": int(gpu.memory),
        "shared_memory_per_block_optin": gpu.shared_memory - 1024,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    major, minor = gpu.capability
    fields = " ".join(f"{name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} "
        f'}} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} '
        f'device_description_str: "{chip.device_kind}"'
    )


def abstract(values: Any, devices: tuple[Any, ...], split: bool = False) -> Any:
    """Return the shapes of ``values``, with a copy on each of ``devices``.

    Args:
      values: pytree of arrays, of tracers or of shapes.
      devices: JAX devices; empty: JAX's default placement.
      split: shard the leading axis over the devices instead.
    """
    place: Any = None
    if len(devices) == 1:
        place = SingleDeviceSharding(devices[0])
    elif devices:
        place = NamedSharding(
            mesh_of(devices, "clients"), PartitionSpec("clients") if split else PartitionSpec()
        )

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(shape, values)


def mesh_of(devices: tuple[Any, ...], axis: str, **inner: int) -> jax.sharding.Mesh:
    """Create a mesh over ``devices``, in the order that suits their links best.

    Args:
      devices: JAX's devices.
      axis: the name of its first axis.
      **inner: lengths of further axes by name; the first axis has the remaining devices.
    """
    shape = (len(devices) // math.prod(inner.values()), *inner.values())
    automatic = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, (axis, *inner), axis_types=automatic, devices=devices)


def compile_for(
    target: Target, function: jax.stages.Wrapped, *arguments: Any, **static: Any
) -> tuple[Any, float]:
    """Compile a jitted function; returns (the program, seconds).

    Args:
      target: a machine with devices.
      function: a function returned by ``jax.jit``.
      *arguments: pytrees of shapes, as ``abstract`` returns them.
      **static: its static arguments.

    Raises:
      jax.errors.JaxRuntimeError: the compilation fails, for example for lack of memory.
    """
    began = time.perf_counter()
    lowered = function.trace(*arguments, **static).lower()
    options: Mapping[str, Any] | None = None
    if target.platform == "gpu" and target.name != "here":
        options = {"xla_gpu_autotune_level": 0}  # autotuning would run kernels
    program = lowered.compile(compiler_options=options)
    return program, time.perf_counter() - began


def figures(program: Any, seconds: float = 0.0) -> Figures:
    """Read the figures of a compiled program.

    Args:
      program: program returned by ``compile_for``.
      seconds: its compile time.
    """
    memory = program.memory_analysis()
    traffic = read_traffic(program.as_text())
    return Figures(
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        traffic.bytes_accessed,
        traffic.collectives,
        traffic.unknown_loops,
    )


def try_compile(
    target: Target, function: jax.stages.Wrapped, *arguments: Any, **static: Any
) -> tuple[Any, int]:
    """Compile a program if it fits into memory: (the program or None, bytes of a device).

    The bytes are 0 if the backend does not report them.

    Args:
      target: a machine with devices.
      function: a function returned by ``jax.jit``.
      *arguments: pytrees of shapes, as ``abstract`` returns them.
      **static: its static arguments.

    Raises:
      jax.errors.JaxRuntimeError: the compilation fails for another reason.
    """
    try:
        program, _ = compile_for(target, function, *arguments, **static)
    except jax.errors.JaxRuntimeError as error:
        wanted = _wanted_bytes(error)
        if wanted is None:
            raise
        return None, wanted
    memory = program.memory_analysis()
    if memory is None:
        return program, 0
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    besides = memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return program, memory.argument_size_in_bytes + results + besides


def _wanted_bytes(error: BaseException) -> int | None:
    """Return the bytes requested by a program that did not fit; None for another error."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    found = re.search(r"(?:[Uu]sed |temporaries \()([\d.]+)([KMGT]?)", text)
    scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return int(float(found[1]) * scale[found[2]]) if found else 2**62
