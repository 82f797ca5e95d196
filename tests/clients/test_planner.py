"""The planner: devices by brute force, and choices for machines that are not here."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import CohortBatch, algorithms, build_round
from fedjax_lab.clients import planner
from fedjax_lab.clients.mapping import check_client_map, parse_client_map
from fedjax_lab.machine.target import Target, named, tracing_for
from fedjax_lab.models.convolution import convolution
from fedjax_lab.round import plan_round
from tests.algorithms.problem import initial_params, loss_fn, to_batch
from tests.reference.problem import make_rounds
from tests.tiers import few

SLOW = pytest.mark.slow


def one_round():
    algorithm = algorithms.scaffold(loss_fn, client_lr=0.1)
    drawn = make_rounds(rounds=1, cohort_size=6, max_steps=3, batch_size=4, seed=3)
    batch = to_batch(drawn[0][1], 0)
    return algorithm, algorithm.init(initial_params(), 10), batch


@pytest.mark.parametrize("available", range(1, 9))
@pytest.mark.parametrize("slots", range(1, 20))
def test_no_fewer_devices_would_do(slots, available):
    longest = [-(-slots // n) for n in range(1, available + 1)]
    assert planner.useful_devices(slots, available) == 1 + longest.index(min(longest))


@pytest.fixture
def plans(monkeypatch, tmp_path):
    """The folder of stored plans, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedjax_lab" / "plans"


def machine(platform, devices=1, memory=10**9):
    return Target("elsewhere", platform, "a device", devices, memory)


def test_cpu_takes_one_stream_per_useful_core(monkeypatch):
    monkeypatch.setattr(planner, "FEW_STEPS", 0)  # no round is small
    algorithm, state, batch = one_round()
    slots = batch.client_ids.shape[0]
    for devices in (1, 2, 64):
        useful = planner.useful_devices(slots, devices)
        some = "shard_map" if useful == devices else f"shard_map:{useful}"
        plan = plan_round(algorithm, state, batch, machine("cpu", devices))
        assert plan.client_map == ("scan" if useful == 1 else some)
        assert f"{useful} of {devices} device" in str(plan)


def drawn(shape=(64,), slots=5, steps=5, size=16, full=None):
    """A batch of examples on the devices; with ``full`` examples of each client for full
    gradients."""
    of = jax.ShapeDtypeStruct
    source = of((1000, *shape), jnp.float32), of((1000,), jnp.int32)
    indices, ids = of((slots, steps, size), jnp.int32), of((slots,), jnp.int32)
    key, round = jax.eval_shape(lambda: jax.random.key(0)), of((), jnp.int32)
    batch = CohortBatch(ids, indices, key, round, source=source)
    if full is not None:
        whole, mask = of((slots, full), jnp.int32), of((slots, full), bool)
        batch = batch._replace(full_examples=whole, full_mask=mask)
    return batch


@pytest.mark.parametrize(
    ("weights", "sizes", "platform", "expected"),
    [
        (650, {}, "cpu", "scan"),  # 650 * 65 * 400 = 17 million
        (650, {"size": 40}, "cpu", "shard_map:5"),  # 42 million
        (650, {"steps": 11, "size": 1}, "cpu", "shard_map:5"),  # 55 local steps
        (650, {"shape": (28, 28)}, "cpu", "shard_map:5"),
        (650, {"full": 30}, "cpu", "scan"),  # 23 million
        (650, {"full": 300}, "cpu", "shard_map:5"),  # 80 million
        (2600, {}, "cpu", "shard_map:5"),
        (650, {}, "gpu", "shard_map:5"),
    ],
)
def test_a_small_round_takes_one_core(weights, sizes, platform, expected):
    algorithm = algorithms.fedavg(lambda params, examples, key: examples[0] @ params, client_lr=1)
    state = algorithm.init(jnp.zeros(weights), 10)
    for batch in (drawn(**sizes), without_source(drawn(**sizes))):
        plan = plan_round(algorithm, state, batch, machine(platform, 8))
        assert plan.client_map == expected


def without_source(batch):
    slots_steps_size = batch.examples.shape
    examples = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*slots_steps_size, *leaf.shape[1:]), leaf.dtype),
        batch.source,
    )
    return batch._replace(examples=examples, source=None)


