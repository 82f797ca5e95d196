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
# # Low-rank adapters: fine-tune a transformer that stays where it is
#
# A pretrained model is large, and what a federation has to teach it is often small. LoRA (Hu et
# al., ICLR 2022) freezes the model and trains two thin matrices beside each of its kernels. Only
# those travel. Here a small vision transformer learns five digits in one place, and ten clients
# then teach it the other five: once by training all of it, and once by adapters.

# %% [markdown]
# ## Install

# %%
from experiments.notebooks.install import QUICK

# %%
ROUNDS = 8 if QUICK else 50
WIDTH, DEPTH = (32, 1) if QUICK else (64, 2)
PRETRAINING_STEPS = 100 if QUICK else 300

# %% [markdown]
# ## The model, and what it knows
#
# Plain central training with Adam on the digits 0 to 4, compiled as one loop.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

from fedjax_lab import algorithms, data, models, simulate, with_frozen
from fedjax_lab.simulation.evaluate import build_evaluation

train, test = data.load("digits")
model = models.vit(10, patch_size=2, width=WIDTH, depth=DEPTH, num_heads=2)
preprocess = data.preprocess(scale=16)
loss_fn = models.classification_loss(model.apply, preprocess)
counts = models.accuracy_counts(model.apply, preprocess)


def only(examples, is_kept):
    return data.Examples(examples.x[is_kept], examples.y[is_kept])


known, new = only(train, train.y < 5), only(train, train.y >= 5)
new_test = only(test, test.y >= 5)
adam = optax.adam(2e-3)


@jax.jit
def pretrain(params, examples, key):
    def step(carry, key):
        params, state = carry
        rows = jax.random.randint(key, (32,), 0, len(examples.y))
        batch = jax.tree.map(lambda leaf: leaf[rows], examples)
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch, key).mean())(params)
        updates, state = adam.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    keys = jax.random.split(key, PRETRAINING_STEPS)
    (params, _), losses = jax.lax.scan(step, (params, adam.init(params)), keys)
    return params, losses[-20:].mean()


pretrained = model.init(jax.random.key(0), train.x[:1])
pretrained, loss = pretrain(pretrained, jax.tree.map(jnp.asarray, known), jax.random.key(1))
print(f"{models.count_params(pretrained):,} parameters, loss {loss:.2f} on the digits it knows")

# %% [markdown]
# ## All of it, by all clients
#
# The clients have the digits 5 to 9, unevenly. They take steps of Adam, and the server averages:
# FedAvg. Every message is as large as the model.

# %%
clients = data.partition(new, "dirichlet:0.5", num_clients=10, seed=0)
schedule = {"cohort_size": 5, "local_steps": 5, "batch_size": 16, "replace": True}
fedavg = functools.partial(algorithms.fedavg, step_transform=optax.scale_by_adam())


def train_with(algorithm, params, evaluate):
    result = simulate(
        algorithm,
        params,
        clients,
        rounds=ROUNDS,
        evaluate=evaluate,
        eval_every=2 if QUICK else 5,
        client_map="scan",
        **schedule,
    )
    last = result.history[-1]
    print(f"{last['accuracy']:6.1%} correct, {last['bytes_up'] / 1e6:7.3f} MB up")
    return result


full = fedavg(loss_fn, client_lr=0.003)
full_result = train_with(full, pretrained, build_evaluation(counts, new_test))

# %% [markdown]
# ## Adapters
#
# Trained are an adapter for each kernel of the transformer's layers, and the last dense layer,
# which has never seen these digits. The rest is **frozen**: `with_frozen` takes a function that
# makes the method of a loss, a loss with a fourth argument, and the weights for it.
#
# `merge_adapters` adds `scale * down @ up` to each kernel. At the start `up` is 0, so the merged
# model is the pretrained one.

# %%
RANK, SCALE = 4, 2.0


def is_adapted(path):  # such as "blocks_1/attention/query/kernel"
    return path.endswith("kernel") and ("attention" in path or "dense" in path)


params = {
    "adapters": models.init_adapters(jax.random.key(2), pretrained, is_adapted, RANK),
    "classifier": pretrained["classifier"],
}
frozen = {name: layer for name, layer in pretrained.items() if name != "classifier"}


def merge(params, frozen):
    whole = {**frozen, "classifier": params["classifier"]}
    return models.merge_adapters(whole, params["adapters"], SCALE)


def lora_loss(params, examples, key, frozen):
    return loss_fn(merge(params, frozen), examples, key)


def lora_counts(params, examples, frozen):
    return counts(merge(params, frozen), examples)


lora = with_frozen(functools.partial(fedavg, client_lr=0.01), lora_loss, frozen)
evaluate = build_evaluation(lora_counts, new_test, frozen=frozen)
lora_result = train_with(lora, params, evaluate)

# %% [markdown]
# ## What travels, and what is compiled
#
# A message has the adapters and the last layer. The frozen weights are an argument of the compiled
# program; closed over by the loss, they would be written into its text, and compiled with it.

# %%
closed_over = fedavg(lambda p, examples, key: lora_loss(p, examples, key, frozen), client_lr=0.01)
draw = functools.partial(data.draw_batch, **schedule)
batch = jax.eval_shape(draw, clients, jax.random.key(0), 0)


def program_size(algorithm, params):
    state = jax.eval_shape(lambda params: algorithm.init(params, clients.num_clients), params)
    return len(jax.jit(algorithm.round_fn).lower(state, batch).as_text())


weights = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
sent = {"all weights": full.uplink(pretrained), "adapters": lora.uplink(params)}
print(f"a message: {sent['all weights']:,} bytes of all weights, {sent['adapters']:,} of adapters")
print(f"the factor: {sent['all weights'] / sent['adapters']:.1f}\n")
print(f"a round's program, with {weights:,} bytes of frozen weights:")
print(f"{program_size(closed_over, params):>9,} characters where the loss closes over them")
print(f"{program_size(lora, params):>9,} characters with with_frozen")

# %% [markdown]
# ## The same rounds, fewer bytes

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for name, result, colour in (
    ("all weights", full_result, "#000000"),
    ("adapters", lora_result, "#0072b2"),
):
    accuracy = [100 * row["accuracy"] for row in result.history]
    left.plot([row["round"] for row in result.history], accuracy, color=colour, label=name)
    sent = [row["bytes_up"] / 1e6 for row in result.history]
    right.plot(sent, accuracy, color=colour, label=name)
left.set(xlabel="round", ylabel="accuracy on the new digits (%)")
right.set(xlabel="sent by all clients together (MB)", xscale="log")
left.legend(frameon=False)
for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## The model to keep
#
# `result.params` holds what was trained. Merged, it is an ordinary model again. It has been taught
# nothing but the new digits, so look at what it still knows of the old ones: both ways forget.

# %%
merged = merge(lora_result.params, frozen)
on_old = build_evaluation(counts, only(test, test.y < 5))
for name, found in (
    ("before", pretrained),
    ("all weights", full_result.params),
    ("adapters", merged),
):
    print(f"{name:>12}: {float(on_old(found)['accuracy']):.1%} of the old digits")

# %% [markdown]
# Any method takes the place of FedAvg, and wrappers go around: `with_compression(lora, "int8")`
# makes the messages four times smaller still. `with_frozen` by itself freezes anything: a body
# under a head, embeddings, a teacher. The frozen weights are in no checkpoint; keep them with the
# run.
