# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Federated learning on a TPU, in five minutes
#
# Forty clients hold handwritten digits, each mostly its own two or three kinds. We train one model
# on all of them with three methods and see which one copes best.
#
# A whole run is one compiled program that never leaves the accelerator: it draws the clients and
# their mini-batches, takes the local steps on all cores at once and averages the results.
#
# In Colab choose **Runtime > Change runtime type > TPU**, then **Runtime > Run all**. GPUs do as
# well; no line below is different for them.

# %% [markdown]
# ## Install

# %%
from experiments.notebooks.install import QUICK

# %%
ROUNDS = 20 if QUICK else 100

# %% [markdown]
# ## On which device are we?
#
# JAX falls back to the CPU without a word when it finds no accelerator. This cell does not. (If you
# do allow the CPU: importing `fedjax_lab` makes one device of each of its cores, and the clients
# are spread over them.)

# %%
import os

import jax

import fedjax_lab

ALLOW_CPU = os.environ.get("FEDJAX_LAB_ALLOW_CPU") == "1"  # or True, to go on without one

devices = jax.devices()
print(f"{len(devices)} x {devices[0].device_kind}")
print(f"jax {jax.__version__}, fedjax_lab {fedjax_lab.__version__}")
if devices[0].platform == "cpu" and not ALLOW_CPU:
    raise RuntimeError(
        "JAX sees no TPU or GPU, only the CPU. In Colab: Runtime > Change runtime type > TPU, then "
        "Runtime > Run all. Elsewhere: install JAX for your accelerator (jax[tpu] or jax[cuda13]) "
        "and restart. To go on with the CPU all the same, set ALLOW_CPU = True in this cell."
    )

# %% [markdown]
# ## The clients
#
# `dirichlet:0.1` cuts every class among the clients in very unequal shares; the smaller the number,
# the more unequal. Each column of the figure is a client. The images stay `uint8` on the device.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt

from fedjax_lab import algorithms, build_round, data, models, simulate
from fedjax_lab.simulation.evaluate import build_evaluation

train, test = data.load("digits")  # 8 x 8 pixels, part of the package
clients = data.partition(train, "dirichlet:0.1", num_clients=40, seed=0)
clients.plot()

# %% [markdown]
# ## A model and its loss
#
# The library wants a pytree of parameters and a function `(params, examples, key)` that returns the
# loss of each example. Here the helpers write it; the third notebook brings its own.

# %%
model = models.build("mlp", num_classes=10)
preprocess = data.preprocess(scale=16)
loss_fn = models.classification_loss(model.apply, preprocess)
params = model.init(jax.random.key(0), train.x[:1])
evaluate = build_evaluation(models.accuracy_counts(model.apply, preprocess), test)

print(f"{models.count_params(params):,} parameters")

# %% [markdown]
# ## One round, on all cores
#
# A round is a pure function `(state, batch) -> (state, metrics)`. `client_map` says how its clients
# are spread: `shard_map` gives every core an equal share of the cohort, `pmap` does the same in
# JAX's older way, `vmap` puts all of them on one core. The model that comes out is the same up to
# rounding (on a TPU that is the rounding of bfloat16 products).

# %%
settings = {"cohort_size": 16, "local_steps": 5, "batch_size": 16}

fedavg = algorithms.fedavg(loss_fn, client_lr=0.1)
state = fedavg.init(params, num_clients=clients.num_clients)
batch = data.draw_batch(clients, jax.random.key(0), 0, **settings)

models_after = {}
for client_map in ("vmap", "shard_map"):
    round_fn = build_round(fedavg, client_map=client_map)
    new_state, metrics = round_fn(state, batch)
    models_after[client_map] = jax.device_get(fedavg.params(new_state))
    print(f"{client_map:>9}: loss {metrics['loss']:.6f}")

gaps = jax.tree.map(lambda a, b: abs(a - b).max(), *models_after.values())
print(f"largest difference of a weight: {max(jax.tree.leaves(gaps)):.1e}")

# %% [markdown]
# ## Three methods
#
# `simulate` compiles all rounds between two evaluations into one program. With the same seed all
# methods meet the same clients and the same mini-batches in every round.

# %%
methods = {
    "FedAvg": fedavg,
    "SCAFFOLD": algorithms.scaffold(loss_fn, client_lr=0.1),
    "GradMA": algorithms.gradma(loss_fn, client_lr=0.1, memory_size=40),
}

results = {}
for name, algorithm in methods.items():
    results[name] = simulate(
        algorithm,
        params,
        clients,
        rounds=ROUNDS,
        **settings,
        evaluate=evaluate,
        eval_every=ROUNDS // 10,
        client_map="shard_map",
        seed=0,
    )
    last, seconds = results[name].history[-1], results[name].seconds
    print(f"{name:>8}: {last['accuracy']:.1%} correct, {ROUNDS / seconds:,.0f} rounds per second")

# %% [markdown]
# ## Who is ahead?
#
# By rounds (left), and by what the clients had to send (right): SCAFFOLD sends a control variate
# with every model, so each of its rounds costs twice as much.

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
for (name, result), colour in zip(results.items(), ("#0072b2", "#d55e00", "#009e73"), strict=True):
    accuracy = [100 * row["accuracy"] for row in result.history]
    rounds = [row["round"] for row in result.history]
    sent = [row["bytes_up"] / 1e6 for row in result.history]
    for axes, x in zip(panels, (rounds, sent), strict=True):
        axes.plot(x, accuracy, color=colour, label=name, linewidth=2)
panels[0].set(xlabel="round", ylabel="test accuracy (%)", xlim=(0, None))
panels[1].set(xlabel="sent by all clients together (MB)", xlim=(0, None))
for axes in panels:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# One seed is an anecdote, and one learning rate for all is not fair: the notebook
# `seeds_and_learning_rates` does better. `your_own_algorithm` writes a method in one screen,
# `your_own_model_and_data` takes your network, `message_compression` shortens the right-hand axis.
