"""Small federations, batches and losses, with which tests of several rooms train."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import CohortBatch, data


def of_sizes(sizes, x, y=None):
    """Clients of these sizes, who hold the examples in order; without ``y``, all labels are 0."""
    owners = np.repeat(np.arange(len(sizes)), sizes)
    y = np.zeros(len(x), np.int32) if y is None else y
    return data.partition(data.Examples(x, y), owners, len(sizes), min_size=0)


def regression(num_clients, features):
    """Clients with 6 to 14 random inputs and targets each."""
    rng = np.random.default_rng(1)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    sizes = rng.integers(6, 15, num_clients)
    return data.from_clients(
        {str(i): (normal(n, features), normal(n)) for i, n in enumerate(sizes)}
    )


def digits(count, num_clients):
    """(the first digits as vectors in [0, 1], the clients who hold them)."""
    train, _ = data.load("digits")
    train = data.Examples(train.x[:count].reshape(count, -1) / 16, train.y[:count])
    return train, data.partition(train, "iid", num_clients=num_clients, seed=0)


def signs(features):
    """24 clients with ten random inputs each, and the sign of their sum."""
    x = np.random.default_rng(0).normal(size=(240, features)).astype(np.float32)
    examples = data.Examples(x, (x.sum(1) > 0).astype(np.int32))
    return data.partition(examples, "iid", num_clients=24, seed=0)


def softmax_loss(params, examples, key):
    """Cross-entropy of the logits x @ params."""
    return -jax.nn.log_softmax(examples.x @ params)[jnp.arange(len(examples.y)), examples.y]


def distance_loss(params, examples, key):
    """Squared distance of ``params["w"]`` to each example."""
    return jnp.square(params["w"][None] - examples).sum(-1)


def batch_of(examples, round=0, ids=None, **more):
    """A batch of examples [S, K, B, ...]; without ``ids``, of the clients 0 to S - 1."""
    ids = range(len(jax.tree.leaves(examples)[0])) if ids is None else ids
    key, round = jax.random.key(round), jnp.asarray(round, jnp.int32)
    return CohortBatch(jnp.asarray(ids, jnp.int32), examples, key, round, **more)


def reporting(algorithm, *names):
    """The method of one phase, whose clients report nothing but these entries."""
    (phase,) = algorithm.phases

    def client_update(received, row, batch):
        message, row, report = phase.client_update(received, row, batch)
        return message, row, {name: report[name] for name in names}

    return dataclasses.replace(algorithm, phases=(phase._replace(client_update=client_update),))
