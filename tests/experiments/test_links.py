"""What links carry, on paper: next to messages sent one by one, and to compiled programs."""

import itertools
from collections import Counter

import jax
import pytest

from experiments.benchmarks import collectives, links


def steps(start, end, length, wraps):
    """The two shares (weight, steps along a line) of a message's way, half each where both fit."""
    ahead, behind = (end - start) % length, (start - end) % length
    if not wraps:
        return [(1.0, 1 if end > start else -1, abs(end - start))]
    if ahead == behind:
        return [(0.5, 1, ahead), (0.5, -1, behind)]
    return [(1.0, 1, ahead) if ahead < behind else (1.0, -1, behind)]


def busiest(sides, wraps):
    """Of an all-to-all of one byte per device, the bytes over the busiest link, sent one by one."""
    loads: Counter = Counter()
    places = list(itertools.product(*map(range, sides)))
    for start, end in itertools.permutations(places, 2):
        at = list(start)
        for axis in (0, 1):  # first along one axis, then along the other
            for weight, way, count in steps(at[axis], end[axis], sides[axis], wraps):
                here = list(at)
                for _ in range(count):
                    loads[*here, axis, way] += weight / len(places)
                    here[axis] = (here[axis] + way) % sides[axis]
            at[axis] = end[axis]
    return max(loads.values())


@pytest.mark.parametrize(
    ("sides", "wraps"), [((2, 4), False), ((4, 4), False), ((4, 4), True), ((8, 8), True)]
)
def test_an_all_to_all_loads_the_middle_of_a_grid(sides, wraps):
    count = sides[0] * sides[1]
    fabric = links.Fabric("", count, count, sides, wraps, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert links.over_links("all-to-all", 1.0, fabric) == pytest.approx((busiest(sides, wraps), 0))


def test_a_gather_over_nodes_crosses_the_network_once_for_each_node():
    fabric = links.Fabric("", 16, 8, (), False, 10.0, 1.0, 1.0, 1.0, 1.0)
    # 16 devices bring a byte each. The other node's 8 come in by 8 devices, and go on by links.
    assert links.over_links("all-gather", 16.0, fabric) == (14, 1)
    assert links.over_links("reduce-scatter", 1.0, fabric) == (14, 1)
    near, far, seconds = links.cost({"all-gather": 16.0, "reduce-scatter": 1.0}, fabric)
    assert (near, far, seconds) == (28, 2, pytest.approx(2.8))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "store"), links.CASES)
def test_bytes_by_shapes_are_those_of_compiled_programs(name, store):
    params = links.mlp_shapes(collectives.HIDDEN)
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    found = links.exchanged(links.method(name), params, collectives.SLOTS, 4, store)
    figures = collectives.compiled(name, "cpu:4", "shard_map", store).figures
    compiled = {c.kind: c.bytes for c in figures.collectives}
    for kind in found.keys() | compiled.keys():
        assert found.get(kind, 0) == pytest.approx(compiled.get(kind, 0), abs=1e-3 * size)
