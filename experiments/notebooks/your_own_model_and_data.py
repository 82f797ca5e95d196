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
# # Your own model, your own data
#
# The library never sees a model. It sees a pytree of parameters and a function
# `loss_fn(params, examples, key)` that returns one loss for each example. Whatever makes these two
# will do: here are plain JAX, Flax Linen, Flax NNX and Equinox, on data that come from NumPy and
# from Hugging Face.

# %% [markdown]
# ## Install

# %%
from experiments.notebooks.install import QUICK

# %%
ROUNDS = 40 if QUICK else 200

import importlib.metadata
import importlib.util
import subprocess
import sys


def available(package):
    """Whether a package is there, or can be installed beside the jax and numpy that are."""
    if importlib.util.find_spec(package) is None:
        present = ("jax", "jaxlib", "numpy")
        keep = [f"{name}=={importlib.metadata.version(name)}" for name in present]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", package, *keep]
        if subprocess.run(pip, check=False).returncode != 0:
            print(f"{package} could not be installed; what needs it is left out.")
            return False
        importlib.invalidate_caches()
    return True


# %% [markdown]
# ## Data from NumPy
#
# A data set is anything with arrays `x` [n, ...] and `y` [n] of equal length; `data.Examples` is
# the ready-made one. `partition` divides it by a scheme, or by **your** array of client numbers.
#
# Ours are three spiral arms. Every client stands somewhere on the plane and sees only what is near.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.simulation.evaluate import build_evaluation

CLIENTS = 24
rng = np.random.default_rng(0)


def spirals(n):
    y = rng.integers(0, 3, n)
    radius = np.sqrt(rng.uniform(0.02, 1, n))
    angle = 5 * radius + 2 * np.pi * y / 3 + rng.normal(0, 0.15, n)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return data.Examples(x.astype(np.float32), y.astype(np.int32))


train, test = spirals(6000), spirals(2000)
homes = spirals(CLIENTS).x
owner = ((train.x[:, None] - homes[None]) ** 2).sum(-1).argmin(1)  # who is nearest

clients = data.partition(train, owner, num_clients=CLIENTS)
print(clients.summary())

figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
panels[0].scatter(*train.x.T, c=train.y, s=3, cmap="viridis")
panels[0].set_title("classes")
panels[1].scatter(*train.x.T, c=owner, s=3, cmap="tab20")
panels[1].scatter(*homes.T, c="black", s=30, marker="x")
panels[1].set_title("clients (crosses: where they stand)")
for axes in panels:
    axes.set(aspect="equal", xlabel="x[0]", ylabel="x[1]")
plt.show()

# %% [markdown]
# ## Four ways to write a network
#
# Each cell fills in `networks[name] = (params, logits_fn)`: two hidden layers of 64 units,
# whichever library made them.

# %%
networks = {}

# %% [markdown]
# **Plain JAX.** A dictionary of arrays.