def test_frozen_weights_make_a_round_large():
    algorithm = algorithms.fedavg(lambda params, examples, key: examples[0] @ params, client_lr=1)
    state = algorithm.init(jnp.zeros(10), 10)
    cpu = machine("cpu", 2)
    assert plan_round(algorithm, state, drawn(), cpu).client_map == "scan"
    state = state._replace(frozen=jnp.zeros(10_000))
    assert plan_round(algorithm, state, drawn(), cpu).client_map == "shard_map"


@pytest.mark.parametrize(
    ("devices", "expected"), [(1, "vmap"), (2, "shard_map"), (4, "shard_map:3")]
)
def test_without_a_compiler_all_clients_run_at_once(devices, expected):
    algorithm, state, batch = one_round()
    assert batch.client_ids.shape[0] == 6
    plan = plan_round(algorithm, state, batch, machine("gpu", devices, memory=1))
    assert plan.client_map == expected
    assert plan.memory_bytes is None


def test_a_device_of_unknown_memory_is_told():
    algorithm, state, batch = one_round()
    unknown = machine("gpu", memory=None)
    with pytest.raises(OSError, match="memory of a device is unknown; name a client_map"):
        planner.choose_map(
            lambda client_map: build_round(algorithm, client_map),
            state,
            batch,
            target=unknown,
            needs=lambda client_map: 0,
        )


@pytest.mark.parametrize(
    ("fixed", "each", "devices", "expected", "most_asked"),
    few(
        3,
        [
            (0, 9, 1, "vmap", 1),
            (0, 30, 1, "chunk:25", 2),  # 30 would fit; four chunks are needed all the same
            (500, 20, 1, "chunk:20", 3),
            (1000, 1, 1, "scan", 3),  # fits under no map: the compiler will say so when it is run
            (0, 30, 4, "shard_map", 1),
            (0, 90, 4, "shard_map/chunk:9", 2),  # of 25
        ],
    ),
)
def test_the_compiler_is_asked_until_it_fits(plans, fixed, each, devices, expected, most_asked):
    algorithm, state, batch = one_round()
    slots = 100
    shapes = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct((slots, *leaf.shape[1:]), leaf.dtype) if leaf.ndim else leaf
        ),
        batch,
    )
    asked = []

    def needs(name):
        asked.append(name)
        share = slots // devices
        at_once = {"vmap": share, "shard_map": share, "scan": 1}.get(name.rpartition("/")[2])
        return fixed + each * (at_once or int(name.rpartition(":")[2]))

    def choose():
        return planner.choose_map(
            lambda client_map: build_round(algorithm, client_map),
            state,
            shapes,
            target=machine("tpu", devices, 1000),
            needs=needs,
        )

    plan = choose()
    assert plan.client_map == expected
    assert len(asked) <= most_asked
    assert plan.memory_bytes == needs(expected)
    if expected != "scan":
        assert plan.memory_bytes <= 900
    asked.clear()
    assert choose() == plan  # remembered
    assert not asked


@pytest.mark.parametrize(
    "client_map",
    [
        "shard_map:3/chunk:2",
        "auto",
        *(pytest.param(m, marks=SLOW) for m in ("shard_map:2", "pmap:2/vmap")),
    ],
)
def test_shares_of_devices_give_the_same_round(client_map):
    algorithm, state, batch = one_round()
    expected = jax.jit(build_round(algorithm, "scan"))(state, batch)
    actual = jax.jit(build_round(algorithm, client_map))(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shard_map:0", "n in shard_map:n must be at least 1"),
        ("scan:2", "scan takes no number"),
        ("auto:2", "auto takes no number"),
        ("scan/vmap", "only shard_map and pmap have a share"),
        ("shard_map/pmap", "a share is scan, vmap or chunk:n"),
        ("shard_map/chunk:0", "n in chunk:n must be at least 1"),
        ("shard_map/best", "must be one of"),
    ],
)
def test_bad_names_are_told(name, message):
    with pytest.raises(ValueError, match=message):
        check_client_map(name)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match=r"'shard_map:99'; there are 8 cpu devices"):
        parse_client_map("shard_map:99")


@pytest.mark.parametrize(
    ("client_map", "expected"),
    [
        *(("vmap", 10), ("scan", 1), ("chunk:4", 4), ("chunk:99", 10), ("shard_map", 5)),
        *(("shard_map:1/scan", 1), ("pmap/chunk:3", 3), ("pmap", 5)),
    ],
)
def test_clients_of_a_device_at_once(client_map, expected):
    assert planner.at_once(client_map, 10, machine("tpu", 2)) == expected
    if "/" not in client_map and ":" not in client_map:
        assert planner.at_once("shard_map", 10, machine("cpu", 2)) == 1


