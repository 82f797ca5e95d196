"""Models for the methods that look inside one: the twins' perceptron, and one of two blocks.

The latter is the softmax regression of ``problem`` cut in two, x W and + b, so that a method that
takes it stands beside those that take ``problem.loss_fn``, on the same params.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.data import Examples
from fedjax_lab.models import Model
from tests.algorithms import problem
from tests.reference.mlp_numpy import MLP


def preprocess(examples, key):
    """The problems' examples as models take them."""
    del key
    return Examples(examples["x"], examples["y"])


def composed(blocks):
    """A model of nothing but blocks, the last of which is its head."""

    def run(some):
        def apply(params, h, key=None):
            for block in some:
                h = block(params, h, key)
            return h

        return apply

    return Model(None, run(blocks), run(blocks[:-1]), blocks[-1], blocks)


def two_blocks(loss_fn=problem.loss_fn):
    """The model whose loss is ``problem.loss_fn``; noisy in place of any other loss."""
    noisy = loss_fn is not problem.loss_fn

    def weights(params, x, key=None):
        h = x @ params["W"]
        if noisy and key is not None:
            h = h * jax.random.uniform(key, h.shape, minval=0.5, maxval=1.5)
        return h

    def bias(params, h, key=None):
        return h + params["b"][None]

    return composed((weights, bias))


def perceptron(twin: MLP):
    """The twin's network; params are its pairs (W_l, b_l)."""

    def layer(index):
        last = index == twin.depth - 1

        def block(params, h, key=None):
            weights, bias = params[index]
            h = h @ weights + bias[None]
            return h if last else jnp.tanh(h) if twin.tanh else jax.nn.relu(h)

        return block

    return composed(tuple(map(layer, range(twin.depth))))


def perceptron_params(twin: MLP):
    return [(jnp.asarray(w), jnp.asarray(b)) for w, b in twin.layers(twin.initial_point())]


def flat_perceptron(params):
    return np.concatenate([np.asarray(leaf).reshape(-1) for pair in params for leaf in pair])
