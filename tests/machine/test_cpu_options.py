"""Options of the compiler for CPU: where they exist, and what they leave out of a round."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, models, simulate, sweep
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.machine import cpu_options
from fedjax_lab.machine.cpu_options import quick_options, round_options
from fedjax_lab.machine.quick import quick_jit
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.simulation.run import Run

IN_PLACE = {"xla_cpu_copy_insertion_use_region_analysis": True}


@pytest.fixture
def options_of_rounds(monkeypatch):
    """The options of programs of rounds, which are jitted by name and compiled by hand."""
    seen = []
    jit, compile = jax.jit, jax.stages.Lowered.compile

    def spy_on_jit(function, **settings):
        if getattr(function, "__name__", "") == "run_rounds":
            seen.append(settings["compiler_options"])
        return jit(function, **settings)

    def spy_on_compile(self, compiler_options=None):
        seen.append(compiler_options)
        return compile(self, compiler_options)

    monkeypatch.setattr(jax, "jit", spy_on_jit)
    monkeypatch.setattr(jax.stages.Lowered, "compile", spy_on_compile)
    return seen


@pytest.fixture
def another_compiler(monkeypatch):
    """A compiler that knows no option."""
    monkeypatch.setattr(cpu_options, "_EMITTERS", "xla_cpu_no_such_option")
    monkeypatch.setattr(cpu_options, "_REGIONS", "xla_cpu_no_such_option_either")


def task():
    train = data.Examples(np.eye(8, dtype=np.float32), np.arange(8, dtype=np.int32) % 3)
    clients = data.partition(train, "iid", num_clients=2, seed=0)
    model = models.build("mlp", num_classes=3, hidden=(7, 5))
    params = model.init(jax.random.key(0), train.x[:1])
    return models.classification_loss(model.apply), params, clients


PLAN = {"cohort_size": 2, "local_steps": 3, "batch_size": 2}


def test_the_compiler_here_knows_them():
    has_emitters = jax.__version_info__ < (0, 11)
    assert quick_options() == ({"xla_cpu_use_fusion_emitters": False} if has_emitters else None)
    assert round_options() == IN_PLACE


def test_there_are_none_where_the_compiler_refuses_them(another_compiler):
    assert quick_options() is round_options() is None
    np.testing.assert_array_equal(quick_jit(jnp.cumsum)(jnp.arange(4)), [0, 1, 3, 6])
    loss_fn, params, clients = task()
    result = simulate(algorithms.fedavg(loss_fn, client_lr=0.1), params, clients, rounds=1, **PLAN)
    assert np.isfinite(result.history[-1]["loss"])


def test_there_are_none_on_accelerators(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert quick_options() is round_options() is None


def copies(program, shape):
    """How many copies of a shape a program has."""
    return len(re.findall(rf"= {re.escape(shape)}\S* copy\(", program.as_text()))


def test_local_steps_update_params_in_place_with_the_same_bits():
    loss_fn, params, clients = task()
    run = Run(algorithms.fedavg(loss_fn, client_lr=0.1), Schedule(**PLAN))
    key, first = jax.random.key(0), jnp.int32(0)
    state = run.start(params, clients, key, ())
    lowered = build_chunk(run, Placement.of("scan")).lower(state, clients, key, first, length=4)
    options = {**IN_PLACE, "xla_cpu_copy_insertion_use_region_analysis": False}
    ours, copying = lowered.compile(), lowered.compile(options)
    for shape in ("f32[7,5]", "f32[5,3]"):  # read once more after their gradients are known
        assert copies(copying, shape) == copies(ours, shape) + 1
    assert copies(copying, "f32[8,7]") == copies(ours, "f32[8,7]")
    ends = [
        program(jax.tree.map(jnp.copy, state), clients, key, first) for program in (ours, copying)
    ]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_runs_and_sweeps_compile_their_rounds_so_and_never_in_a_hurry(options_of_rounds):
    loss_fn, params, clients = task()
    options_of_rounds.clear()
    simulate(algorithms.fedavg(loss_fn, client_lr=0.1), params, clients, rounds=1, **PLAN)
    assert options_of_rounds == [IN_PLACE, None]  # of jit, and nothing else when it is compiled

    def build(client_lr):
        return algorithms.fedavg(loss_fn, client_lr=client_lr)

    options_of_rounds.clear()
    sweep(build, params, clients, points={"client_lr": [0.1, 0.2]}, rounds=1, seeds=[0], **PLAN)
    assert options_of_rounds == [quick_options(), IN_PLACE, quick_options()]  # start, rounds, serve
