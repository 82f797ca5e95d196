"""Descriptions of closures: names, arguments, and hashes of a user's code, as JSON."""

import functools
import json
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import data, models
from fedjax_lab.descriptions import describe, flat, may_agree, text_of

FACTOR = 0.9


def by_a_global(round):
    return 0.1 * FACTOR**round


def made(rate):
    return lambda round: rate / (1 + round)


def bound(rate, round, floor=0.0):
    return rate + floor * round


class Decay:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, round):
        return self.rate**round


def clipped(norm, decay):
    return optax.chain(optax.clip_by_global_norm(norm), optax.add_decayed_weights(decay))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (optax.constant_schedule(0.1), "constant_schedule(value=0.1)"),
        (
            optax.exponential_decay(0.1, 1, 0.9),
            "exponential_decay(clip_fn=none, decay_rate=0.9, end_value=none, init_value=0.1, "
            "staircase=false, transition_begin=0, transition_steps=1)",
        ),
        (
            clipped(10.0, 1e-3),
            "chain(clip_by_global_norm(max_norm=10), add_decayed_weights(weight_decay=0.001))",
        ),
        (optax.chain(optax.identity(), optax.scale(2.0)), "chain(identity, scale(step_size=2))"),
        (optax.flatten(optax.clip(2.0)), "flatten(inner=clip(max_delta=2))"),
        ([1, None, True, "a", 0.25], "[1, none, true, a, 0.25]"),
        (jnp.float32(0.5), "0.5"),
        (np.arange(3), "[0, 1, 2]"),
        (np.zeros((10, 10), np.float32), "float32[10, 10]"),
        (jax.nn.relu, "relu"),
        (optax.piecewise_constant_schedule(1.0, {5: 0.1}), "piecewise_constant_schedule("
         "boundaries_and_scales={5: 0.1}, init_value=1)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_text_of_a_description(value, text):
    assert text_of(describe(value)) == text


def test_a_schedule_inside_an_optimiser_is_found():
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 20)
    parts = dict(flat(describe(optax.sgd(rate, momentum=0.8)), "opt"))
    assert parts["opt"] == "chain"
    assert parts["opt.0.decay"] == 0.8
    of_schedule = "opt.1.step_size_fn.learning_rate"
    assert parts[of_schedule] == "join_schedules"
    assert parts[f"{of_schedule}.schedules"][1]["arguments"]["decay_steps"] == 15


