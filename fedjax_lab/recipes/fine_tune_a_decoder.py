"""A decoder pretrained on licences, fine-tuned by 20 clients on documents of their own.

    pip install safetensors tokenizers
    python -m fedjax_lab.recipes.fine_tune_a_decoder [--whole]

The decoder is pretrained on the licences in a Debian system, or else on pages of Python's manual.
Each client has a different page of that manual. Without ``--whole`` all sizes are small, and
nothing is learned.
"""

import functools
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_lab import algorithms, data, models, simulate, with_frozen

CLIENTS, LENGTH, SCALE = 20, 128, 2.0  # SCALE is LoRA's alpha / rank
LICENCES = Path("/usr/share/common-licenses")


def read_texts():
    """Return the paragraphs for pretraining, and {client: its paragraphs}."""

    def paragraphs(text):
        return [" ".join(part.split()) for part in text.split("\n\n") if len(part) > 60]

    pages = sorted(topics, key=lambda name: -len(topics[name]))
    files = sorted(file for file in LICENCES.glob("*") if not file.is_symlink())
    texts = [file.read_text(errors="replace") for file in files]
    texts = texts or [topics[page] for page in pages[CLIENTS:]]
    print(f"pretrained on {len(texts)} {'licences' if files else 'pages of the manual'}")
    common = [part for text in texts for part in paragraphs(text)]
    return common, {page: paragraphs(topics[page])[:80] for page in pages[:CLIENTS]}


def train_tokenizer(texts, vocabulary, folder):
    """Train a byte-level tokenizer, and load it from a file, as other tokenizers are loaded."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    marks = ["<|im_start|>", "<|im_end|>"]
    trained.train_from_iterator(texts, vocabulary, special_tokens=marks, show_progress=False)
    trained.save(f"{folder}/tokenizer.json")
    return data.load_tokenizer(folder)


def pretrain(model, rows, steps):
    """Return params after so many steps of Adam, in one compiled loop, and the last steps' loss."""
    loss_fn = models.answer_loss(model.apply)
    adam = optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    @jax.jit
    def run(params, rows, key):
        def step(carry, key):
            params, state = carry
            drawn = jax.random.randint(key, (8,), 0, len(rows.y))
            batch = jax.tree.map(lambda leaf: leaf[drawn], rows)
            loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch, key).mean())(params)
            updates, state = adam.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        keys = jax.random.split(key, steps)
        (params, _), losses = jax.lax.scan(step, (params, adam.init(params)), keys)
        return params, losses[-20:].mean()

    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return run(params, jax.tree.map(jnp.asarray, rows), jax.random.key(1))


def build_perplexity(apply_with, tests):
    """Build ``(params, frozen) -> [N]``, the perplexity of each client's test paragraphs."""
    owners = np.repeat(np.arange(CLIENTS), tests.sizes)
    rows = jax.tree.map(lambda leaf: leaf[tests.indices][:, None], tests.examples)
    scored = np.bincount(owners, np.asarray(rows.y >= 0).sum((1, 2)))

    @jax.jit
    def losses(params, rows, frozen):
        counts = models.answer_counts(apply_with(frozen), tokens_per_row=1)
        return jax.lax.map(lambda row: counts(params, row)[1][0], rows)

    return lambda params, frozen: np.exp(
        np.bincount(owners, np.asarray(losses(params, rows, frozen))) / scored
    )


def main(whole=False):
    """Print perplexities, bytes and generated lines, before and after."""
    steps, rounds, width, layers, vocabulary, rank = (
        (1000, 10, 128, 4, 1024, 8) if whole else (10, 2, 32, 2, 512, 2)
    )
    common, pages = read_texts()
    config = models.DecoderConfig(
        vocab_size=vocabulary, width=width, num_layers=layers, num_heads=4, num_kv_heads=2,
        mlp_width=3 * width, tie=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer(common, vocabulary, folder)
        texts = [{"text": part} for part in common]
        rows = data.pack_chats(texts, tokenizer, length=LENGTH, too_long="cut")
        params, loss = pretrain(models.decoder(config), rows, steps)
        models.save_pretrained(f"{folder}/decoder", config, params)
        model, body = models.load_pretrained(f"{folder}/decoder")
    print(f"{models.count_params(body):,} weights, perplexity {np.exp(loss):.1f} of these")

    def of_clients(test):  # every fourth paragraph is a test paragraph
        records = [
            {"page": name, "text": part}
            for name, parts in pages.items()
            for number, part in enumerate(parts)
            if (number % 4 == 3) == test
        ]
        return data.from_chats(records, tokenizer, client="page", length=LENGTH, too_long="cut")

    clients, tests = of_clients(test=False), of_clients(test=True)
    adapters = models.init_adapters(
        jax.random.key(2), body, "layers/*/kernel", rank=rank, stacked="layers/*"
    )

    def adapted(frozen):
        def apply(adapters, x, key=None):
            return model.apply(models.attach_adapters(frozen, adapters, SCALE), x, key)

        return apply

    def lora_loss(adapters, examples, key, frozen):
        return models.answer_loss(adapted(frozen))(adapters, examples, key)

    options = {"client_lr": 0.5, "gradient_transform": optax.clip_by_global_norm(1.0)}
    fedavg = functools.partial(algorithms.fedavg, **options)
    methods = {
        "FedAvg": fedavg,
        "FedAdam": functools.partial(algorithms.fedadam, server_lr=0.01, **options),
        "SCAFFOLD": functools.partial(algorithms.scaffold, **options),
    }
    perplexity = build_perplexity(adapted, tests)
    found, sent, tuned = {"before": perplexity(adapters, body)}, {}, {}
    for name, build in methods.items():
        result = simulate(
            with_frozen(build, lora_loss, body), adapters, clients, rounds=rounds,
            cohort_size=10, local_steps=5, batch_size=4, replace=True,
        )  # fmt: skip
        found[name], tuned[name] = perplexity(result.params, body), result.params
        sent[name] = result.history[-1]["bytes_up"]

    print("perplexity of a client's test paragraphs:")
    print(f"{'':18}" + "".join(f"{name:>10}" for name in found))
    for client, name in enumerate(clients.names):
        print(f"{name:18}" + "".join(f"{found[method][client]:10.1f}" for method in found))
    mean = {name: float(np.exp(np.log(values).mean())) for name, values in found.items()}
    print(f"{'geometric mean':18}" + "".join(f"{value:10.1f}" for value in mean.values()))
    full = 10 * rounds * fedavg(models.answer_loss(model.apply)).uplink(body)
    for name, count in sent.items():
        print(f"{name}: {count / 1e6:.2f} MB up; FedAvg of all weights {full / 1e6:.2f}")
    before, after = (
        models.attach_adapters(body, chosen, SCALE) for chosen in (adapters, tuned["FedAvg"])
    )
    for prompt in ("This program is", "The following", "If the class"):
        ids = jnp.array([tokenizer.encode(prompt, add_special_tokens=False).ids])
        for name, weights in (("before", before), ("after", after)):
            line = models.generate(model.apply, weights, ids, 20)[0].tolist()
            print(f"{name:>7}: {prompt} ...{tokenizer.decode(line)!r}")


if __name__ == "__main__":
    main(whole="--whole" in sys.argv[1:])
