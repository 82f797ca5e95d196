"""Bytes over each link, and seconds, of a round on more devices than there are here; on paper.

What devices exchange is worked out from the shapes of a method's messages and rows, as this library
sends them: sums go out in shares and come back whole (``fedjax_lab.clients.exchange``), rows of a
sharded table go to the devices that run their clients and back (``fedjax_lab.clients.store``), and
what is stacked goes to all. Links are those of TPU v5e slices and of H200s, by their makers' data;
a collective takes the time of its busiest link, at full rate and without a start. Compute is at
least what a device's memory takes for the bytes that its compiler says a client accesses
(accelerators.jsonl). In brackets is what does not fit: all of the cohort's rows or messages come to
each device. "To the host" is a row of each of a device's clients one way, for the store "host".

    python -m experiments.benchmarks.links [--clients 1000 10000 100000]

With ``--check``, the bytes are compared with those in the text of programs compiled for 4 and 8 CPU
devices; the exit status is 1 if one differs by more than 0.1 % of a model.
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab import algorithms, models
from fedjax_lab.clients.exchange import is_divided

SHAPES = Path(__file__).with_name("accelerators.jsonl")
CASES = (
    ("fedavg", "device"),
    ("scaffold", "device"),
    ("scaffold", "sharded"),
    ("gradma", "sharded"),
)
_KEPT = {"gradma": {"memory_size": 16, "server_momentum": 0.9, "memory_decay": 0.5}}
_MANY = 1000  # clients, where only shapes count


class Fabric(NamedTuple):
    """What joins the devices.

    Attributes:
      name: of the machine.
      devices: D, in all.
      near: devices that the fast links join: those of a slice, or of a node.
      sides: of a slice's grid; () where a switch joins all.
      wraps: whether the grid's lines are rings.
      link: bytes a second over a fast link, one way.
      far: bytes a second of a device's share of the network between slices or nodes, one way.
      memory: bytes a second of a device's memory.
      room: bytes of it.
      host: bytes a second between a device and its host, one way.
    """

    name: str
    devices: int
    near: int
    sides: tuple[int, ...]
    wraps: bool
    link: float
    far: float
    memory: float
    room: float
    host: float


def fabrics():
    """8, 64 and 512 chips of a TPU v5e, and as many H200s."""
    grids = {8: ((2, 4), False), 64: ((8, 8), False), 512: ((16, 16), True)}
    for devices, (sides, wraps) in grids.items():
        near = math.prod(sides)
        yield Fabric("v5e", devices, near, sides, wraps, 50e9, 3.125e9, 819e9, 16e9, 16e9)
    for devices in grids:
        yield Fabric("h200", devices, 8, (), False, 450e9, 50e9, 4800e9, 141e9, 64e9)


def exchanged(algorithm, params, slots, devices, store):
    """{kind of collective: bytes of its results on one device} of one round.

    Args:
      algorithm: a method of one phase.
      params: its params, or their shapes.
      slots: S, which ``devices`` divides.
      devices: D.
      store: "device" or "sharded"; in a round, "host" is as "sharded".
    """
    [phase] = algorithm.phases
    message = phase.message_like(params)
    sums = [message[name] for name, how in phase.reduce.items() if how != "stack"]
    stacked = [message[name] for name, how in phase.reduce.items() if how == "stack"]
    rows = jax.eval_shape(lambda params: algorithm.start(params, _MANY, None)[1], params)
    found = dict.fromkeys(("all-to-all", "all-gather", "reduce-scatter"), 0)
    for leaf in jax.tree.leaves(sums):
        if not is_divided(leaf.size, devices):
            found["all-gather"] += devices * leaf.size * leaf.dtype.itemsize
            continue
        longest = max(leaf.shape)
        padded = leaf.size // longest * devices * -(-longest // devices) * leaf.dtype.itemsize
        found["all-to-all"] += padded
        found["all-gather"] += padded
    of_row = sum(leaf.size // _MANY * leaf.dtype.itemsize for leaf in jax.tree.leaves(rows))
    of_stack = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stacked))
    found["all-gather"] += slots * (of_row + of_stack)
    if store == "sharded":
        found["reduce-scatter"] += slots // devices * of_row
    return found


def over_links(kind, result, fabric):
    """(bytes over the busiest fast link, over a device's share of the network), one way.

    A gather, or a scatter of sums, has to bring V, what all devices hold together, to (or from)
    each of them, by all its links; of a grid without rings the corners have two. An all-to-all
    sends across the middle of a grid's longer side half of what each half holds; of a ring, both
    ways around.
    """
    count, near = fabric.devices, fabric.near
    slices = count // near
    if kind == "all-to-all":
        within, beyond = result * near / count, result * (count - near) / count
        if not fabric.sides:
            return within * (near - 1) / near, beyond
        return within * max(fabric.sides) / (8 if fabric.wraps else 4), beyond
    whole = result * (count if kind == "reduce-scatter" else 1)
    beyond = whole * (slices - 1) / slices / near  # each device fetches its part of the others'
    ways = (4 if fabric.wraps else 2) if fabric.sides else 1
    return (whole * (count - 1) / count - beyond) / ways, beyond


def cost(found, fabric):
    """(bytes over the busiest link, over the network, seconds) of a round's exchanges."""
    parts = [over_links(kind, result, fabric) for kind, result in found.items() if result]
    seconds = sum(max(near / fabric.link, far / fabric.far) for near, far in parts)
    return sum(near for near, _ in parts), sum(far for _, far in parts), seconds


def method(name):
    """A method of ``CASES``; its loss is never called."""
    return algorithms.ALGORITHMS[name](lambda *_: None, client_lr=0.1, **_KEPT.get(name, {}))


def mlp_shapes(hidden):
    """The shapes of an MLP 784-...-10."""
    model = models.mlp(10, hidden=hidden)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 784)))


