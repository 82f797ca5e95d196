"""Compiles for an accelerator on any machine that has the accelerator's compiler.

libtpu compiles for TPUs, and JAX's CUDA plugin for NVIDIA GPUs, without the hardware: JAX calls
such a target a topology.
"""

import dataclasses
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_lab.machine.target import CHIPS, Target

_KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|_computation|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
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
    bandwidth: float  # bytes a second


_GPUS = {
    "a100": _Gpu((8, 0), 108, 64, 167936, 41943040, 1.41, 80e9, 2039e9),
    "h100": _Gpu((9, 0), 132, 128, 233472, 52428800, 1.98, 80e9, 3350e9),
    "h200": _Gpu((9, 0), 132, 128, 233472, 52428800, 1.98, 141e9, 4800e9),
}


class Collectives(NamedTuple):
    """Collectives of one kind.

    Attributes:
      kind: name of the operation, such as "all-reduce".
      times: number of them in one call of the program.
      bytes: total bytes of their results on one device.
    """

    kind: str
    times: int
    bytes: int


class Figures(NamedTuple):
    """A compiler's figures of a program. Bytes are those of one device.

    Attributes:
      seconds: compile time.
      arguments: bytes of the arguments.
      results: bytes of results that do not reuse the memory of an argument.
      temporaries: bytes of temporary memory.
      code: bytes of the code; 0 if the compiler does not report them.
      collectives: collectives of one call; those in a loop whose length depends on values count
        once, and those of all branches of a condition count.
    """

    seconds: float
    arguments: int
    results: int
    temporaries: int
    code: int
    collectives: tuple[Collectives, ...]

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
        package = "jax[tpu]" if target.platform == "tpu" else "jax-cuda12-plugin jax-cuda12-pjrt"
        try:
            devices = list(_topology(target).devices)
        except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
            raise ImportError(
                f"target is {target.name!r}, whose compiler is not available; install it with "
                f"`pip install {package}`, best in an environment of its own. It needs no "
                f"accelerator. ({' '.join(str(error).split())[:200]})"
            ) from error
    return dataclasses.replace(target, devices=tuple(devices))


def _topology(target: Target) -> Any:
    from jax.experimental import topologies

    kind, _, size = target.name.partition(":")
    if target.platform == "gpu":
        return topologies.get_topology_desc(
            kind,
            platform="cuda",
            topology=f"1x1x{target.num_devices}",
            target_config=_gpu_config(kind),
        )
    for name, value in _NO_HOST.items():
        os.environ.setdefault(name, value)
    dims = [int(n) for n in size.split("x")] if size else [1] * CHIPS[kind].axes
    options: dict[str, Any] = {}
    if any(n % 2 for n in dims[:2]):  # fewer than the four chips of a host
        options["chips_per_host_bounds"] = (*dims, *[1] * (3 - len(dims)))
    if kind == "v4":  # a chip's two cores are one device
        options["chip_config_name"] = "megacore"
    layout = "x".join(map(str, dims))
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{layout}", **options)


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
        "memory_bandwidth": int(gpu.bandwidth),
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


def abstract(values: Any, devices: tuple[Any, ...]) -> Any:
    """Return the shapes of ``values``, with a copy on each of ``devices``.

    Args:
      devices: JAX devices; empty: JAX's default placement.
    """
    place: Any = None
    if len(devices) == 1:
        place = SingleDeviceSharding(devices[0])
    elif devices:
        place = NamedSharding(mesh_of(devices, "clients"), PartitionSpec())

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(shape, values)


def mesh_of(devices: tuple[Any, ...], axis: str, **inner: int) -> jax.sharding.Mesh:
    """Create a mesh over ``devices``, in the order that suits their links best.

    Args:
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
      function: a function returned by ``jax.jit``.

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

    Raises:
      ValueError: the compiler does not give the program as HLO.
    """
    sizes = _bytes_of(program.memory_analysis())
    return Figures(seconds, *sizes, read_collectives(program.as_text()))


def _bytes_of(memory: Any) -> tuple[int, int, int, int]:
    """Return the bytes of arguments, results, temporaries and code, as in ``Figures``."""
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    code = memory.generated_code_size_in_bytes
    return memory.argument_size_in_bytes, results, memory.temp_size_in_bytes, code


def read_collectives(text: str) -> tuple[Collectives, ...]:
    """Count the collectives of one call of a program: one entry for each kind.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", list[str]()
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*->.*\{$", line):
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    if not entry:
        raise ValueError("the text has no ENTRY computation; it must be HLO.")
    found: dict[str, list[float]] = {}

    def run(name: str, times: float) -> None:
        for line in computations.get(name, ()):
            if collective := _COLLECTIVE.search(line):
                total = found.setdefault(collective[2], [0, 0])
                total[0] += times
                total[1] += times * _received_bytes(line, collective)
            inner = times * _turns(line, computations)
            for several, one in _CALLED.findall(line):
                for called in (several or one).split(","):
                    run(called.strip().lstrip("%"), inner)

    run(entry, 1)
    return tuple(Collectives(kind, *map(round, found[kind])) for kind in sorted(found))


def _turns(line: str, computations: Mapping[str, Sequence[str]]) -> float:
    """Return how often an instruction runs the computations that it calls."""
    if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"\}', line):
        return int(known[1])
    if not (condition := re.search(r" while\(.* condition=%?([\w.\-]+)", line)):
        return 1
    lines = "\n".join(computations.get(condition[1], ()))
    lines += "".join("\n".join(computations.get(name, ())) for _, name in _CALLED.findall(lines))
    bounds = re.findall(r" constant\((\d+)\)", lines)
    return int(bounds[0]) if len(bounds) == 1 and "direction=LT" in lines else 1


def _received_bytes(line: str, collective: re.Match[str]) -> float:
    """Return the bytes of a collective's result; the type of a started one has operands, too."""
    arrays = re.findall(r"(\w+)\[([\d,<=]*)\]", collective[1])
    if collective[3] and collective[2] in ("all-gather", "collective-permute"):
        operands = line[collective.end() :].split("), ")[0].count("%")
        arrays = arrays[operands : 2 * operands]
    total = 0.0
    for dtype, shape in arrays:
        bits = re.search(r"\d+", dtype)
        itemsize = int(bits[0]) / 8 if bits else dtype == "pred"
        total += itemsize * math.prod(map(int, re.findall(r"\d+", shape)))
    return total


def try_compile(
    target: Target, function: jax.stages.Wrapped, *arguments: Any, **static: Any
) -> tuple[Any, int]:
    """Compile a program if it fits into memory: (the program or None, bytes of a device).

    The bytes are 0 if the backend does not report them.

    Args:
      function: a function returned by ``jax.jit``.

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
    return program, 0 if memory is None else sum(_bytes_of(memory))


def _wanted_bytes(error: BaseException) -> int | None:
    """Return the bytes requested by a program that did not fit; None for another error."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    found = re.search(r"(?:[Uu]sed |temporaries \()([\d.]+)([KMGT]?)", text)
    scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return int(float(found[1]) * scale[found[2]]) if found else 2**62
