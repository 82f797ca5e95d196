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
# # A pretrained decoder, fine-tuned by a federation
#
# A small decoder in the form of Llama learns English from licences. Twenty clients fine-tune it:
# each has another page of Python's manual. They train and send adapters (LoRA), and the pretrained
# weights stay where they are. Your own Llama or Qwen2 folder goes the same way: give it to
# `models.load_pretrained`, and its `tokenizer.json` to `data.load_tokenizer`.

# %% [markdown]
# ## Install

# %%
from experiments.notebooks.install import QUICK

# %%
ROUNDS = 2 if QUICK else 10
PRETRAINING_STEPS = 10 if QUICK else 1000  # minutes on a CPU
WIDTH, LAYERS, VOCABULARY, RANK = (32, 2, 512, 2) if QUICK else (128, 4, 1024, 8)

import importlib.util
import subprocess
import sys

if (
    importlib.util.find_spec("tokenizers") is None
    or importlib.util.find_spec("safetensors") is None
):
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "tokenizers", "safetensors"], check=True
    )

# %% [markdown]
# ## A model in a folder
#
# `config.json`, `model.safetensors` and `tokenizer.json`, as `transformers` writes them. The
# licences are those that Debian ships; without them, other pages of the manual take their place.

# %%
import functools
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from fedjax_lab import algorithms, data, models, simulate, with_compression, with_frozen
from fedjax_lab.recipes import fine_tune_a_decoder as recipe

folder = tempfile.mkdtemp()
common, pages = recipe.read_texts()
tokenizer = recipe.train_tokenizer(common, VOCABULARY, folder)
config = models.DecoderConfig(
    vocab_size=VOCABULARY,
    width=WIDTH,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    mlp_width=3 * WIDTH,
    tie=True,
)
texts = [{"text": part} for part in common]
rows = data.pack_chats(texts, tokenizer, length=128, too_long="cut")
params, loss = recipe.pretrain(models.decoder(config), rows, PRETRAINING_STEPS)
models.save_pretrained(f"{folder}/decoder", config, params)
print(f"{models.count_params(params):,} weights, perplexity {np.exp(loss):.1f} of the licences")

# %%
model, body = models.load_pretrained(f"{folder}/decoder")

# %% [markdown]
# ## Documents of 20 clients
#
# Every fourth paragraph is kept for testing. Paragraphs are packed into rows of 128 tokens, where
# none sees another.


# %%
def of_clients(test):
    records = [
        {"page": name, "text": part}
        for name, parts in pages.items()
        for number, part in enumerate(parts)
        if (number % 4 == 3) == test
    ]
    return data.from_chats(records, tokenizer, client="page", length=128, too_long="cut")


clients, tests = of_clients(test=False), of_clients(test=True)
print({name: int(size) for name, size in zip(clients.names, clients.sizes, strict=True)})

# %% [markdown]
# ## Adapters, and three methods
#
# `with_frozen` takes a function that makes the method of a loss, a loss with a fourth argument, and
# the weights for it: one copy on the device, in no message and no checkpoint.

# %%
adapters = models.init_adapters(
    jax.random.key(2), body, "layers/*/kernel", rank=RANK, stacked="layers/*"
)


def adapted(frozen):
    def apply(adapters, x, key=None):
        return model.apply(models.attach_adapters(frozen, adapters, 2.0), x, key)

    return apply


def loss_fn(adapters, examples, key, frozen):
    return models.answer_loss(adapted(frozen))(adapters, examples, key)


options = {"client_lr": 0.5, "gradient_transform": optax.clip_by_global_norm(1.0)}
fedavg = functools.partial(algorithms.fedavg, **options)
methods = {
    "FedAvg": fedavg,
    "FedAdam": functools.partial(algorithms.fedadam, server_lr=0.01, **options),
    "SCAFFOLD": functools.partial(algorithms.scaffold, **options),
}
perplexity = recipe.build_perplexity(adapted, tests)
found, results = {"before": perplexity(adapters, body)}, {}
for name, build in methods.items():
    results[name] = simulate(
        with_frozen(build, loss_fn, body),
        adapters,
        clients,
        rounds=ROUNDS,
        cohort_size=10,
        local_steps=5,
        batch_size=4,
        replace=True,
    )
    found[name] = perplexity(results[name].params, body)
for name, values in found.items():
    print(f"{name:>10}: perplexity {np.exp(np.log(values).mean()):.1f}, the geometric mean")

# %%
figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
order = np.argsort(found["before"])
for (name, values), colour in zip(
    found.items(), ("#999999", "#000000", "#0072b2", "#d55e00"), strict=True
):
    axes.plot(np.array(values)[order], "o", color=colour, label=name)
axes.set_xticks(range(len(order)), [clients.names[i] for i in order], rotation=60, ha="right")
axes.set(ylabel="perplexity of test paragraphs", yscale="log")
axes.legend(frameon=False)
axes.grid(alpha=0.3)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What travels

# %%
sent = {
    "all weights": fedavg(models.answer_loss(model.apply)).uplink(body),
    "adapters": with_frozen(fedavg, loss_fn, body).uplink(adapters),
    "adapters, SCAFFOLD": with_frozen(methods["SCAFFOLD"], loss_fn, body).uplink(adapters),
    "adapters, int8": with_compression(with_frozen(fedavg, loss_fn, body), "int8").uplink(adapters),
}
for name, count in sent.items():
    print(f"{name:>18}: {count:>10,} bytes a client and round")

# %% [markdown]
# ## Lines before and after

# %%
after = models.attach_adapters(body, results["FedAvg"].params, 2.0)
for prompt in ("This program is", "The following", "If the class"):
    ids = jnp.array([tokenizer.encode(prompt, add_special_tokens=False).ids])
    for name, weights in (("before", body), ("after", after)):
        line = models.generate(model.apply, weights, ids, 20)[0].tolist()
        print(f"{name:>7}: {prompt} ...{tokenizer.decode(line)!r}")

# %% [markdown]
# `models.save_adapters` writes the adapters as `peft` reads them, and `models.merge_adapters` with
# `models.save_pretrained` the whole model as `transformers` reads it.
