# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own algorithm, in one screen
#
# A federated method is two short halves: what a client does, and what the server does with the
# answers. We write one that is not in the catalogue, check it against plain NumPy loops, and get
# simulation, compression and sweeps for nothing.
#
# The method is FedAvg in which no client may pull too hard, and the server has momentum. With the
# server's model $x$, client $i$ runs $K$ steps of SGD, which take it to $y_i$, and
#
# $$\delta_i = (x - y_i)\,\min\Big(1, \frac{R}{\|x - y_i\|}\Big), \qquad
#   v \leftarrow \beta v + \frac{1}{S}\sum_i \delta_i, \qquad x \leftarrow x - v .$$

# %% [markdown]
# ## Install

# %%
from experiments.notebooks.install import QUICK

# %%
ROUNDS = 20 if QUICK else 100

# %% [markdown]
# ## The method
#
# A `Phase` is one exchange between server and clients: what is broadcast, what **one** client does
# (the library maps it over the cohort), what the server does, and how the messages reach it: here
# as their mean. `LocalTraining` takes the client's steps, and leaves out padded examples and steps
# that a slow client does not take.

# %%
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedjax_lab
from fedjax_lab import Algorithm, Phase, algorithms, build_round, data, simulate, tree
from fedjax_lab.algorithms.factory import LocalTraining
from fedjax_lab.estimates import estimate
from fedjax_lab.simulation.evaluate import build_evaluation


class Server(NamedTuple):
    params: Any  # x
    velocity: Any  # v


def gentle_fedavg(loss_fn, *, client_lr, radius, momentum=0.0):
    training = LocalTraining(loss_fn, client_lr=client_lr)

    def start(params, num_clients, batch):
        return Server(params, tree.zeros_like(params)), ()  # clients remember nothing

    def broadcast(server, round):
        return server.params

    def client_update(params, row, batch):
        local = training.steps(params, batch)
        delta = tree.subtract(params, local.params)
        length = tree.norm(delta)
        delta = tree.scale(delta, jnp.minimum(1, radius / jnp.maximum(length, 1e-12)))
        one = jnp.ones_like(length)
        report = {**local.report, "shortened": (one * (length > radius), one)}
        return {"delta": delta}, row, report

    def server_update(server, messages, cohort):
        velocity = tree.add_scaled(messages["delta"], momentum, server.velocity)
        params = tree.subtract(server.params, velocity)
        return Server(params, velocity), {"delta_norm": tree.norm(messages["delta"])}

    phase = Phase(broadcast, client_update, server_update, reduce={"delta": "mean"})
    return Algorithm("gentle_fedavg", start, (phase,), lambda state: state.server.params)


# %% [markdown]
# What `report` holds, as `name: (total, weight)`, is averaged over the cohort and appears in the
# history: here the share of clients that were held back. A method whose clients do remember
# something returns `zero_row_per_client(params, num_clients)` (from `fedjax_lab.clients.store`) in
# place of `()`; `client_update` then gets its client's row and returns the new one.
#
# ## A problem to try it on
#
# Softmax regression on digits, which NumPy can differentiate by hand. Each of 30 clients has
# examples of at most five classes, and three of them have a broken camera: their pixels are 15
# times as bright as everyone else's.

# %%
train, test = data.load("digits")
clients = data.partition(train, "classes_per_client:5", num_clients=30, seed=0)
broken = np.asarray(clients.indices[: clients.starts[3]])  # what clients 0, 1 and 2 hold
bright = train.x.copy()
bright[broken] *= 15
train = train._replace(x=bright)
clients = data.partition(train, "classes_per_client:5", num_clients=30, seed=0)
params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}


def logits_fn(params, examples):
    x = examples.x.reshape(examples.x.shape[0], 64) / 16.0
    return x @ params["w"] + params["b"]


def counts(params, examples):  # (is it right, its loss), for each example
    log_p = jax.nn.log_softmax(logits_fn(params, examples))
    own = jnp.take_along_axis(log_p, examples.y[:, None], axis=1)[:, 0]
    return (log_p.argmax(1) == examples.y).astype(jnp.float32), -own


def loss_fn(params, examples, key):
    return counts(params, examples)[1]


evaluate = build_evaluation(counts, test)

# %% [markdown]
# ## The same method in NumPy
#
# Loops over clients and steps, gradients by hand, nothing shared with the code above. Three rounds
# of both must agree. (On TPUs matrix products are rounded to bfloat16 unless one asks for more, so
# we ask for more.)


