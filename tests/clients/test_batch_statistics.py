"""Which losses have a statistic over the mini-batch, and who is warned of padding in it."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, models, with_frozen
from fedjax_lab.clients.batch_statistics import counts_padding
from fedjax_lab.models.batch_norm import normalise_batch
from tests.federations import of_sizes

B, F = 6, 5
KEY = jax.random.key(0)


VECTORS = data.Examples(np.ones((B, F), np.float32), np.zeros(B, np.int32))
IMAGES = data.Examples(np.ones((B, 12, 12, 3), np.float32), np.zeros(B, np.int32))
WORDS = data.Examples(np.ones((B, 7), np.int32), np.ones((B, 7), np.int32))


def judge(loss_fn, params, examples=VECTORS):
    return counts_padding(loss_fn, params, examples, KEY, jnp.ones(B, bool))


class Linear(nn.Module):
    """Dense, then whatever ``norm`` is."""

    norm: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(self.norm(nn.Dense(4)(x)))


def squared(outputs):
    return (outputs**2).sum(tuple(range(1, outputs.ndim)))


def own(normalise):
    """A loss in plain JAX with a layer of its own."""
    return lambda params, e, key: squared(normalise(e.x @ params["w"]))


def by_mean(h):
    return h - h.mean(0, keepdims=True)


def by_product(h):
    return h - (jnp.ones((1, B)) / B) @ h


def merged(h):
    """Over examples and channels, one of whose axes are laid together."""
    flat = h.reshape(B, 2, 2).transpose(0, 2, 1).reshape(-1, 2)
    return (flat - flat.mean(0, keepdims=True)).reshape(B, 4)


def two_views(h):
    both = jnp.concatenate([h, -h])
    return (both - both.mean(0, keepdims=True))[:B]


def rematerialised(h):
    return jax.checkpoint(by_mean)(jax.nn.relu(h))


def mapped(h):
    """As equinox's BatchNorm: a mean over the axis of a ``vmap``."""
    return jax.vmap(lambda row: row - jax.lax.pmean(row, "batch"), axis_name="batch")(h)


def of_flax(params, e, key):
    norm = nn.BatchNorm(use_running_average=False)
    h = e.x @ params["w"]
    stats = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
    found, _ = norm.apply(
        {"params": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}, "batch_stats": stats},
        h,
        mutable=["batch_stats"],
    )
    return squared(found)


CROSS_ENTROPY = models.classification_loss(lambda params, x, key=None: x @ params["w"])


def centred(params, e, key):
    losses = CROSS_ENTROPY(params, e, key)
    return losses - losses.mean()


