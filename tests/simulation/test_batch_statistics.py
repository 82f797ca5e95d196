"""flax's own batch normalisation, whose statistics are no parameters: refused in words."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fedjax_lab import algorithms, data, simulate
from tests.tiers import few


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dense = nnx.BatchNorm(5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.norm(x))


def run(logits_of, params):
    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    clients = data.partition(data.Examples(x, np.arange(8) % 3), "iid", num_clients=2)

    def loss_fn(params, examples, key):
        logits = logits_of(params, examples.x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, examples.y)

    return simulate(
        algorithms.fedavg(loss_fn, client_lr=0.1), params, clients, rounds=1, cohort_size=2,
        local_steps=1, batch_size=4, client_map="scan",
    )  # fmt: skip


def linen():
    return Linen(), Linen().init(jax.random.key(0), jnp.ones((2, 5)))


def linen_with_params_alone():
    module, variables = linen()
    run(lambda params, x: module.apply({"params": params}, x), variables["params"])


def nnx_with_params_alone():
    graph, params, rest = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)
    run(lambda params, x: nnx.merge(graph, params, rest)(x), params)


def nnx_module_from_outside():
    module = Nnx(nnx.Rngs(0))

    def logits_of(params, x):
        nnx.update(module, params)
        return module(x)

    run(logits_of, nnx.state(module, nnx.Param))


@pytest.mark.parametrize(
    "wrong", few(1, [linen_with_params_alone, nnx_with_params_alone, nnx_module_from_outside])
)
def test_an_error_says_what_to_take_instead(wrong):
    with pytest.raises(ValueError, match=r"^loss_fn: .*models\.batch_norm\.BatchNorm, .*from_nnx"):
        wrong()


@pytest.mark.slow
def test_statistics_that_nothing_moves_are_warned_of():
    module, variables = linen()

    def logits_of(variables, x):
        return module.apply(variables, x, mutable=["batch_stats"])[0]

    with pytest.warns(UserWarning, match=r"batch_stats/BatchNorm_0/mean.*would not follow"):
        run(logits_of, variables)
    graph, state = nnx.split(Nnx(nnx.Rngs(0)))
    with pytest.warns(UserWarning, match=r"\(norm/mean, norm/var\).*would not follow"):
        run(lambda state, x: nnx.merge(graph, state)(x), state)
