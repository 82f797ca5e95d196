"""Runs on examples that stay on the host: the bits of runs on examples that are on the device."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, simulate
from tests.simulation.test_run import assert_same_bits

CLIENTS = 12
SETTINGS = {"rounds": 7, "cohort_size": 4, "local_steps": 2, "batch_size": 4, "eval_every": 4}
ROOMY, TIGHT = 100_000, 6_000  # bytes: TIGHT is enough for two rounds and not for four


def loss_fn(params, examples, key):
    x, y = examples
    return (jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2


rng = np.random.default_rng(1)
OWNERS = np.repeat(np.arange(CLIENTS), rng.integers(3, 31, CLIENTS))
rng.shuffle(OWNERS)
X = rng.normal(size=(len(OWNERS), 5)).astype(np.float32)
Y = rng.normal(size=len(OWNERS)).astype(np.float32)
PARAMS = {"w": jnp.linspace(-1, 1, 5), "b": jnp.zeros(())}
METHODS = {
    "fedavg": algorithms.fedavg(loss_fn, client_lr=0.1),
    "scaffold": algorithms.scaffold(loss_fn, client_lr=0.1),
    "mime": algorithms.mime(loss_fn, client_lr=0.1, momentum=0.9),
    "stem": algorithms.stem(loss_fn, client_lr=0.1, momentum=0.5),
    "gradma": algorithms.gradma(
        loss_fn, client_lr=0.1, server_momentum=0.9, memory_decay=0.5, memory_size=12
    ),
    "fafed": algorithms.fafed(loss_fn, client_lr=0.1, momentum=0.9, second_moment_decay=0.9),
    "cfedavg": algorithms.cfedavg(loss_fn, client_lr=0.1, compressor="top_k:0.5"),
}
FULL = {"mime": {"full_examples": True}}


def resident():
    return data.partition((X, Y), OWNERS, CLIENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return data.write_stream(tmp_path_factory.mktemp("stream") / "train", (X, Y))


def streamed(folder, memory=ROOMY):
    return data.stream(folder, OWNERS, CLIENTS, memory=memory)


def run(name, clients, **settings):
    return simulate(
        METHODS[name], PARAMS, clients, **{**SETTINGS, **FULL.get(name, {}), **settings}
    )


def assert_same_run(actual, expected):
    assert_same_bits(actual.state, expected.state)
    assert actual.history == expected.history


# Every method one way, and every client map; TIGHT cuts chunks, down to single rounds.
CASES = [(name, "scan", TIGHT) for name in METHODS if name != "scaffold"]
CASES += [("scaffold", "vmap", TIGHT), ("scaffold", "shard_map:4", TIGHT)]
CASES += [("mime", "shard_map:4", TIGHT), ("stem", "vmap", ROOMY)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("name", "client_map", "memory"), [("scaffold", "scan", TIGHT), *SLOW])
def test_a_stream_gives_the_same_bits(folder, name, client_map, memory):
    memory += 2_500 * (name in FULL)  # for one round and not for two
    actual = run(name, streamed(folder, memory), client_map=client_map)
    assert_same_run(actual, run(name, resident(), client_map=client_map))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"local_steps": None, "local_epochs": 2, "weights": "examples"},
        {"replace": True},
        {"devices": data.Devices(min_local_steps=1, dropout=0.3)},
        {"sample_cohort": lambda key, round: (round + jnp.arange(4)) % CLIENTS},
        {"eval_every": 1},
        {"on_nonfinite": "stop"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_whatever_is_drawn_is_there(folder, settings):
    actual = run("fedavg", streamed(folder), client_map="scan", **settings)
    assert_same_run(actual, run("fedavg", resident(), client_map="scan", **settings))
