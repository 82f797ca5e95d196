"""Plan a round on a machine: its client map, memory and collectives, without running it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Unpack

import jax

from fedjax_lab import tree
from fedjax_lab.clients.model_axis import ParamsSharding
from fedjax_lab.clients.planner import MapChoice, at_once
from fedjax_lab.data import ClientTimes, FederatedArrays, FederatedStream
from fedjax_lab.data.cohort import Schedule, ScheduleOptions, scheduled
from fedjax_lab.machine.compiler import Figures, compile_for, figures, with_devices
from fedjax_lab.machine.target import Notes, Target, named, tracing
from fedjax_lab.models.convolution import lowering_for
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.arguments import check_simulate
from fedjax_lab.simulation.chunk_planner import ChunkPlanner
from fedjax_lab.simulation.client_data import without_examples
from fedjax_lab.simulation.debugging import debuggable
from fedjax_lab.simulation.placement import Request
from fedjax_lab.simulation.prepare import computation_of
from fedjax_lab.types import Params


class RoundPlan(NamedTuple):
    """A round on a target: the planner's choices, and figures of its program.

    Attributes:
      target: the machine.
      plan: the client map, the reason for it, and its memory.
      convolution: the lowering of convolutions whose lowering is "auto".
      model_bytes: the bytes of one model, d numbers.
      figures: figures of the compiler; None: it is not installed.
      note: why figures are missing, and how to get them; else None.
      convolutions: of the loss, kind -> the form that it takes there, or why it takes none.
    """

    target: Target
    plan: MapChoice
    convolution: str
    model_bytes: int
    figures: Figures | None
    note: str | None
    convolutions: Mapping[str, str] = MappingProxyType({})

    def rows(self) -> list[list[str]]:
        """Return rows of (name, value) for a table, the header first."""
        target = self.target
        count = f"{target.num_devices} x " if target.num_devices > 1 else ""
        rows = [
            ["one round", f"{target.name}: {count}{target.device_kind}"],
            ["client map", self.plan.client_map],
            ["why", self.plan.reason],
            ["convolutions", self.convolution],
            *([f"- {kind}", form] for kind, form in self.convolutions.items()),
        ]
        if self.figures is None:
            return [*rows, ["its compiler", self.note or "was not asked"]]
        found = self.figures
        of = "" if target.memory_bytes is None else f" of {_mib(target.memory_bytes)}"
        rows += [
            ["memory, by its compiler", _mib(found.memory) + of],
            ["- arguments", _mib(found.arguments)],
            ["- results", _mib(found.results)],
            ["- temporaries", _mib(found.temporaries)],
            ["- code", _mib(found.code)],
        ]
        rows += [
            [c.kind, f"{c.times:,}, together {_si(c.bytes)}B = {c.bytes / self.model_bytes:.3g} d"]
            for c in found.collectives
        ]
        if not found.collectives:
            rows.append(["collectives", "none"])
        return [*rows, ["compile", f"{found.seconds:.1f} s on this machine"]]


@scheduled
@debuggable
def plan(
    algorithm: Algorithm,
    params: Params,
    clients: FederatedArrays | FederatedStream,
    *,
    target: str | Target = "here",
    client_map: str = "auto",
    on_nonfinite: str = "exclude",
    client_store: str = "auto",
    params_sharding: ParamsSharding = None,
    times: ClientTimes | None = None,
    lowering: str = "auto",
    **schedule: Unpack[ScheduleOptions],
) -> RoundPlan:
    """Plan a round of ``simulate`` on ``target`` without running it.

    The target's compiler reports the memory and the collectives of the round. It can be installed
    without an accelerator (see ``fedjax_lab.machine.compiler``); without it, the plan says how to
    install it. Nothing is allocated.

    Args:
      algorithm: the method.
      params: the initial global model, or its shapes.
      clients: the clients' data; a stream counts with the examples of one round.
      target: a machine or its name, such as "here", "v5e:2x2", "h200", "cpu".
      client_map: as in ``simulate``; "measure" is treated as "auto".
      on_nonfinite: as in ``simulate``.
      client_store: as in ``simulate``; "host" is planned with the whole table on the device.
      params_sharding: as in ``simulate``.
      times: as in ``simulate``; the program of the round samples available clients.
      lowering: as in ``simulate``.

    Returns:
      ``RoundPlan``: ``plan``, ``figures``, ``rows()``.

    Raises:
      ValueError: an argument is out of range, the target or client map is unknown, the store is
        "sharded" and the client map cannot divide the rows, or ``jax_disable_jit`` is set.
      TypeError: an argument is unknown or of the wrong type.
    """
    check_simulate(algorithm, params, clients, only_shapes=True)
    machine = named(target) if isinstance(target, str) else target
    note = None
    try:
        machine = with_devices(machine)
    except ImportError as error:
        note = str(error)
    asked = Request.of(client_map, client_store, params_sharding, machine)
    given = Schedule.of("plan", schedule)
    run, clients = computation_of(
        algorithm, params, clients, given, times, on_nonfinite=on_nonfinite, lowering=lowering
    )
    clients = without_examples(clients, run.schedule, 1)
    state = run.shapes(clients)
    planner = ChunkPlanner(run, asked, state, clients)
    chosen = planner.choose_map(1)
    asked.with_map(chosen.client_map).store_on_devices(clients.num_clients)  # refuses "sharded"
    found = None
    many = at_once(chosen.client_map, run.schedule.slots(clients), machine)
    on_one = "vmap" if many > 1 else "scan"  # a machine without devices cannot share a cohort
    with tracing(notes=(convolutions := Notes())):
        noted = planner.round_of(chosen.client_map if machine.devices else on_one)
        jax.eval_shape(noted, state._replace(frozen=run.frozen), planner.batch)
    if machine.devices:
        program, seconds = planner.compiled(chosen.client_map, 1), planner.compile_seconds
        if program is None:
            arguments, named_ones = planner.program(chosen.client_map, 1)
            program, seconds = compile_for(machine, *arguments, **named_ones)
        found = figures(program, seconds)
    return RoundPlan(
        machine,
        chosen,
        lowering if lowering == "lax" else lowering_for(machine, many > 1),
        tree.nbytes(params),
        found,
        note,
        convolutions,
    )


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _si(count: float) -> str:
    """Format a number with three digits and an SI prefix."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {prefix}"
    return f"{count:.3g} "