def test_measure_is_for_runs():
    with pytest.raises(ValueError, match="only simulate is"):
        build_round(algorithms.fedavg(loss_fn, client_lr=0.1), "measure")


def test_the_faster_plan_wins_and_is_remembered(plans):
    times = {"scan": 2.0, "vmap": 1.0}
    found = planner.fastest(["scan", "vmap"], times.__getitem__, ["method"])
    assert found == ("vmap", False)
    assert planner.fastest(["scan", "vmap"], {}.__getitem__, ["method"]) == ("vmap", True)
    times = {"scan": 1.0, "vmap": 2.0}
    other = planner.fastest(["scan", "vmap"], times.__getitem__, ["other"])
    assert other == ("scan", False)
    (first, second) = plans.glob("*.json")
    for file in (first, second):
        file.write_text("{")  # damaged answers are measured again
    assert planner.fastest(["scan", "vmap"], times.__getitem__, ["method"])[0] == "scan"
    assert json.loads(first.read_text() if first.read_text() != "{" else second.read_text())


@pytest.mark.parametrize(
    ("platform", "devices", "planned", "other"),
    [
        ("cpu", 2, "shard_map", "scan"),
        ("cpu", 1, "scan", "chunk:2"),
        ("gpu", 1, "vmap", "chunk:5"),
        ("gpu", 1, "chunk:4", "chunk:2"),
        ("gpu", 2, "shard_map", "shard_map/chunk:2"),
        ("gpu", 2, "shard_map/chunk:4", "shard_map/chunk:1"),
    ],
)
def test_alternatives_are_client_maps(platform, devices, planned, other):
    assert planner.alternatives(planned, 10, machine(platform, devices)) == (planned, other)
    check_client_map(other)


def test_lowering_follows_the_target():
    shapes = (jax.ShapeDtypeStruct((2, 6, 6, 3), jnp.float32),
              jax.ShapeDtypeStruct((3, 3, 3, 4), jnp.float32))  # fmt: skip
    convolve = jax.jit(lambda x, kernel: convolution(x, kernel))  # traced anew for each target

    def is_lax():
        return "conv_general_dilated" in str(jax.make_jaxpr(convolve)(*shapes))

    assert not is_lax()
    for name in ("v5e", "h200"):
        with tracing_for(named(name)):
            assert is_lax()
    with tracing_for(dataclasses.replace(named("v5e"), convolution="im2col")):
        assert not is_lax()
    with tracing_for(None):
        assert not is_lax()


PROGRAM = """
import os, sys
{before}
import fedjax_lab
import jax
print(jax.device_count(), len(os.sched_getaffinity(0)))
"""


def test_an_answer_that_cannot_be_kept_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "fedjax_lab").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = {"scan": 2.0, "vmap": 1.0}
    with pytest.warns(UserWarning, match=r"cannot be stored in .*fedjax_lab/plans .*plan again"):
        found = planner.fastest(["scan", "vmap"], times.__getitem__, ["method"])
    assert found == ("vmap", False)


def test_a_user_without_a_home_plans_anew(monkeypatch):
    def nowhere():
        raise OSError("the user has no home")

    monkeypatch.setattr(planner, "user_cache", nowhere)
    with pytest.warns(UserWarning, match=r"cannot be stored in .*\(the user has no home\)"):
        found = planner.fastest(["scan", "vmap"], {"scan": 2.0, "vmap": 1.0}.get, ["method"])
    assert found == ("vmap", False)


@pytest.mark.parametrize(
    ("before", "environment", "expected"),
    [
        pytest.param("", {}, None, marks=pytest.mark.methods),
        ("", {"FEDJAX_LAB_CPU_DEVICES": "3"}, 3),
        pytest.param("", {"XLA_FLAGS": "--xla_force_host_platform_device_count=5"}, 5, marks=SLOW),
        pytest.param("import jax; jax.config.update('jax_num_cpu_devices', 4)", {}, 4, marks=SLOW),
        pytest.param("import jax; jax.devices()", {}, 1, marks=pytest.mark.methods),
    ],
)
def test_importing_makes_one_cpu_device_per_core(before, environment, expected):
    inherited = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    devices, cores = map(int, done.stdout.split())
    assert devices == (expected or cores)
