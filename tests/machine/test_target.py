"""Targets: names, what is known of chips, and plans for machines that are not here."""

import dataclasses

import jax
import pytest

import fedjax_lab
from fedjax_lab import algorithms, build_round, data, models
from fedjax_lab.clients.mapping import parse_client_map, single_device_map
from fedjax_lab.command.cli import main
from fedjax_lab.machine.compiler import with_devices
from fedjax_lab.machine.target import CHIPS, Target, here, named, platform_of
from fedjax_lab.simulation.simulate import simulate


@pytest.mark.parametrize(
    ("name", "platform", "count"),
    [
        ("v5e", "tpu", 1),
        ("v5e:2x2", "tpu", 4),
        ("v5e:16x16", "tpu", 256),
        ("v4:2x2x1", "tpu", 4),
        ("v5p", "tpu", 1),
        ("h200", "gpu", 1),
        ("a100:8", "gpu", 8),
        ("cpu", "cpu", 1),
        ("cpu:8", "cpu", 8),
    ],
)
def test_names(name, platform, count):
    target = named(name)
    assert (target.name, target.platform, target.num_devices) == (name, platform, count)
    assert platform_of(target) == platform
    assert single_device_map(target) == ("scan" if platform == "cpu" else "vmap")
    assert not target.devices


def test_here_is_what_jax_sees():
    target = here()
    assert (target.platform, target.devices) == ("cpu", tuple(jax.devices()))
    assert target.num_devices == jax.device_count()
    assert named("here") == target
    assert with_devices(target) is target
    assert single_device_map() == "scan"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5", "must be one of here, cpu, v4, v5e"),
        ("v5e:4", "write its size like v5e:2x2"),
        ("v4:2x2", "write its size like v4:2x2x2"),
        ("h200:2x2", "write its size like h200:8"),
        ("h200:0", "write its size like h200:8"),
        ("cpu:", "write its size|must be one of|cpu"),
    ],
)
def test_bad_names_are_told(name, message):
    with pytest.raises(ValueError, match=message):
        named(name)


def test_an_unknown_platform_is_told():
    with pytest.raises(ValueError, match="platform is 'cuda'; it must be one of cpu, gpu, tpu"):
        Target("mine", "cuda", "a GPU", 1)


def test_memory_of_chips_is_that_of_the_data_sheets():
    assert CHIPS["v5e"].memory_bytes == 15.75 * 2**30
    assert all(1e10 < chip.memory_bytes < 2e11 for chip in CHIPS.values())


def test_more_cpu_devices_than_there_are():
    with pytest.raises(ImportError, match="FEDJAX_LAB_CPU_DEVICES=99"):
        with_devices(named("cpu:99"))
    assert with_devices(named("cpu:2")).devices == tuple(jax.devices()[:2])


def test_a_map_over_devices_needs_some():
    described = parse_client_map("shard_map", named("v5e:2x2"))
    assert described.shares == 4
    with pytest.raises(ValueError, match="the target is a tpu that is only described"):
        described.run()


def problem():
    train, _ = data.load("digits")
    clients = data.partition(train, "iid", num_clients=8, seed=0)
    model = models.mlp(10, hidden=(4,))
    loss_fn = models.classification_loss(model.apply, data.preprocess(scale=16))
    return loss_fn, jax.jit(model.init)(jax.random.key(0), train.x[:1]), clients


SCHEDULE = {"cohort_size": 4, "local_steps": 2, "batch_size": 4}


@pytest.mark.slow
def test_a_plan_for_a_machine_whose_compiler_is_here():
    loss_fn, params, clients = problem()
    scaffold = algorithms.scaffold(loss_fn, client_lr=0.1)
    found = fedjax_lab.plan(scaffold, params, clients, target="cpu:2", **SCHEDULE)
    assert found.plan.client_map == "shard_map"
    assert found.note is None
    assert found.figures.memory > 2 * found.model_bytes
    rows = dict(found.rows())
    assert rows["one round"] == "cpu:2: 2 x cpu"
    assert {"all-reduce", "- temporaries", "compile"} <= rows.keys()


def test_a_plan_without_a_compiler_says_how_to_get_one():
    loss_fn, params, clients = problem()
    fedavg = algorithms.fedavg(loss_fn, client_lr=0.1)
    here = fedjax_lab.plan(
        fedavg, params, clients, target=named("v5e"), client_map="chunk:2", **SCHEDULE
    )
    if here.figures is not None:
        pytest.skip("libtpu is installed")
    assert here.plan.client_map == "chunk:2"
    assert "pip install jax[tpu]" in dict(here.rows())["its compiler"]
    assert here.plan.memory_bytes is None


@pytest.mark.slow
def test_a_run_takes_the_program_that_its_plan_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loss_fn, params, clients = problem()
    fedavg = algorithms.fedavg(loss_fn, client_lr=0.1)
    # What an accelerator is to the planner, made of this machine's CPU devices.
    like_a_gpu = dataclasses.replace(here(), platform="gpu", memory_bytes=10**9)
    monkeypatch.setattr("fedjax_lab.simulation.chunk_planner.here", lambda: like_a_gpu)
    settings = {**SCHEDULE, "rounds": 4, "eval_every": 2}
    planned = simulate(fedavg, params, clients, **settings)
    again = simulate(fedavg, params, clients, **settings)  # the answer is remembered
    named_ = simulate(fedavg, params, clients, **settings, client_map="shard_map:4")
    assert planned.history == again.history
    for row, other in zip(planned.history, named_.history, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert len(list((tmp_path / "fedjax_lab" / "plans").iterdir())) == 1


@pytest.mark.methods
def test_the_command_line_says_it(capsys):
    words = ["plan", "--target", "cpu:2", "--dataset", "digits", "--model", "linear"]
    assert main([*words, "--cohort-size", "4", "--batch-size", "4"]) == 0
    shown = capsys.readouterr().out
    assert "shard_map" in shown
    assert "memory, by its compiler" in shown
    assert main(["plan", "--target", "v5"]) == 2
    assert "target is 'v5'" in capsys.readouterr().err


def test_a_round_for_a_target_convolves_as_the_target_does():
    loss_fn, _, _ = problem()
    fedavg = algorithms.fedavg(loss_fn, client_lr=0.1)
    assert build_round(fedavg, "vmap", target=named("v5e")) is not None
