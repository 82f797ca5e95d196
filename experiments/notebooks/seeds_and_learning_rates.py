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
# # Seeds and learning rates, in one program
#
# Is method A better than method B, or did it have the better learning rate, or the luckier seed?
# `fedjax_lab.sweep` answers with every learning rate and every seed at once: they are one more axis
# of one compiled program, spread over all devices.

# %% [markdown]
# ## Install

# %%
from experiments.notebooks.install import QUICK

# %%
ROUNDS = 20 if QUICK else 100

# %% [markdown]
# ## Data: training, validation, test
#
# Learning rates are chosen on validation data and reported on test data. A choice that has seen the
# test data flatters itself.

# %%
import functools

import jax
import matplotlib.pyplot as plt
import numpy as np

import fedjax_lab
from fedjax_lab import algorithms, data, models
from fedjax_lab.estimates import estimate
from fedjax_lab.simulation.evaluate import build_evaluation

everything, test = data.load("digits")
shuffled = np.random.default_rng(0).permutation(len(everything.y))
validation, train = (
    data.Examples(everything.x[rows], everything.y[rows]) for rows in np.split(shuffled, [300])
)

clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
model = models.build("mlp", num_classes=10, hidden=(64,))
preprocess = data.preprocess(scale=16)
loss_fn = models.classification_loss(model.apply, preprocess)
counts = models.accuracy_counts(model.apply, preprocess)

# %% [markdown]
# ## Two methods, six learning rates, five seeds
#
# The first argument is a function from the values in `points` to a method. A seed decides the first
# model, the cohorts, the mini-batches and everything else that is random, and it decides the same
# for both methods.

# %%
points = {"client_lr": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]}
methods = {"FedAvg": algorithms.fedavg, "SCAFFOLD": algorithms.scaffold}

sweeps = {}
for name, method in methods.items():
    sweeps[name] = fedjax_lab.sweep(
        functools.partial(method, loss_fn),
        lambda key: model.init(key, train.x[:1]),
        clients,
        points=points,
        seeds=range(5),
        rounds=ROUNDS,
        cohort_size=5,
        local_steps=5,
        batch_size=16,
        evaluate=build_evaluation(counts, validation),
        eval_every=ROUNDS // 5,
    )
    result = sweeps[name]
    runs = len(result.points) * len(result.seeds)
    print(f"{name}: {runs} runs in {result.seconds:.1f} s after {result.compile_seconds:.1f} s")

# %% [markdown]
# ## The tables
#
# Mean over the seeds and 95 % interval (Student's t) of the accuracy on validation data.

# %%
for name, result in sweeps.items():
    print(f"{name}\n\n{result.table('accuracy')}\n\nbest: {result.best('accuracy')}\n")

# %% [markdown]
# ## The figure
#
# Thin dots are single runs. A method that is good over a wide range of learning rates is worth more
# than one that shines at a single value.

# %%
figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
for (name, result), colour, shift in zip(
    sweeps.items(), ("#0072b2", "#d55e00"), (0.96, 1.04), strict=True
):
    accuracy = 100 * result.history["accuracy"][..., -1]  # [learning rates, seeds]
    intervals = [estimate(seeds) for seeds in accuracy]
    rates = shift * np.array(points["client_lr"])  # side by side, not on top of each other
    axes.errorbar(
        rates,
        [interval.mean for interval in intervals],
        yerr=[interval.half_width for interval in intervals],
        color=colour,
        marker="o",
        capsize=4,
        label=name,
    )
    axes.plot(rates, accuracy, ".", color=colour, alpha=0.4, markersize=5)
axes.set(xscale="log", xlabel="client learning rate", ylabel="validation accuracy (%)")
axes.set_xticks(points["client_lr"], [f"{rate:g}" for rate in points["client_lr"]])
axes.minorticks_off()
axes.grid(alpha=0.3)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The result
#
# Each method at its best learning rate, on the test data. The models are all there:
# `result.params` has the leading axes [points, seeds].

# %%
on_test = build_evaluation(counts, test)


def pick(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


for name, result in sweeps.items():
    best = result.best("accuracy")
    place = result.points.index(best)
    seeds = [pick(result.params, (place, i)) for i in range(len(result.seeds))]
    score = estimate([100 * float(on_test(params)["accuracy"]) for params in seeds])
    print(f"{name:>8}: {score.mean:.1f} ± {score.half_width:.1f} % at {best}")

# %% [markdown]
# `points` takes several names at once (all combinations are run), or a list of dicts for a random
# search. Any float of a method can be swept: momenta, proximal weights, radii, or one value that
# your function turns into a schedule.

# %% [markdown]
# ## Fewer rounds: `tune`
#
# A grid runs poor points to the end. `fedjax_lab.tune` compares all points after a ninth of the
# rounds, continues the best third, and runs two finalists to the end with two seeds. All methods
# spend the same number of gradients. If the best rate lies at an end of the range, the search
# continues beyond it. It takes the validation examples from the clients, and never sees test data.

# %%
found = fedjax_lab.tune(
    {name: functools.partial(method, loss_fn) for name, method in methods.items()},
    {"client_lr": (0.01, 3.0)},
    model.init(jax.random.key(0), train.x[:1]),
    clients,
    rounds=ROUNDS,
    cohort_size=5,
    local_steps=5,
    batch_size=16,
    budget=8,
    score=lambda params, examples: counts(params, examples)[0],
    mode="max",
)
print(found.table())
runs = sum(len(result.points) * len(result.seeds) for result in sweeps.values())
print(f"{sum(found.gradients.values()) / (ROUNDS * runs):.0%} of the rounds of the two sweeps")
