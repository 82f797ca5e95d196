"""Packed messages have the stated bytes and come back bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import compressors as c
from fedjax_lab.compressors import wire
from tests.compressors.vectors import ALL, KINDS, vector

SIZES = (1, 37, 64)


@functools.cache
def jitted(name):
    return jax.jit(ALL[name].compress), jax.jit(ALL[name].decompress)


def assert_comes_back(name, v):
    v, compressor = jnp.asarray(v), ALL[name]
    compress, decompress = jitted(name)
    message = compress(jax.random.key(0), v)
    data = compressor.pack(message)
    assert type(data) is bytes
    again = compressor.unpack(data, v.size, v.dtype)
    expected, actual = decompress(message), decompress(again)
    assert expected.dtype == actual.dtype == v.dtype
    assert np.asarray(expected).tobytes() == np.asarray(actual).tobytes()
    return data


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_there_and_back(name, d):
    compressor = ALL[name]
    for kind in KINDS:
        data = assert_comes_back(name, vector(kind, d))
        if compressor.name != "random_drop":
            assert len(data) == compressor.bytes(d)


@pytest.mark.parametrize("name", ALL)
def test_other_float_types(name, x64):
    v = vector("random", 37)
    for dtype in (jnp.float64, jnp.bfloat16):
        data = assert_comes_back(name, jnp.asarray(v, dtype))
        if ALL[name].name != "random_drop":
            assert len(data) == ALL[name].bytes(37, dtype)


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


@pytest.mark.parametrize("name", ALL)
def test_data_of_another_size_is_an_error(name):
    compressor = ALL[name]
    data = compressor.pack(jitted(name)[0](jax.random.key(0), jnp.ones(37)))
    for wrong in (data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match="the packed message has"):
            compressor.unpack(wrong, 37)


def test_messages_have_a_fixed_form():
    """Structure and shapes depend on d alone, so that a message can be scanned or stacked."""
    for name in ALL:
        forms = [
            jax.tree.map(jnp.shape, jitted(name)[0](jax.random.key(i), jnp.asarray(v)))
            for i, v in enumerate((vector("random", 37), vector("zero", 37)))
        ]
        assert forms[0] == forms[1]
        assert forms[0].d == 37
