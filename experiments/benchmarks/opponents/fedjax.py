"""FedJAX: its federated averaging over its in-memory data, with its default backend.

The default is "jit": one program for a local step, called client by client. Its other backend,
"pmap", calls ``jax.device_put_sharded``, which JAX has removed. So has ``jax.tree_map``, of which
two of its functions need the name alone; it gets it back. The network is haiku's, for which
FedJAX has ``create_model_from_haiku``. Its users shuffle a client's examples and go through them in
order (``ShuffleRepeatBatchHParams``); the mean weighs clients by their number of examples. Haiku
starts a dense layer with weights 1.7 times as large as PyTorch's and this package's, so its loss
falls faster: on W3, fedjax_lab started with haiku's weights ends at 2.115 instead of 2.272.
"""

import importlib.metadata
import os

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from fedjax import (
    InMemoryFederatedData,
    ShuffleRepeatBatchHParams,
    client_samplers,
    create_model_from_haiku,
    metrics,
    model_grad,
    optimizers,
)
from fedjax.algorithms import fed_avg

from experiments.benchmarks.child import CHECKED, max_resident_bytes, timed
from experiments.benchmarks.workloads import SEED, WORKLOADS

jax.tree_map = jax.tree.map


class ResidualBlock(hk.Module):
    """Two conv3x3 with GroupNorm beside an identity or a projection."""

    def __init__(self, features, stride):
        super().__init__()
        self._features, self._stride = features, stride

    def __call__(self, x):
        """Run the block."""

        def convolution(x, kernel, stride):
            x = hk.Conv2D(self._features, kernel, stride, with_bias=False)(x)
            return hk.GroupNorm(2)(x)

        residual = jax.nn.relu(convolution(x, 3, self._stride))
        residual = convolution(residual, 3, 1)
        if self._stride != 1 or x.shape[-1] != self._features:
            x = convolution(x, 1, self._stride)
        return jax.nn.relu(x + residual)


def network(workload, x, is_training):
    """Logits of a workload's model; [B, L, V] of a language model."""
    for kind, *sizes in workload.layers:
        if kind == "conv":
            x = hk.Conv2D(*sizes, padding="VALID")(x)
        elif kind == "pool":
            x = hk.MaxPool(2, 2, "VALID")(x)
        elif kind == "relu":
            x = jax.nn.relu(x)
        elif kind == "dropout" and is_training:
            x = hk.dropout(hk.next_rng_key(), sizes[0], x)
        elif kind == "dense":
            x = hk.Linear(*sizes)(hk.Flatten()(x))
        elif kind == "resnet18":
            x = jax.nn.relu(hk.GroupNorm(2)(hk.Conv2D(sizes[0], 3, with_bias=False)(x)))
            for factor in (1, 2, 4, 8):
                x = ResidualBlock(factor * sizes[0], min(factor, 2))(x)
                x = ResidualBlock(factor * sizes[0], 1)(x)
            x = hk.Linear(workload.num_classes)(x.mean((1, 2)))
        elif kind == "lstm":
            units, layers = sizes
            x = hk.Embed(workload.num_classes, units)(x)
            for _ in range(layers):
                core = hk.LSTM(units)
                x, _ = hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)
            x = hk.Linear(workload.num_classes)(x)
    return x


def run(system, job):
    """Rounds of its federated averaging."""
    workload = WORKLOADS[job["workload"]]
    with np.load(job["data"]) as file:
        x, y, indices, sizes = (file[name] for name in ("x", "y", "indices", "sizes"))
        x_test, y_test = file["x_test"][:CHECKED], file["y_test"][:CHECKED]
    if not workload.is_text:
        x, x_test = x / np.float32(255), x_test / np.float32(255)
    parts = np.split(indices, np.cumsum(sizes)[:-1])
    data = {f"{i}".encode(): {"x": x[rows], "y": y[rows]} for i, rows in enumerate(parts)}
    federated_data = InMemoryFederatedData(data)

    def apply(batch, is_training=True):
        return network(workload, batch["x"], is_training)

    def train_loss(batch, logits):
        losses = metrics.unreduced_cross_entropy_loss(batch["y"], logits)
        return losses.reshape(len(losses), -1).mean(1)

    model = create_model_from_haiku(
        hk.transform(apply),
        {"x": x[:1], "y": y[:1]},
        train_loss,
        train_kwargs={"is_training": True},
        eval_kwargs={"is_training": False},
    )
    algorithm = fed_avg.federated_averaging(
        model_grad(model),
        client_optimizer=optimizers.sgd(workload.client_lr),
        server_optimizer=optimizers.sgd(1.0),
        client_batch_hparams=ShuffleRepeatBatchHParams(
            workload.batch_size, num_epochs=None, num_steps=workload.local_steps
        ),
    )
    sampler = client_samplers.UniformGetClientSampler(federated_data, workload.cohort_size, SEED)
    state = algorithm.init(model.init(jax.random.PRNGKey(SEED)))

    def run_rounds():
        nonlocal state
        for _ in range(job["rounds"]):
            state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state)

    answer = timed(run_rounds, job)
    logits = model.apply_for_eval(state.params, {"x": x_test})
    loss = float(train_loss({"y": jnp.asarray(y_test)}, logits).mean())
    return {
        **answer,
        "compile_seconds": None,
        "test_loss": loss,
        "peak_bytes": max_resident_bytes(),
        "device": "cpu",
        "threads": os.cpu_count(),
        "versions": {"jax": jax.__version__, "fedjax": importlib.metadata.version("fedjax")},
    }
