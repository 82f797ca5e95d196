"""Preprocessing against NumPy loops over single images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data

rng = np.random.default_rng(0)
images = rng.integers(1, 256, (40, 6, 5, 3), dtype=np.uint8)  # no zeros: padding can be told apart
examples = data.Examples(jnp.asarray(images), jnp.zeros(40, jnp.int32))
MEAN, STD = np.array([0.1, 0.4, 0.7]), np.array([0.2, 0.3, 0.5])


def crops_and_flips(image, pad):
    """All (flipped, top, left) -> image variants, by slices of a padded image."""
    padded = np.zeros((image.shape[0] + 2 * pad, image.shape[1] + 2 * pad, 3), image.dtype)
    padded[pad : pad + image.shape[0], pad : pad + image.shape[1]] = image
    for top in range(2 * pad + 1):
        for left in range(2 * pad + 1):
            cut = padded[top : top + image.shape[0], left : left + image.shape[1]]
            yield (False, top, left), cut
            yield (True, top, left), cut[:, ::-1]


def test_without_a_key_it_scales_and_normalises():
    out = jax.jit(data.preprocess(MEAN, STD, flip=True, crop=2))(examples, None)
    np.testing.assert_allclose(out.x, (images / 255 - MEAN) / STD, rtol=1e-5, atol=1e-6)
    assert out.x.dtype == jnp.float32
    assert out.y is examples.y or (out.y == examples.y).all()


def test_every_image_is_one_of_its_crops_and_flips():
    apply = jax.jit(data.preprocess(MEAN, STD, flip=True, crop=2))
    seen, choices = [], []
    for seed in range(10):
        out = np.asarray(apply(examples, jax.random.key(seed)).x)
        raw = np.rint((out * STD + MEAN) * 255).astype(np.uint8)
        for image, found in zip(images, raw, strict=True):
            matches = [c for c, cut in crops_and_flips(image, 2) if (cut == found).all()]
            assert len(matches) == 1
            seen.append(matches[0])
        choices.append(tuple(seen[-40:]))
    flips, tops, lefts = np.array(seen).T
    assert flips.mean() == pytest.approx(0.5, abs=0.1)
    for offsets in (tops, lefts):
        np.testing.assert_allclose(np.bincount(offsets, minlength=5) / 400, 0.2, atol=0.08)
    assert len(set(choices)) == 10  # the key matters
    assert len(set(choices[0])) > 10  # each image has its own draw
    again = np.asarray(apply(examples, jax.random.key(9)).x)
    np.testing.assert_array_equal(again, out)


def test_padding_is_black_before_normalisation():
    apply = data.preprocess(MEAN, STD, crop=5)
    out = np.asarray(apply(examples, jax.random.key(0)).x)
    black = np.isclose(out, -MEAN / STD, atol=1e-5).all(-1)
    assert black.any()
    assert out[~black].min() > (-MEAN / STD).min()


def test_flip_only():
    out = np.asarray(data.preprocess(flip=True)(examples, jax.random.key(0)).x)
    scaled = images.astype(np.float32) / 255
    flipped = [np.allclose(o, s[:, ::-1]) for o, s in zip(out, scaled, strict=True)]
    plain = [np.allclose(o, s) for o, s in zip(out, scaled, strict=True)]
    assert 8 < sum(flipped) < 32
    assert sum(flipped) + sum(plain) == 40


def test_the_same_images_are_mirrored_in_every_mode():
    images = np.random.default_rng(0).integers(0, 256, (40, 4, 5, 1), np.uint8)
    examples = data.Examples(images, np.zeros(40, np.int32))
    apply = data.preprocess(crop=1, flip=True)
    expected = apply(examples, jax.random.key(1)).x
    with jax.enable_x64(True):
        np.testing.assert_array_equal(apply(examples, jax.random.key(1)).x, expected)


def test_shapes_dtypes_and_scale():
    stacked = data.Examples(examples.x.reshape(4, 10, 6, 5, 3), examples.y.reshape(4, 10))
    out = data.preprocess(MEAN, STD, flip=True, crop=1)(stacked, jax.random.key(1)).x
    flat = data.preprocess(MEAN, STD, flip=True, crop=1)(examples, jax.random.key(1)).x
    np.testing.assert_array_equal(out.reshape(flat.shape), flat)
    vectors = data.Examples(jnp.arange(6.0).reshape(3, 2), jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(data.preprocess()(vectors, None).x, vectors.x)
    np.testing.assert_allclose(
        data.preprocess(1.0, 2.0, scale=2)(vectors, None).x, vectors.x / 4 - 0.5
    )
    half = data.Examples(jnp.ones((2, 2), jnp.bfloat16), jnp.zeros(2, jnp.int32))
    assert data.preprocess(0.5, 2)(half, None).x.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="need images"):
        data.preprocess(flip=True)(vectors, jax.random.key(0))
    with pytest.raises(ValueError, match=r"needs \(2,\)"):
        data.preprocess(MEAN, STD)(vectors, None)


def test_normalization_against_numpy(monkeypatch):
    train = data.Examples(rng.integers(0, 256, (9000, 4, 3, 2), dtype=np.uint8), np.zeros(9000))
    mean, std, scale = data.normalization(train)
    scaled = train.x.astype(np.float64) / 255
    np.testing.assert_allclose(mean, scaled.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std((0, 1, 2)), rtol=1e-12)
    assert scale == 255
    out = data.preprocess(mean, std, scale=scale)(train._replace(x=train.x[:5000]), None).x
    np.testing.assert_allclose(out.mean((0, 1, 2)), 0, atol=0.02)
    np.testing.assert_allclose(out.std((0, 1, 2)), 1, atol=0.02)
    mean, std, scale = data.normalization(train._replace(x=np.full((10, 2), 7, np.float32)))
    assert scale == 1
    np.testing.assert_array_equal(mean, [7, 7])
    np.testing.assert_array_equal(std, [1, 1])  # constant: not divided by 0
    digits = data.normalization(data.load("digits")[0], scale=16)
    assert digits.mean[0] == pytest.approx(0.305, abs=0.005)


def test_normalization_of_clients_counts_their_own_examples():
    """Parts of a federation share its arrays: held-out clients and examples are left out."""
    x, owners = rng.normal(size=(60, 3)), np.arange(60) % 6
    clients = data.partition((x, np.zeros(60)), owners)
    seen, _ = data.split_clients(clients, 2, seed=0)
    train, _ = data.split_examples(seen, 0.25, seed=0)
    own = np.isin(owners, [int(name) for name in seen.names])
    kept = x[np.asarray(train.indices)].astype(np.float32)
    for part, rows in ((clients, x), (seen, x[own]), (train, kept)):
        found = data.normalization(part)
        np.testing.assert_allclose(found.mean, rows.mean(0), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(found.std, rows.std(0), rtol=1e-6)
    with pytest.raises(TypeError, match="train is FederatedArrays without inputs x"):
        data.normalization(data.from_clients({"a": {"feature": x}}))


def test_a_constant_channel_of_float64_is_not_divided_by_its_rounding():
    x = np.stack([np.full(1000, 0.1), np.arange(1000.0)], 1)
    std = data.normalization(data.Examples(x, np.zeros(1000))).std
    np.testing.assert_allclose(std, [1.0, x[:, 1].std()], rtol=1e-12)


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (1_600_000_000 + np.array([0, 10, 20, 30]), np.int64),
        (4_200_000_000 + np.array([0, 7, 70_000, 3]), np.uint32),
        (-1_600_000_000 + np.array([0, 10, -70_000, 30]), np.int32),
        (np.array([-(2**31), 2**31 - 1, 2**30, 2**31 - 2]), np.int32),  # differences beyond 2^31
    ],
)
def test_large_integers_keep_their_differences(x, dtype):
    x = x.astype(dtype)
    train = data.Examples(x, np.zeros(4))
    found = data.preprocess(*data.normalization(train))(train, None).x
    wide = x.astype(np.float64)
    np.testing.assert_allclose(found, (wide - wide.mean()) / wide.std(), rtol=1e-6)


@pytest.mark.parametrize("shape", [(50,), (50, 6, 5), (50, 3), (50, 6, 5, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, ">f4", ">u2"])
def test_what_normalization_returns_fits(shape, dtype):
    """One mean for numbers [n] and images [n, H, W]; one for each column or channel of others."""
    x = np.random.default_rng(1).integers(0, 256, shape).astype(dtype)
    train = data.Examples(x, np.zeros(50))
    scaled = x.astype(np.float64) / (255 if dtype == np.uint8 else 1)
    axes = tuple(range(len(shape) - (len(shape) in (2, 4))))
    expected = (scaled - scaled.mean(axes)) / scaled.std(axes)
    found = data.preprocess(*data.normalization(train))(train, None).x
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_images_need_their_channels_last():
    gray = data.Examples(jnp.zeros((2, 8, 8)), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"shape \(2, 8, 8\); .* one channel, x\[..., None\]"):
        data.preprocess(flip=True)(gray, jax.random.key(0))
    first = data.Examples(np.zeros((2, 3, 32, 32), np.float32), np.zeros(2))
    message = r"x has shape .*3 channels first.*x.transpose\(0, 2, 3, 1\)"
    with pytest.raises(ValueError, match=message):
        data.normalization(first)
    with pytest.raises(ValueError, match=message):
        data.preprocess(crop=2)(first, jax.random.key(0))
    data.normalization(first._replace(x=first.x.transpose(0, 2, 3, 1)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"crop": -1}, ValueError, "crop is -1"),
        ({"crop": 1.5}, TypeError, "crop is 1.5"),
        ({"flip": "no"}, TypeError, "flip is 'no'; it must be True or False"),
        ({"scale": 0}, ValueError, "scale is 0"),
        ({"std": [1, 0]}, ValueError, "must be positive"),
        ({"mean": float("nan")}, ValueError, "finite"),
        ({"mean": np.zeros((2, 2))}, ValueError, "vector"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        data.preprocess(**arguments)


def test_a_key_is_a_typed_one():
    images = data.Examples(np.zeros((2, 8, 8, 1), np.float32), np.zeros(2))
    with pytest.raises(TypeError, match="key is 0; it must be a typed PRNG key"):
        data.preprocess(crop=1)(images, 0)
