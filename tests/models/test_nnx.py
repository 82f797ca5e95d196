"""Modules of flax NNX as models, against plain JAX on their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_lab import CohortBatch, algorithms, build_round, data, load_run, simulate, tree
from fedjax_lab.clients.leaves import split
from fedjax_lab.models import (
    classification_loss,
    running_statistics,
    to_state_dict,
    torch_table,
)
from fedjax_lab.models.batch_norm import normalise_batch
from fedjax_lab.models.nnx import from_nnx
from tests.models.test_batch_norm import normal

KEY = jax.random.key(0)


class Net(nnx.Module):
    def __init__(self, rngs, norm=None):
        self.first = nnx.Linear(5, 8, rngs=rngs)
        self.norm = norm and norm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        h = self.first(x)
        h = self.norm(h) if self.norm else h
        return self.last(self.dropout(jax.nn.relu(h)))


def forward(params, x, mask=1.0):
    first, last = params["first"], params["last"]
    h = np.maximum(x @ np.asarray(first["kernel"]) + np.asarray(first["bias"]), 0) * mask
    return h @ np.asarray(last["kernel"]) + np.asarray(last["bias"])


def test_evaluation_is_the_module_and_training_drops_by_the_key():
    model, x = from_nnx(lambda rngs: Net(rngs)), normal((6, 5))
    params, apply = jax.jit(model.init)(KEY, x[:1]), jax.jit(model.apply)
    plain = nnx.to_pure_dict(params)
    np.testing.assert_allclose(apply(params, x), forward(plain, x), atol=1e-5)
    once, again, other = (apply(params, x, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert np.abs(np.asarray(once) - np.asarray(other)).max() > 0.01
    # Each key's outputs are those of some mask of zeros and twos.
    masks = [2.0 * np.array(list(f"{i:08b}"), float) for i in range(256)]
    for row, output in zip(x, np.asarray(once), strict=True):
        assert min(np.abs(forward(plain, row, mask) - output).max() for mask in masks) < 1e-5
    different = jax.jit(model.init)(jax.random.key(1), x[:1])
    assert not np.array_equal(jax.tree.leaves(different)[-1], jax.tree.leaves(params)[-1])


@pytest.mark.methods
def test_a_round_of_fedavg_on_it():
    model, x = from_nnx(lambda rngs: Net(rngs, nnx.LayerNorm)), normal((2, 3, 4, 5))
    params = model.init(KEY, x[0, 0])
    batch = {
        "client_ids": jnp.arange(2),
        "examples": data.Examples(x, jnp.zeros((2, 3, 4), jnp.int32)),
        "key": KEY,
        "round": jnp.int32(0),
    }
    algorithm = algorithms.fedavg(classification_loss(model.apply), client_lr=0.5)
    state = algorithm.init(params, 2)
    losses = []
    for _ in range(5):
        state, metrics = jax.jit(build_round(algorithm, "vmap"))(state, CohortBatch(**batch))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert jax.tree.structure(algorithm.params(state)) == jax.tree.structure(params)


def test_what_nobody_would_average_is_refused():
    with pytest.raises(ValueError, match=r"variables of the kind BatchStat; .*BatchNorm"):
        from_nnx(lambda rngs: Net(rngs, nnx.BatchNorm))
    with pytest.raises(TypeError, match=r"must return an nnx\.Module"):
        from_nnx(lambda rngs: 3)
    with pytest.raises(TypeError, match="build is of type Net; it must be a function that returns"):
        from_nnx(Net(nnx.Rngs(0)))


class Flagged(nnx.Module):
    """Dropout as the call says, whose random numbers it has or gets."""

    def __init__(self, rngs, own):
        self.dropout = nnx.Dropout(0.5, rngs=rngs if own else None)


class WithTrain(Flagged):
    def __call__(self, x, train=False, rngs=None):
        return self.dropout(x, deterministic=not train, rngs=rngs)


class WithDeterministic(Flagged):
    def __call__(self, x, *, deterministic=True, rngs=None):
        return self.dropout(x, deterministic=deterministic, rngs=rngs)


class WithoutAFlag(Flagged):
    def __call__(self, x, rngs):
        return self.dropout(x, rngs=rngs)


class WithNoise(Flagged):
    """Dropout if there are random numbers, as some modules tell training from evaluation."""

    def __call__(self, x, rngs=None):
        return x if rngs is None else self.dropout(x, rngs=rngs)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (WithTrain, True),
        (WithTrain, False),
        (WithDeterministic, True),
        (WithDeterministic, False),
        (WithoutAFlag, True),
        (WithoutAFlag, False),
        (WithNoise, False),
    ],
)
def test_arguments_of_the_call_are_set(kind, own):
    model, x = from_nnx(lambda rngs: kind(rngs, own)), np.ones((4, 50), np.float32)
    params = model.init(KEY, x)
    np.testing.assert_array_equal(model.apply(params, x), x)
    trained, again, other = (model.apply(params, x, jax.random.key(seed)) for seed in (1, 1, 2))
    assert set(np.unique(trained)) == {0, 2}
    np.testing.assert_array_equal(trained, again)
    assert not np.array_equal(trained, other)


def test_the_paths_of_its_leaves_are_names_everywhere(tmp_path):
    model = from_nnx(lambda rngs: Net(rngs, nnx.LayerNorm))
    params = model.init(KEY, normal((1, 5)))
    layers = {"first": ["bias", "kernel"], "last": ["bias", "kernel"], "norm": ["bias", "scale"]}
    names = [f"{layer}/{leaf}" for layer, leaves in layers.items() for leaf in leaves]
    assert list(tree.by_path(params)) == names
    _, biases = split(params, "bias$")
    assert [leaf.shape for leaf in jax.tree.leaves(biases)] == [(8,), (3,), (8,)]

    x = normal((8, 5))
    clients = data.partition(data.Examples(x, np.arange(8, dtype=np.int32) % 3), "iid", 2)
    algorithm = algorithms.fedavg(classification_loss(model.apply), client_lr=0.1)
    result = simulate(
        algorithm, params, clients, rounds=1, cohort_size=2, local_steps=1, batch_size=4,
        client_map="scan", run_dir=tmp_path,
    )  # fmt: skip
    of_run, trained = load_run(tmp_path).params, nnx.to_pure_dict(result.params)
    jax.tree.map(np.testing.assert_array_equal, of_run, trained)
    like = load_run(tmp_path, like=params).params
    assert jax.tree.structure(like) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, like, result.params)
    # The graph of the module, of thousands of entries, is no setting of the run.
    described = load_run(tmp_path).config["functions"]["loss_fn"]
    assert "graph" not in str(described)
    assert len(str(described)) < 1000

    table = torch_table(params, {"first": "fc1", "last": "fc2", "norm": "norm"})
    state = to_state_dict(result.params, table)
    h = x @ state["fc1.weight"].T + state["fc1.bias"]
    h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-6)
    h = np.maximum(h * state["norm.weight"] + state["norm.bias"], 0)
    expected = h @ state["fc2.weight"].T + state["fc2.bias"]
    np.testing.assert_allclose(model.apply(result.params, x), expected, atol=1e-5)


class OwnBatchNorm(nnx.Module):
    use_running_average = False

    def __init__(self, size, rngs):
        zeros, ones = jnp.zeros(size), jnp.ones(size)
        self.scale, self.bias = nnx.Param(ones), nnx.Param(zeros)
        self.running_mean, self.running_var = nnx.Param(zeros), nnx.Param(ones)

    def __call__(self, x, mask):
        leaves = (self.scale, self.bias, self.running_mean, self.running_var)
        training = not self.use_running_average
        return normalise_batch(x, *(leaf[...] for leaf in leaves), training=training, mask=mask)


class NormNet(Net):
    def __call__(self, x, example_mask=None):
        return self.last(jax.nn.relu(self.norm(self.first(x), example_mask)))


def test_batch_norm_of_ones_own_in_nnx_and_its_mask():
    model = from_nnx(lambda rngs: NormNet(rngs, OwnBatchNorm))
    x, real = normal((6, 5)), np.array([True] * 4 + [False] * 2)
    params = model.init(KEY, x[:1])
    examples = data.Examples(x, np.arange(6, dtype=np.int32) % 3)
    loss_fn = classification_loss(model.apply)

    def loss(params):
        return loss_fn(params, examples, KEY, mask=jnp.asarray(real))[:4].mean()

    plain = nnx.to_pure_dict(params)
    h = (x @ np.asarray(plain["first"]["kernel"]) + np.asarray(plain["first"]["bias"]))[:4]
    gradient = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))["norm"]
    # A step of rate 1 replaces the running statistics by those of the real examples.
    np.testing.assert_allclose(0 - gradient["running_mean"], h.mean(0), atol=1e-5)
    np.testing.assert_allclose(1 - gradient["running_var"], h.var(0, ddof=1), atol=1e-5)
    h = np.maximum((h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5), 0)
    expected = h @ np.asarray(plain["last"]["kernel"]) + np.asarray(plain["last"]["bias"])
    found = jax.jit(model.apply)(params, x, KEY, mask=jnp.asarray(real))[:4]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    held = running_statistics(params)
    assert {name: bool(v) for name, v in tree.by_path(held).items() if "norm/" in name} == {
        "norm/bias": False, "norm/running_mean": True, "norm/running_var": True, "norm/scale": False
    }  # fmt: skip
    # A user's params may hold two states in a tuple.
    both = running_statistics((params, {"more": params}))
    assert jax.tree.leaves(both) == 2 * jax.tree.leaves(held)
    (path, _), *_ = jax.tree_util.tree_leaves_with_path((params, 0))
    assert tree.path_text(path) == "0/first/bias"