PAIRS = {
    "decay": [optax.exponential_decay(0.1, 1, factor) for factor in (0.998, 0.9)],
    "cosine": [optax.cosine_decay_schedule(0.1, steps) for steps in (10, 20)],
    "clip": [clipped(norm, 1e-3) for norm in (10.0, 0.1)],
    "weight decay": [clipped(10.0, decay) for decay in (1e-3, 1e-1)],
    "adam": [optax.adam(rate) for rate in (0.1, 0.2)],
    "adagrad's first value, which only its init has": [
        optax.adagrad(0.1, initial_accumulator_value=first) for first in (0.1, 0.2)
    ],
    "injected": [optax.inject_hyperparams(optax.sgd)(learning_rate=r) for r in (0.1, 0.2)],
    "every k": [optax.MultiSteps(optax.sgd(0.1), k).gradient_transformation() for k in (2, 3)],
    "masked": [
        optax.masked(optax.clip(1.0), {"a": True, "b": False}),
        optax.masked(optax.clip(1.0), {"a": True, "b": True}),
    ],
    "masked by a function": [
        optax.masked(optax.clip(1.0), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
        optax.masked(optax.clip(1.0), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 2, tree)),
    ],
    "partition": [
        optax.partition({"a": optax.sgd(rate)}, {"w": "a"}) for rate in (0.1, 0.2)
    ],
    "lambda": [lambda round: 0.1 * round, lambda round: 0.2 * round],
    "list of lambdas": [[lambda round: 0.1, lambda round: 0.1], [lambda round: 0.1, lambda x: 0.2]],
    "closure": [made(0.1), made(0.2)],
    "jitted closure": [jax.jit(made(0.1)), jax.jit(made(0.2))],
    "partial": [functools.partial(bound, 0.1), functools.partial(bound, 0.2)],
    "partial by name": [functools.partial(bound, floor=0.1), functools.partial(bound, floor=0.2)],
    "default": [lambda round, rate=0.1: rate, lambda round, rate=0.2: rate],
    "object": [Decay(0.1), Decay(0.2)],
    "method": [Decay(0.1).__call__, Decay(0.2).__call__],
    "large array": [np.zeros(100), np.eye(100)[0]],
    "model": [models.linear(classes) for classes in (10, 20)],
    "width": [models.mlp(10, hidden=(width,)) for width in (4, 8)],
    "linen": [models.from_linen(nn.Dense(units)) for units in (4, 8)],
    "loss": [
        models.classification_loss(models.linear(10).apply, data.preprocess(scale=scale))
        for scale in (16, 255)
    ],
    "kind of loss": [
        models.classification_loss(models.linear(10).apply),
        models.regression_loss(models.linear(10).apply),
    ],
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_what_differs_is_described_differently(pair):
    one, other = map(describe, pair)
    for value in (one, other):
        assert "0x" not in json.dumps(value, allow_nan=False)
    assert one != other


def test_a_global_is_an_argument(monkeypatch):
    before = describe(by_a_global)
    assert before["arguments"] == {"FACTOR": 0.9}
    monkeypatch.setitem(globals(), "FACTOR", 0.8)
    assert describe(by_a_global)["arguments"] == {"FACTOR": 0.8}


def test_a_loss_names_its_model():
    model = models.linear(7)

    def loss(params, examples, key):
        return model.apply(params, examples.x, key).sum(-1)

    assert "Classifier(num_classes=7" in text_of(describe(loss))
    assert '"num_classes": 7' in json.dumps(describe(models.classification_loss(model.apply)))


def test_what_has_no_json_becomes_text():
    assert describe([np.inf, np.nan, 1j, np.float16, np.dtype("int8"), {1: {2}}]) == [
        *("inf", "nan", "1j", "float16", "int8"),
        {"1": [2]},
    ]
    assert jax.jit(lambda value: [describe(value)] and value)(0.5) == 0.5
    seen = []
    jax.make_jaxpr(lambda value: seen.append(describe(made(value))) or value)(0.5)
    assert seen[0]["arguments"] == {"rate": "traced"}
    itself: list = []
    itself.append(itself)
    assert describe(itself) == [{"type": "list"}]


OF_A_SCRIPT = """
def schedule(round, kinds=frozenset("abcdefgh")):
    return 0.1 if round in {1, 2, 3} else len(kinds)

described = describe(optax.masked(optax.adam(schedule), lambda tree: {"a", "b", "c"}))
"""


def test_another_process_describes_it_alike():
    here = {"describe": describe, "optax": optax, "__name__": "__main__"}
    exec(OF_A_SCRIPT, here)
    imports = "import json, optax\nfrom fedjax_lab.descriptions import describe\n"
    script = f"{imports}{OF_A_SCRIPT}\nprint(json.dumps(described))"
    env = {"PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)}
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
    ).stdout
    assert json.loads(said) == here["described"]


def test_descriptions_of_two_versions():
    now = describe(optax.exponential_decay(0.1, 1, 0.9))
    assert may_agree("function exponential_decay.<locals>.schedule", now)
    assert not may_agree("function cosine_decay_schedule.<locals>.schedule", now)
    assert may_agree("GradientTransformationExtraArgs", describe(clipped(1.0, 0.1)))
    assert not may_agree(None, now)
    assert not may_agree(0.1, now)
    assert not may_agree(describe(optax.exponential_decay(0.1, 1, 0.8)), now)
    renamed = {**now, "arguments": {"rate": 0.3, "init_value": 0.1}}
    assert may_agree(renamed, now)
    assert may_agree({**describe(made(0.1)), "code": "of another Python"}, describe(made(0.1)))
    assert not may_agree(describe(made(0.1)), describe(made(0.2)))


def test_what_is_described_while_a_program_is_traced():
    """As in a sweep, whose points are traced: a key is a value, a point's number is none."""
    key, found = jax.random.key(3), {}

    @jax.jit
    def trace(rate):
        found.update(key=describe(optax.add_noise(0.1, 0.5, key)), rate=describe(optax.sgd(rate)))
        return rate

    trace(jnp.float32(0.1))
    assert found["key"] == describe(optax.add_noise(0.1, 0.5, key))
    assert found["rate"] != describe(optax.sgd(0.1))
