"""The benchmark: operations against XLA's count, the ratios' arithmetic, one run of it."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import __main__ as benchmark
from experiments.benchmarks import (
    against,
    compare,
    gpu,
    latency,
    lowerings,
    memory,
    methods,
    ours,
    speed,
    wrappers,
)
from experiments.benchmarks.workloads import WORKLOADS, flop_per_example, layers
from fedjax_lab import models


@pytest.mark.parametrize(
    ("name", "gflop"), [("W1", 139.4), ("W1s", 10.26), ("W2", 617.0), ("W3", 7.53)]
)
def test_operations_of_a_round_are_those_counted_by_hand(name, gflop):
    assert WORKLOADS[name].flop_per_round / 1e9 == pytest.approx(gflop, rel=1e-3)


def two_convolutions(params, x):
    """W5's network written with XLA's own convolution."""
    for kernel in params[:2]:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", None, None, NHWC))
    x = x.reshape(x.shape[0], 14, 2, 14, 2, -1).max((2, 4)).reshape(x.shape[0], -1)
    return jax.nn.relu(x @ params[2]) @ params[3]


NHWC = ("NHWC", "HWIO", "NHWC")


def xla_flops(apply, params, x):
    """Operations that XLA counts in the gradient with respect to the parameters."""
    gradient = jax.grad(lambda params, x: apply(params, x).sum())
    return jax.jit(gradient).lower(params, x).cost_analysis()["flops"]


def test_operations_agree_with_those_of_xla():
    batch = 4
    shapes = [(3, 3, 3, 32), (3, 3, 32, 64), (14 * 14 * 64, 128), (128, 10)]
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    images = jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32)
    counted = batch * flop_per_example(WORKLOADS["W5"])
    # XLA also counts activations, pools and sums, and none of the products with padding.
    assert xla_flops(two_convolutions, params, images) == pytest.approx(counted, rel=0.05)

    model = models.build("mlp", num_classes=10)
    x = jnp.zeros((batch, 28, 28, 1))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    counted = batch * flop_per_example(WORKLOADS["W3"])
    assert xla_flops(model.apply, params, x) == pytest.approx(counted, rel=0.02)


def test_resnet_and_lstm_have_the_operations_of_their_weights():
    # In a language model every weight but the word vectors multiplies once per word.
    workload = WORKLOADS["W6s"]
    model = models.build("lstm", workload.num_classes, **workload.model[1])
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32), jnp.int32))
    weights = sum(
        np.prod(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if len(leaf.shape) == 2 and "embedding" not in jax.tree_util.keystr(path)
    )
    assert flop_per_example(workload) == 6 * 32 * weights
    # He et al. state 1.8e9 for 224 x 224 pixels; CIFAR's stem has published 0.56e9.
    forward = sum(layer.multiplications for layer in layers(WORKLOADS["W4"]))
    assert forward == pytest.approx(0.56e9, rel=0.01)


@pytest.mark.parametrize("name", ["W1", "W1s", "W2", "W3", "W4", "W5", "W6s"])
def test_the_weights_of_a_workload_are_those_of_its_model(name):
    workload = WORKLOADS[name]
    model = ours.build_model("fedjax_lab", name)
    dtype = jnp.int32 if workload.is_text else jnp.uint8
    example = jnp.zeros((1, *workload.input_shape), dtype)
    params = jax.eval_shape(model.init, jax.random.key(0), example)
    weights = sum(layer.weights for layer in layers(workload))
    assert weights == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_the_least_time_of_a_card_is_that_of_its_bytes_or_operations():
    assert gpu.least_seconds("W3", "some other card") is None
    # W3 by hand: 100 clients of 178,110 weights take 5 steps; 10,000 examples of 784 numbers with
    # 310 results. An H100 moves 3.35e12 bytes a second.
    moved = 3 * 4 * 100 * 5 * 178_110 + 4 * 10_000 * (784 + 310)
    assert gpu.least_seconds("W3", "NVIDIA H100 80GB HBM3") == pytest.approx(moved / 3.35e12)
    # W4 is bound by operations in float32, of which an H200 does 67e12 a second.
    expected = WORKLOADS["W4"].flop_per_round / 67e12
    assert gpu.least_seconds("W4", "NVIDIA H200", "float32") == pytest.approx(expected)


def test_a_gpus_rows_are_measured_once_and_in_the_order_of_use(tmp_path, monkeypatch, capsys):
    """The second call goes on; the table has ratios to the best opponent of each repeat."""
    asked = []

    def run_child(system, job, timeout, **about):
        asked.append(system)
        answer = {"milliseconds": [{"fedjax_lab": 2.0, "torch_vmap": 8.0}.get(system, 6.0)]}
        return {**answer, "first_row_seconds": 3.0, "peak_bytes": 10**6}

    monkeypatch.setattr(gpu, "run_child", run_child)
    monkeypatch.setattr(gpu, "write_data", lambda name, folder: ("file", "noise"))
    rows = tmp_path / "rows.jsonl"
    command = ["--platform", "cpu", "--rows", str(rows), "--parts", "rounds"]
    gpu.main(command)
    assert asked[:2] == ["fedjax_lab", "torch_vmap"]
    assert len(asked) == len(set(gpu.read(rows)[i]["key"] for i in range(len(asked))))
    before = len(asked)
    gpu.main(command)
    assert len(asked) == before
    text = capsys.readouterr().out
    assert "| rounds | W0 | fedjax_lab |  | 2.00 | 3.00 | - | - | 3.0 | 1 |" in text
    keys = [task.key for task in gpu.tasks(has_before=True)]
    assert len(keys) == len(set(keys))


def test_ratios_are_medians_over_repeats_to_the_best_opponent_of_each():
    times = {
        "fedjax_lab": {0: 1.0, 1: 2.0, 2: 4.0},
        "torch": {0: 4.0, 1: 4.0, 2: 4.0},
        "pfl": {0: 3.0, 1: 1.0},  # fails in the third
    }
    found = compare.ratios(times)
    assert found["fedjax_lab"] == (1.0, 0.5, 3.0)
    assert found["torch"] == (0.75, 0.25, 1.0)
    assert found["pfl"] == (1.0, 1.0, 1.0)
    assert compare.ratios({"fedjax_lab": {0: 1.0}}) == {"fedjax_lab": None}


def answer(seconds, compile_seconds=None):
    return {
        "milliseconds": [1e3 * seconds, 1e3 * seconds],
        "first_row_seconds": 3.0,
        "compile_seconds": compile_seconds,
        "peak_bytes": 5_000_000,
        "device": "cpu",
        "threads": 2,
        "versions": {},
    }


def test_systems_take_turns_and_missing_ones_are_named():
    turns = []

    def child(system, job, timeout):
        turns.append((job["workload"], system))
        if system == "pfl":
            return {"status": "not installed: pfl"}
        return answer({"fedjax_lab": 0.1, "torch": 0.4, "fedlab": 0.9}[system])

    plan = {name: {"workload": name} for name in ("W1s", "W3")}
    systems = dict.fromkeys(plan, ("fedjax_lab", "torch", "pfl", "fedlab"))
    answers = compare.take_turns(plan, systems, 2, child, say=lambda line, answers: None)
    first = [(name, system) for name in plan for system in systems[name]]
    first.remove(("W3", "pfl"))  # known by then to be missing
    # FedLab takes more than 1.25 times as long as the best opponent: one turn is enough.
    assert turns == first + [turn for turn in first if turn[1] in ("fedjax_lab", "torch")]

    # Answers of an earlier call count, also those of systems that have no turn now.
    before, turns[:] = answers, []
    systems = dict.fromkeys(plan, ("fedjax_lab", "torch"))
    answers = compare.take_turns(plan, systems, 3, child, say=lambda *_: None, before=before)
    assert turns == [(name, system) for name in plan for system in systems[name]]
    numbers = {system: len(given) for system, given in answers["W3"].items()}
    assert numbers == {"fedjax_lab": 3, "torch": 3, "pfl": 1, "fedlab": 1}
    assert len(before["W3"]["torch"]) == 2

    sources = dict.fromkeys(plan, "noise")
    about = {"command": "", "date": "", "load": 0.0, "gemm_gflops": [{"jax": 1e3}]}
    found = compare.measured(plan, sources, answers, **about)
    assert "pfl on W3: not installed: pfl" in speed.about(found)
    *_, row = speed.table(found).splitlines()
    shares = [f"{7.532e9 / seconds / 1e12:.0%}".replace("%", " %") for seconds in (0.1, 0.4)]
    assert row.endswith(f"| 4.00 | 100 | 900 | 400 | {', '.join(shares)} |")
    assert (
        speed.first_rows(found).splitlines()[-1]
        == "| W3 | 3.0 s, 5 MB | 3.0 s, 5 MB | 3.0 s, 5 MB |"
    )


@pytest.mark.slow
def test_a_smoke_run_of_our_own_stores_what_each_process_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "measure_peak", lambda: {"jax": 100.0})
    # An interpreter without PyTorch, wherever the tests run.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    python.chmod(0o755)
    of = {None: sys.executable}
    monkeypatch.setattr(compare, "interpreter", lambda name: of.get(name, str(python)))
    file = tmp_path / "rows.json"
    benchmark.main(f"--scale smoke --workloads W3 --systems fedjax_lab torch --json {file}".split())
    found = json.loads(file.read_text())
    assert found["gemm_gflops"] == [{"jax": 100.0}] * 2
    assert {"processor", "cores", "memory_gib"} == found["machine"].keys()
    assert found["command"].startswith("python -m experiments.benchmarks --scale smoke")
    workload = found["workloads"]["W3"]
    ((ours,), (torch,)) = (workload["systems"][name] for name in ("fedjax_lab", "torch"))
    assert workload["samples_per_round"] == 10_000
    assert len(ours["milliseconds"]) == 1
    assert ours["milliseconds"][0] > 0
    assert ours["compile_seconds"] > 0
    assert ours["threads"] >= 1
    assert ours["versions"]["jax"] == jax.__version__
    assert ours["peak_bytes"] > 60_000 * 784  # the images are in memory
    assert torch["status"].startswith("not installed")
    assert ours["test_loss"] < 2.4
    assert "torch on W3: not installed" in capsys.readouterr().out


@pytest.fixture
def small(monkeypatch):
    """W3 with few clients, for what runs in this process."""
    small = dataclasses.replace(
        WORKLOADS["W3"], num_clients=8, num_examples=64, cohort_size=4, local_steps=2, batch_size=3
    )
    monkeypatch.setitem(WORKLOADS, "W3", small)


@pytest.mark.slow  # two programs
def test_methods_are_set_next_to_their_gradients(small, capsys):
    methods.main(["--workload", "W3", "--methods", "fedspeed", "--rounds", "1", "--repeats", "2"])
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| fedspeed | 2 | ")


@pytest.mark.slow  # two programs
def test_wrappers_take_turns_with_the_plain_method(small, capsys):
    arguments = "--workloads W3 --cohorts 4 --wrappers dp --rounds 1 --repeats 1"
    wrappers.main(arguments.split())
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| W3 | 4 | dp | ")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes choose no core")
@pytest.mark.slow  # two processes
def test_two_checkouts_run_at_once_on_one_core(tmp_path, capsys):
    cores = os.sched_getaffinity(0)
    against.main(f"{compare.ROOT} --workloads W0 --scale smoke --repeats 1".split())
    *_, row = capsys.readouterr().out.splitlines()
    name, before, now, ratio, _, _ = row.strip("| ").split(" | ")
    assert name == "W0"
    assert float(before) > 0
    assert float(now) > 0
    assert 0.2 < float(ratio.split(" ")[0]) < 5
    assert os.sched_getaffinity(0) == cores
    with pytest.raises(SystemExit):
        against.main([str(tmp_path)])
    assert "is no checkout" in capsys.readouterr().err


@pytest.mark.slow  # two CNNs
def test_lowerings_take_turns(monkeypatch, capsys):
    sizes = {"num_clients": 4, "num_examples": 16, "cohort_size": 2, "local_steps": 1}
    tiny = dataclasses.replace(WORKLOADS["W1s"], **sizes, batch_size=2)
    monkeypatch.setitem(WORKLOADS, "W1s", tiny)
    arguments = "--lowerings lax im2col --client-maps vmap --rounds 1 --repeats 1"
    lowerings.main(arguments.split())
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("| W1s | lax | vmap | ")
    assert second.startswith("| W1s | im2col | vmap | ")
    assert first.endswith(" | same |")


@pytest.mark.methods
def test_the_programs_of_a_first_round_stay_small(capsys):
    latency.main(["--measure", "parts", "fedavg"])
    found = json.loads(capsys.readouterr().out)
    sizes = {part: measured[2:] for part, measured in found.items()}
    (drawn, fusions), (in_round, kernels), (together, _) = (
        sizes[part] for part in ("draw", "round", "chunk")
    )
    assert fusions <= 30
    assert kernels < 2.5 * sizes["round by hand"][1]
    assert max(drawn, in_round) < together < 1.1 * (drawn + in_round)
    seconds = dict(zip(latency.STAGES, (1.25, 0.5, 0.25, 3.0), strict=True))
    assert latency.row("x", seconds) == "| x | 1.2 | 0.5 | 0.2 | 3.0 | 5.0 |"


@pytest.mark.slow
def test_memory_holds_the_data(small):
    found = memory.measure(4, 1)
    assert found["process"] > found["arguments"] > 64 * 784
    assert found["temporary"] > 4 * 178_110  # at least one more model


def test_children_of_opponents_import_nothing_of_ours():
    code = (
        "import sys; import experiments.benchmarks.child, experiments.benchmarks.workloads;"
        "assert not {'jax', 'fedjax_lab', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=compare.ROOT, check=True)
