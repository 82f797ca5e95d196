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
# # Compression: the same accuracy for fewer bytes
#
# Phones upload slowly. Any method of the library can send its messages through any compressor, and
# bytes are counted as they would travel. This notebook looks at the compressors one by one, then at
# error feedback, and ends with the figure that matters: bytes until a target is met.

# %% [markdown]
# ## Install

# %%
from experiments.notebooks.install import QUICK

# %%
ROUNDS = 40 if QUICK else 200

# %% [markdown]
# ## What a compressor does to a vector
#
# A compressor makes a small message of a vector and a vector of a message. `pack` turns the message
# into bytes, so the sizes below are lengths of byte strings, not estimates. The last two columns
# are the squared error relative to the squared norm: of a vector with a few large entries and many
# small ones, and the guarantee for any vector.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedjax_lab
from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.compressors import as_compressor
from fedjax_lab.simulation.evaluate import build_evaluation

key = jax.random.key(0)
vector = jax.random.normal(key, (20_000,)) ** 3
full_size = vector.nbytes

print(f"{'compressor':<22}{'bytes':>8}{'factor':>8}{'error':>9}{'at most':>9}")
for text in (
    "bfloat16",
    "int8",
    "qsgd:15",
    "sign",
    "random_k:0.99",
    "top_k:0.99",
    "top_k:0.99+qsgd:15",
):
    compressor = as_compressor("text", text)
    message = jax.jit(compressor.compress)(key, vector)
    size = len(compressor.pack(message))
    lost = jnp.sum((compressor.decompress(message) - vector) ** 2) / jnp.sum(vector**2)
    bound = compressor.snr_bound(vector.size)
    print(f"{text:<22}{size:>8,}{full_size / size:>7.1f}x{lost:>9.1e}{bound:>9.2g}")

# %% [markdown]
# `top_k:0.99` drops 99 % of the entries and keeps the largest; `random_k` keeps as many, chosen by
# a seed that it sends in place of their positions. An error above 1 is larger than the vector
# itself: unbiased, but loud. A plus sign makes one compressor of two.

# %% [markdown]
# ## A federation

# %%
train, test = data.load("digits")
clients = data.partition(train, "dirichlet:0.3", num_clients=20, seed=0)
model = models.build("mlp", num_classes=10, hidden=(100, 50))
preprocess = data.preprocess(scale=16)
loss_fn = models.classification_loss(model.apply, preprocess)
params = model.init(jax.random.key(0), train.x[:1])
evaluate = build_evaluation(models.accuracy_counts(model.apply, preprocess), test)

fedavg = algorithms.fedavg(loss_fn, client_lr=0.1)
print(f"{models.count_params(params):,} parameters; {fedavg.uplink(params):,} bytes per message")


def train_with(compressor=None, **options):
    algorithm = fedavg
    if compressor is not None:
        algorithm = fedjax_lab.with_compression(fedavg, compressor, **options)
    result = simulate(
        algorithm,
        params,
        clients,
        rounds=ROUNDS,
        cohort_size=10,
        local_steps=5,
        batch_size=16,
        evaluate=evaluate,
        eval_every=5,
    )
    last = result.history[-1]
    print(f"{last['accuracy']:6.1%} correct, {last['bytes_up'] / 1e6:7.2f} MB up  {algorithm.name}")
    return result.history


def draw(axes, histories, x="round", scale=1.0):
    for (name, history), style in zip(histories.items(), STYLES, strict=False):
        accuracy = [100 * row["accuracy"] for row in history]
        axes.plot([row[x] / scale for row in history], accuracy, label=name, linewidth=2, **style)
    axes.set(ylabel="test accuracy (%)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
STYLES = [{"color": colour} for colour in COLOURS]

# %% [markdown]
# ## Error feedback
#
# A client that drops 99 % of its change drops it for good, unless it keeps the rest and adds it to
# its next message. That is error feedback, and it is on unless one turns it off.

# %%
histories = {
    "everything": train_with(),
    "top 1 %": train_with("top_k:0.99"),
    "top 1 %, no feedback": train_with("top_k:0.99", error_feedback=False),
}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
draw(left, histories)
left.set(xlabel="round", xlim=(0, None))
left.legend(frameon=False)

for (name, history), style in zip(histories.items(), STYLES, strict=False):
    if history[0].get("error_sq"):
        kept_back = np.sqrt([row["error_sq"] / row["change_sq"] for row in history])
        right.plot([row["round"] for row in history], kept_back, label=name, linewidth=2, **style)
right.set(xlabel="round", ylabel="kept back / computed in a round", xlim=(0, None))
right.set_title("size of what the clients still owe", fontsize=10)
right.grid(alpha=0.3)
right.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# On the right is the norm of what a client keeps for later, next to the norm of one round's change.
# It grows to several rounds' worth: late, but not lost. Without feedback nothing is kept.

# %% [markdown]
# ## Bytes to a target
#
# The same for a few more compressors. How much must all clients together send until the model is
# right on 85 % of the test digits? (Short runs ask for 60 %.)

# %%
TARGET = 0.60 if QUICK else 0.85

for label, compressor in (
    ("int8", "int8"),
    ("sign", "sign"),
    ("top 1 %, 4 bits each", "top_k:0.99+qsgd:7"),
):
    histories[label] = train_with(compressor)

# %%
reached = {}
for name, history in histories.items():
    sent = [row["bytes_up"] / 1e6 for row in history if row["accuracy"] >= TARGET]
    reached[name] = sent[0] if sent else None

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
draw(left, histories, x="bytes_up", scale=1e6)
left.axhline(100 * TARGET, color="grey", linewidth=1, linestyle=":")
left.set(xscale="log", xlabel="sent by all clients together (MB)")

order = sorted(reached, key=lambda name: (reached[name] is None, reached[name] or 0), reverse=True)
colours = dict(zip(histories, COLOURS, strict=True))
for place, name in enumerate(order):
    megabytes = reached[name]
    if megabytes is None:
        right.text(0.02, place, "not reached", va="center", transform=right.get_yaxis_transform())
    else:
        right.barh(place, megabytes, color=colours[name])
        right.text(megabytes, place, f" {megabytes:.3g}", va="center")
known = [megabytes for megabytes in reached.values() if megabytes is not None]
right.set(xscale="log", xlabel=f"MB sent until {TARGET:.0%} are reached")
right.set(xlim=(min(known) / 3, max(known) * 3), ylim=(-0.6, len(order) - 0.4))
right.set_yticks(range(len(order)), order)
right.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# `downlink="..."` compresses what the server broadcasts as well, `scope="per_leaf"` takes every
# array alone, and the first argument may be any other method:
# `with_compression(algorithms.scaffold(...), "sign")` compresses both of its vectors.