# %%
def numpy_rounds(batches, client_lr, radius, momentum):
    w, b = np.zeros((64, 10)), np.zeros(10)
    v_w, v_b = np.zeros_like(w), np.zeros_like(b)
    x_all, y_all = train.x.reshape(-1, 64) / 16.0, train.y
    for batch in batches:
        deltas_w, deltas_b = [], []
        for client in np.asarray(batch.examples):  # [K, B] rows of the training set
            local_w, local_b = w.copy(), b.copy()
            for rows in client:
                x, y = x_all[rows], y_all[rows]
                logits = x @ local_w + local_b
                p = np.exp(logits - logits.max(1, keepdims=True))
                p /= p.sum(1, keepdims=True)
                p[np.arange(len(y)), y] -= 1  # the gradient of the loss in the logits
                local_w -= client_lr * x.T @ p / len(y)
                local_b -= client_lr * p.mean(0)
            d_w, d_b = w - local_w, b - local_b
            factor = min(1, radius / np.sqrt((d_w**2).sum() + (d_b**2).sum()))
            deltas_w.append(factor * d_w)
            deltas_b.append(factor * d_b)
        v_w = momentum * v_w + np.mean(deltas_w, axis=0)
        v_b = momentum * v_b + np.mean(deltas_b, axis=0)
        w, b = w - v_w, b - v_b
    return {"w": w, "b": b}


settings = {"cohort_size": 10, "local_steps": 5, "batch_size": 16}
batches = [
    data.draw_batch(clients, jax.random.key(0), t, replace=True, **settings) for t in range(3)
]
chosen = {"client_lr": 0.5, "radius": 0.8, "momentum": 0.5}
mine = gentle_fedavg(loss_fn, **chosen)

with jax.default_matmul_precision("highest"):
    round_fn = build_round(mine, client_map="vmap")
    state = mine.init(params, num_clients=clients.num_clients)
    for batch in batches:
        state, metrics = round_fn(state, batch)
        print(f"clients held back: {metrics['shortened']:.0%}")

expected = numpy_rounds(batches, **chosen)
for name, value in mine.params(state).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5)
print("JAX and NumPy agree")

# %% [markdown]
# ## Simulate
#
# The new method goes wherever the library's own go. FedAvg with the same learning rate stands
# beside it.

# %%
run = {"rounds": ROUNDS, **settings, "evaluate": evaluate, "eval_every": max(1, ROUNDS // 20)}
contenders = {
    "FedAvg": algorithms.fedavg(loss_fn, client_lr=0.5),
    "gentle FedAvg": gentle_fedavg(loss_fn, client_lr=0.5, radius=0.8, momentum=0.5),
}
results = {name: simulate(a, params, clients, **run) for name, a in contenders.items()}

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, result), colour in zip(results.items(), ("#0072b2", "#d55e00"), strict=True):
    rounds = [row["round"] for row in result.history]
    accuracy = [100 * row["accuracy"] for row in result.history]
    axes.plot(rounds, accuracy, color=colour, label=name, linewidth=2)
axes.set(xlabel="round", ylabel="test accuracy (%)", xlim=(0, None))
axes.grid(alpha=0.3)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Compress
#
# `with_compression` works on the messages between the two halves, so it needs to know nothing about
# the method. Keep the largest tenth of each message, and what was left out for next time:

# %%
compressed = fedjax_lab.with_compression(mine, "top_k:0.9")
result = simulate(compressed, params, clients, **run)
for name, history in (("in full", results["gentle FedAvg"].history), ("top 10 %", result.history)):
    last = history[-1]
    print(f"{name:>8}: {last['accuracy']:.1%} correct, {last['bytes_up'] / 1e6:.2f} MB sent")

# %% [markdown]
# ## Sweep
#
# How gentle should it be? Too small a radius is slow, too large a one lets the broken cameras
# through. Here is every radius with every seed, in one compiled program. Any float that the
# function takes can be swept.

# %%
radii = [0.1, 0.4, 1.6, 6.4, 25.6]
swept = fedjax_lab.sweep(
    lambda radius: gentle_fedavg(loss_fn, client_lr=0.5, radius=radius, momentum=0.5),
    params,
    clients,
    points={"radius": radii},
    seeds=range(3),
    **run,
)
print(swept.table("accuracy"))

# %%
intervals = [estimate(100 * seeds) for seeds in swept.history["accuracy"][..., -1]]  # over seeds
held_back = 100 * swept.history["shortened"].mean((1, 2))

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
left.errorbar(
    radii,
    [interval.mean for interval in intervals],
    yerr=[interval.half_width for interval in intervals],
    color="#d55e00",
    marker="o",
    capsize=4,
)
left.set(ylabel="test accuracy (%)", title="mean and 95 % interval over seeds")
right.plot(radii, held_back, color="#0072b2", marker="o")
right.set(ylabel="clients held back (%)", title="mean over rounds and seeds")
for axes in (left, right):
    axes.set(xscale="log", xlabel="radius R")
    axes.set_xticks(radii, [f"{radius:g}" for radius in radii])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# From here: the files of `fedjax_lab/algorithms/` all read like the cell above, beside the
# equations of their papers. Take the nearest one and change it.