# %%
sizes = (2, 64, 64, 3)
keys = jax.random.split(jax.random.key(0), 3)
params = [
    {"w": jax.random.normal(key, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros(n)}
    for key, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
]


def logits_fn(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


networks["plain JAX"] = params, logits_fn

# %% [markdown]
# **Flax Linen.** Parameters and module are apart from the start.

# %%
from flax import linen

module = linen.Sequential(
    [linen.Dense(64), linen.relu, linen.Dense(64), linen.relu, linen.Dense(3)]
)
params = module.init(jax.random.key(0), jnp.zeros((1, 2)))["params"]
networks["Flax Linen"] = params, lambda params, x: module.apply({"params": params}, x)

# %% [markdown]
# **Flax NNX.** `split` takes the parameters out of the object, `merge` puts them back.

# %%
from flax import nnx

rngs = nnx.Rngs(0)
graphdef, params = nnx.split(
    nnx.Sequential(
        nnx.Linear(2, 64, rngs=rngs),
        jax.nn.relu,
        nnx.Linear(64, 64, rngs=rngs),
        jax.nn.relu,
        nnx.Linear(64, 3, rngs=rngs),
    )
)
networks["Flax NNX"] = params, lambda params, x: nnx.merge(graphdef, params)(x)

# %% [markdown]
# **Equinox.** A model is a pytree of arrays and of functions; only the arrays are parameters.

# %%
if available("equinox"):
    import equinox as eqx

    mlp = eqx.nn.MLP(2, 3, width_size=64, depth=2, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_array)
    networks["Equinox"] = params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)

# %% [markdown]
# ## One loop for all of them
#
# The loss must not average over the examples: the library does, after it has left out the padding.


# %%
def functions(logits_fn):
    def loss_fn(params, examples, key):
        return optax.softmax_cross_entropy_with_integer_labels(
            logits_fn(params, examples.x), examples.y
        )

    def counts(params, examples):  # (is it right, its loss), for each example
        right = logits_fn(params, examples.x).argmax(1) == examples.y
        return right.astype(jnp.float32), loss_fn(params, examples, None)

    return loss_fn, build_evaluation(counts, test)


histories, trained = {}, {}
for name, (params, logits_fn) in networks.items():
    loss_fn, evaluate = functions(logits_fn)
    result = simulate(
        algorithms.scaffold(loss_fn, client_lr=0.3),
        params,
        clients,
        rounds=ROUNDS,
        cohort_size=8,
        local_steps=10,
        batch_size=32,
        evaluate=evaluate,
        eval_every=ROUNDS // 10,
    )
    histories[name], trained[name] = result.history, result.params
    assert jax.tree.structure(result.params) == jax.tree.structure(params)  # the pytree is kept
    print(f"{name:>10}: {result.history[-1]['accuracy']:.1%} correct")

# %% [markdown]
# The curves differ only because each library starts from other random weights. On the right is what
# the first of the networks makes of the plane.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for (name, history), dash in zip(histories.items(), ("-", "--", "-.", ":"), strict=False):
    rounds = [row["round"] for row in history]
    left.plot(rounds, [100 * row["accuracy"] for row in history], dash, label=name, linewidth=2)
left.set(xlabel="round", ylabel="test accuracy (%)", xlim=(0, None))
left.grid(alpha=0.3)
left.spines[["top", "right"]].set_visible(False)
left.legend(frameon=False)

side = np.linspace(-1.05, 1.05, 200, dtype=np.float32)
plane = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
params, logits_fn = trained["plain JAX"], networks["plain JAX"][1]
regions = np.asarray(logits_fn(params, plane).argmax(1)).reshape(200, 200)
right.imshow(regions, origin="lower", extent=(-1.05, 1.05, -1.05, 1.05), alpha=0.4)
right.scatter(*test.x[:600].T, c=test.y[:600], s=5, cmap="viridis")
right.set(xlabel="x[0]", ylabel="x[1]", title="classes, as told by plain JAX's network")
plt.show()

# %% [markdown]
# ## Data from Hugging Face
#
# From the hub it would be
#
# ```python
# hub = datasets.load_dataset("ylecun/mnist", split="train")
# ```
#
# To do without a download we make such a data set of the digits that come with the package, with
# the columns that one meets there: an image, a label, and who wrote it (made up, in our case).
# Three steps bring it into the library: format as NumPy, take the columns, number the writers.
# Clients that the data name need no scheme.

# %%
digits, _ = data.load("digits")

if available("datasets"):
    import datasets

    hub = datasets.Dataset.from_dict(
        {
            "image": list(digits.x[..., 0]),
            "label": digits.y,
            "writer": [f"writer {number}" for number in rng.integers(0, 30, len(digits.y))],
        }
    )
    columns = hub.with_format("numpy")
    images, labels = np.stack(columns["image"][:]), np.asarray(columns["label"][:])
    writers, owner = np.unique(hub["writer"][:], return_inverse=True)
    print(hub)
else:
    images, labels, owner = digits.x[..., 0], digits.y, rng.integers(0, 30, len(digits.y))
    writers = np.unique(owner)

examples = data.Examples(images[..., None].astype(np.uint8), labels.astype(np.int32))
by_writer = data.partition(examples, owner, num_clients=len(writers))
print(by_writer.summary())

# %% [markdown]
# And a model from the shelf, with the helpers that write loss and evaluation:

# %%
shelf = models.build("mlp", num_classes=10)
scaled = data.preprocess(scale=16)
result = simulate(
    algorithms.fedavg(models.classification_loss(shelf.apply, scaled), client_lr=0.2),
    shelf.init(jax.random.key(0), examples.x[:1]),
    by_writer,
    rounds=ROUNDS // 2,
    cohort_size=8,
    local_epochs=1,
    batch_size=16,
    evaluate=build_evaluation(models.accuracy_counts(shelf.apply, scaled), data.load("digits")[1]),
    eval_every=ROUNDS // 2,
)
print(f"{result.history[-1]['accuracy']:.1%} of the test digits after {ROUNDS // 2} rounds")