W = {"w": jax.ShapeDtypeStruct((F, 4), jnp.float32)}
STATISTICS = {
    "mean": own(by_mean),
    "arc tangents": own(lambda h: by_mean(jnp.arctan(h))),
    "variance": own(lambda h: h / jnp.sqrt(h.var(0, keepdims=True) + 1)),
    "product": own(by_product),
    "covariance": own(lambda h: h @ (h.T @ h)),
    "merged": own(merged),
    "two views": own(two_views),
    "checkpoint": own(rematerialised),
    "vmap": own(mapped),
    "flax": of_flax,
    "losses of the library": centred,
    "mask elsewhere": lambda params, e, key, mask: mask * squared(by_mean(e.x @ params["w"])),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_is_found(name):
    assert judge(STATISTICS[name], W)


def test_a_library_norm_without_its_mask_is_found():
    """A loss of the user's own, around one of the library's, that does not pass the mask on."""
    model = models.mlp(3, hidden=(4,), norm="batch")
    params = jax.eval_shape(model.init, KEY, VECTORS.x[:1])
    base = models.classification_loss(model.apply)
    assert judge(lambda p, e, key: base(p, e, key) + 1, params)
    assert not judge(lambda p, e, key, mask: base(p, e, key, mask) + 1, params)
    assert not judge(base, params)


def weighted(params, e, key, mask):
    h = e.x @ params["w"]
    return squared(h - (mask[:, None] * h).sum(0, keepdims=True) / mask.sum())


def selected(params, e, key, mask):
    h = e.x @ params["w"]
    mean = h.mean(0, keepdims=True, where=mask[:, None])
    var = jnp.where(mask[:, None], (h - mean) ** 2, 0).sum(0, keepdims=True) / mask.sum()
    return squared((h - mean) / jnp.sqrt(var + 1))


def centred_by_mask(params, e, key, mask):
    losses = CROSS_ENTROPY(params, e, key)
    return losses - (mask * losses).sum() / mask.sum()


def in_a_product(params, e, key, mask):
    h = e.x @ params["w"]
    return squared(h - (mask.astype(h.dtype) @ h / mask.sum())[None])


PLAIN = {
    "weighted": weighted,
    "selected": selected,
    "product with the mask": in_a_product,
    "losses of the library, with the mask": centred_by_mask,
    "stable softmax": own(lambda h: jnp.exp(h - h.max())),
    "norm of each": own(lambda h: h / jnp.linalg.norm(h, axis=1, keepdims=True)),
    "decay": lambda params, e, key: squared(e.x @ params["w"]) + (params["w"] ** 2).sum(),
    "metrics": lambda params, e, key: (
        squared(e.x @ params["w"]),
        {"mean": (e.x @ params["w"]).mean()},
    ),
    "gram": own(lambda h: jax.nn.softmax(h @ h.T, axis=1)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_counts_no_padding_is_left_alone(name):
    assert not judge(PLAIN[name], W)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(), nn.GroupNorm(2), nn.RMSNorm()], ids=lambda norm: type(norm).__name__
)
def test_norms_of_single_examples_are_left_alone(norm):
    model = models.from_linen(Linear(norm))
    params = jax.eval_shape(model.init, KEY, VECTORS.x[:1])
    assert not judge(models.classification_loss(model.apply), params)


@pytest.mark.parametrize(
    ("name", "options", "examples"),
    [
        ("linear", {}, IMAGES),
        ("mlp", {"norm": "group"}, IMAGES),
        ("cnn", {}, data.Examples(np.ones((B, 32, 32, 3), np.float32), IMAGES.y)),
        ("vit", {"depth": 1, "width": 12}, IMAGES),
        ("lstm", {}, WORDS),
        pytest.param("resnet20", {"norm": "batch"}, IMAGES, marks=pytest.mark.methods),
        pytest.param("resnet20", {"norm": "group"}, IMAGES, marks=pytest.mark.methods),
    ],
)
def test_the_librarys_models_are_left_alone(name, options, examples):
    model = models.build(name, 10, **options)
    params = jax.eval_shape(model.init, KEY, examples.x[:1])
    build = models.language_model_loss if name == "lstm" else models.classification_loss
    assert not judge(build(model.apply), params, examples)


def federation(sizes):
    rng = np.random.default_rng(0)
    return of_sizes(sizes, rng.normal(size=(sum(sizes), F)).astype(np.float32))


def run(
    loss_fn,
    sizes,
    build=algorithms.fedavg,
    params=None,
    about="statistics over a mini-batch",
    **options,
):
    """Trace a round twice, with mini-batches of four."""
    method = build(lambda p, e, key: loss_fn(p, data.Examples(*e), key), client_lr=0.1, **options)
    params = {"w": jnp.ones((F, 4))} if params is None else params
    batch = data.draw_batch(federation(sizes), KEY, 0, cohort_size=2, local_epochs=1, batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = method.init(params, 2)
        for _ in range(2):
            jax.eval_shape(method.round_fn, state, batch)
    return [str(w.message) for w in caught if about in str(w.message)]


def test_one_warning_that_says_what_to_do():
    (message,) = run(own(by_mean), (5, 7))
    for remedy in ("batch_norm.BatchNorm", "mask=mask", "replace=True"):
        assert remedy in message
    assert run(own(by_mean), (8, 8)) == []  # no masked places
    assert run(own(jnp.tanh), (5, 7)) == []
    (_,) = run(own(by_mean), (5, 7), algorithms.mime, momentum=0.5)
    assert run(own(by_mean), (5, 7), example_clip=1.0) == []  # each example alone


def test_one_warning_of_examples_that_a_batch_norm_gets_alone():
    zeros, ones = jnp.zeros(1), jnp.ones(1)
    norm = {"scale": ones, "bias": zeros, "running_mean": zeros, "running_var": ones}

    def loss_of(training):
        return lambda params, e, key: squared(
            normalise_batch(e.x[:, :, None], **params, training=training)
        )

    def found(training, sizes, **options):
        about = {"about": "each example alone", "params": norm}
        return run(loss_of(training), sizes, **about, **options)

    for sizes in ((5, 7), (8, 8)):  # with masked places and without
        (message,) = found(True, sizes, example_clip=1.0)
        assert "norm='group'" in message
    assert found(False, (5, 7), example_clip=1.0) == []  # by running statistics
    assert found(True, (5, 7)) == []


def test_frozen_weights_do_not_repeat_it():
    loss_fn = STATISTICS["mean"]
    build = lambda loss, client_lr: with_frozen(  # noqa: E731
        lambda bound: algorithms.fedavg(bound, client_lr=client_lr),
        lambda p, e, key, w: w * loss(p, e, key),
        jnp.float32(2),
    )
    assert len(run(loss_fn, (5, 7), build)) == 1


def test_an_equinox_network_is_found():
    equinox = pytest.importorskip("equinox")
    net = equinox.nn.Linear(F, 4, key=KEY)
    params, static = equinox.partition(net, equinox.is_array)

    def loss_fn(params, e, key):
        network = equinox.combine(params, static)
        return squared(mapped(jax.vmap(network)(e.x)))

    assert judge(loss_fn, params)
    plain = lambda p, e, key: squared(jax.vmap(equinox.combine(p, static))(e.x))  # noqa: E731
    assert not judge(plain, params)