def bytes_of_a_client(target):
    """What a client of FedAvg accesses in a round on a device, by its compiler."""
    for line in SHAPES.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if (row["target"], row["name"]) == (target, "fedavg vmap"):
            return row["bytes_accessed"] / row["clients"]
    raise ValueError(f"{SHAPES} has no row of fedavg vmap for {target}.")


def check():
    """Print the model's bytes next to the compilers'; returns the exit status."""
    from experiments.benchmarks import collectives

    jax.config.update("jax_num_cpu_devices", 8)
    params, status = mlp_shapes(collectives.HIDDEN), 0
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    print("| method | rows | devices | collective | by shapes, d | compiled, d |")
    print("|---|---|---:|---|---:|---:|")
    for name, store in CASES:
        for devices in (4, 8):
            found = exchanged(method(name), params, collectives.SLOTS, devices, store)
            figures = collectives.compiled(name, f"cpu:{devices}", "shard_map", store).figures
            compiled = {c.kind: c.bytes for c in figures.collectives}
            for kind in sorted(found.keys() | compiled.keys()):
                ours, theirs = found.get(kind, 0) / size, compiled.get(kind, 0) / size
                status |= abs(ours - theirs) > 1e-3
                print(f"| {name} | {store} | {devices} | {kind} | {ours:.4f} | {theirs:.4f} |")
    return int(status)


def number(value):
    """Two digits, or all that stand before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def main(arguments=None):
    """Print one Markdown table for each machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--check", action="store_true", help="against compiled programs")
    given = parser.parse_args(arguments)
    if given.check:
        return check()
    params = mlp_shapes((200, 100))
    for fabric in fabrics():
        if fabric.devices == 8:
            print(f"\n{fabric.name}: MB over the busiest link / over the network: ms\n")
            heads = [f"{name}, {store}" if name == "scaffold" else name for name, store in CASES]
            print(f"| devices | clients | compute, ms | {' | '.join(heads)} | to the host, ms |")
            print(f"|---:|---:|---:|{'---:|' * (len(CASES) + 1)}")
        for clients in given.clients:
            slots = -(-clients // fabric.devices) * fabric.devices
            compute = slots / fabric.devices * bytes_of_a_client(fabric.name) / fabric.memory
            cells = [str(fabric.devices), f"{clients:,}", number(1e3 * compute)]
            for name, store in CASES:
                found = exchanged(method(name), params, slots, fabric.devices, store)
                near, far, seconds = cost(found, fabric)
                told = f"{number(near / 1e6)} / {number(far / 1e6)}: {number(1e3 * seconds)}"
                cells.append(told if max(found.values()) < fabric.room else f"({told})")
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
            cells.append(number(1e3 * slots / fabric.devices * size / fabric.host))
            print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
