"""Packed messages have the stated bytes and come back bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import compressors as c
from fedjax_lab.compressors import sparsify, wire
from tests.compressors.vectors import ALL, KINDS, every, every_kernel, vector

SIZES, MORE_SIZES = (1, 37), (2, 64)


@functools.cache
def programs(name):
    """[v [n, d], ...] -> a message of each row, and those messages -> what arrives."""
    compressor = ALL[name]

    def compress(vs):
        return [jax.vmap(compressor.compress, (None, 0))(jax.random.key(0), v) for v in vs]

    return jax.jit(compress), jax.jit(
        lambda messages: list(map(jax.vmap(compressor.decompress), messages))
    )


def vectors(sizes=SIZES):
    return [np.stack([vector(kind, d) for kind in KINDS]) for d in sizes]


@functools.cache
def messages(name):
    """Of all kinds of vectors, for each size; in NumPy."""
    return jax.tree.map(np.asarray, programs(name)[0](vectors()))


def row(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def assert_they_come_back(name, vs, sent):
    """Packed messages of the vectors: unpacked, they give the same bits, in the same dtype."""
    compressor = ALL[name]
    packed, again = [], []
    for v, stacked in zip(vs, sent, strict=True):
        data = [compressor.pack(row(stacked, i)) for i in range(len(v))]
        assert all(type(each) is bytes for each in data)
        unpacked = [compressor.unpack(each, v.shape[1], v.dtype) for each in data]
        packed.append(data)
        again.append(jax.tree.map(lambda *leaves: np.stack(leaves), *unpacked))
    decompress = programs(name)[1]
    for v, expected, actual in zip(vs, decompress(sent), decompress(again), strict=True):
        assert expected.dtype == actual.dtype == v.dtype
        assert expected.shape == v.shape
        assert np.isfinite(np.asarray(expected, np.float64)).all()
        assert np.asarray(expected).tobytes() == np.asarray(actual).tobytes()
    for v, data in zip(vs, packed, strict=True):
        if compressor.name != "random_drop":
            assert {len(each) for each in data} == {compressor.bytes(v.shape[1], v.dtype)}


@every
def test_there_and_back(name):
    assert_they_come_back(name, vectors(), messages(name))


@pytest.mark.slow
@every
def test_there_and_back_at_more_sizes(name):
    vs = vectors(MORE_SIZES)
    assert_they_come_back(name, vs, jax.tree.map(np.asarray, programs(name)[0](vs)))


@pytest.mark.methods
@every_kernel
@pytest.mark.parametrize(
    "dtypes",
    [("float64", "bfloat16"), pytest.param(("float16",), marks=pytest.mark.slow)],
    ids=lambda dtypes: dtypes[0],
)
def test_other_float_types(name, dtypes, x64):
    v = vector("random", 37)[None]
    vs = [jnp.asarray(v, dtype) for dtype in dtypes]
    compress, decompress = programs(name)
    assert_they_come_back(name, vs, jax.tree.map(np.asarray, compress(vs)))
    assert jax.eval_shape(lambda v: decompress(compress([v]))[0], v).dtype == jnp.float32


def test_random_k_compiles_once_for_all_messages():
    compressor = c.random_k(0.5)
    sent = [compressor.compress(jax.random.key(i), jnp.arange(51.0)) for i in range(3)]
    before = sparsify._drawn._cache_size()
    arrived = [compressor.decompress(compressor.unpack(compressor.pack(m), 51)) for m in sent]
    compressor.decompress(compressor.unpack(compressor.pack(sent[0]), 51))
    assert sparsify._drawn._cache_size() <= before + 1  # of an unpacked seed, a NumPy number
    assert len({tuple(np.flatnonzero(v).tolist()) for v in arrived}) == 3


def test_bytes_are_what_the_format_says():
    d = 1000
    assert c.identity().bytes(d) == 4 * d
    assert c.bfloat16().bytes(d) == 2 * d
    assert c.int8().bytes(d) == d + 4
    assert c.sign().bytes(d) == 125 + 4
    assert c.terngrad().bytes(d) == 250 + 4
    assert c.qsgd(7).bytes(d) == 500 + 4  # 15 codes: 4 bits
    assert c.qsgd(8).bytes(d) == 625 + 4  # 17 codes: 5 bits
    assert c.top_k(0.99).bytes(d) == 10 * 4 + 13  # ten indices of 10 bits
    assert c.top_k(0.99).bytes(1) == 4  # no bits tell one coordinate apart
    assert c.random_k(0.99).bytes(d) == 10 * 4 + 4
    assert c.random_drop(0.9).bytes(d) == 100 * 4 + 4
    assert c.low_rank(2).bytes(d) == 2 * (31 + 33) * 4
    assert c.compose(c.top_k(0.99), c.int8()).bytes(d) == 13 + 4 + 10
    assert c.identity().bytes(d, "float64") == 8 * d
    assert c.identity().bytes(d, "bfloat16") == 2 * d


@pytest.mark.methods
def test_random_drop_has_its_true_size_and_the_stated_one_in_expectation():
    compressor, v = c.random_drop(0.8), vector("random", 200)
    sizes, compress = [], jax.jit(compressor.compress)
    for key in range(200):
        message = compress(jax.random.key(key), jnp.asarray(v))
        sizes.append(len(compressor.pack(message)))
        assert sizes[-1] == 4 + 4 * np.count_nonzero(compressor.decompress(message))
    spread = 4 * np.sqrt(200 * 0.8 * 0.2 / len(sizes))
    assert abs(np.mean(sizes) - compressor.bytes(200)) < 4 * spread


@pytest.mark.parametrize("width", [1, 3, 7, 8, 13, 24, 32])
@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_bit_fields(width, count):
    numbers = np.random.default_rng(0).integers(2**width, size=count)
    data = wire.pack_bits(numbers, width)
    assert len(data) == wire.section_bytes(count, width)
    np.testing.assert_array_equal(wire.unpack_bits(data, count, width), numbers)


def test_bit_fields_longer_than_a_chunk():
    numbers = np.random.default_rng(0).integers(8, size=(1 << 20) + 5)
    data = wire.pack_bits(numbers, 3)
    assert len(data) == wire.section_bytes(numbers.size, 3)
    np.testing.assert_array_equal(wire.unpack_bits(data, numbers.size, 3), numbers)


@every
def test_data_of_another_size_is_an_error(name):
    compressor = ALL[name]
    data = compressor.pack(row(messages(name)[SIZES.index(37)], 0))
    for wrong in (data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match="the packed message has"):
            compressor.unpack(wrong, 37)


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        (c.qsgd(15), "the code 31; the largest is 30"),
        (c.qsgd(32767), "the code 65535; the largest is 65534"),
        (c.terngrad(), "the code 3; the largest is 2"),
        (c.int8(), "the code 255; the largest is 254"),
        (c.compose(c.random_k(0.5), c.terngrad()), "the code 3; the largest is 2"),
    ],
    ids=str,
)
def test_codes_that_no_message_has(compressor, message):
    """They would count as numbers beyond the scale."""
    data = compressor.pack(compressor.compress(jax.random.key(0), jnp.ones(6)))
    start = 8 if compressor.name == "compose" else 4  # behind the seed and the scale
    damaged = data[:start] + b"\xff" * (len(data) - start)
    with pytest.raises(ValueError, match=f"the packed message has {message}"):
        compressor.unpack(damaged, 6)


@pytest.mark.parametrize("position", [0, 7])
def test_positions_that_no_message_has(position):
    """Of six numbers; a number would be lost that is put beyond the end, or upon another one."""
    alone, both = c.top_k(0.5), c.compose(c.top_k(0.5), c.sign())
    bits = np.packbits(np.unpackbits(np.array([position] * 3, np.uint8)).reshape(3, 8)[:, 5:])
    data = [each.pack(each.compress(jax.random.key(0), jnp.arange(6.0))) for each in (alone, both)]
    for compressor, damaged in (
        (alone, data[0][:-2] + bits.tobytes()),
        (both, bits.tobytes() + data[1][2:]),
    ):
        with pytest.raises(ValueError, match=f"up to {position}; they must be distinct and below"):
            compressor.unpack(damaged, 6)


def test_messages_have_a_fixed_form():
    """Structure and shapes depend on d alone, so that a message can be scanned or stacked."""
    for name in ALL:
        assert [message.d for message in messages(name)] == list(SIZES)
