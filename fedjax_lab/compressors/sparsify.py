"""Compressors that keep some coordinates and drop the others.

``comp`` is the fraction dropped: of d coordinates k = max(1, round((1 - comp) d)) are kept.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.checks import check_choice, check_number
from fedjax_lab.compressors import wire
from fedjax_lab.compressors.base import STATIC, Array, Compressor, Positions, size_of
from fedjax_lab.machine.keys import compact, seeded
from fedjax_lab.signatures import suggest_keywords

_SEED_BYTES = 4
_WORD = 32  # coordinates of a mask in one word, which are counted together


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sparse:
    """A message with the kept coordinates and their positions.

    Attributes:
      values: float [k]; after ``compose``, the quantizer's message.
      indices: int32 [k], distinct.
      d: the vector's size.
    """

    values: Any
    indices: Array
    d: int = dataclasses.field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seeded:
    """A message with the kept coordinates, and the seed from which both sides draw the positions.

    Attributes:
      values: float [k] for ``random_k`` (or a quantizer's message); for ``random_drop`` float [d],
        0 if dropped, because the number of kept values is random.
      seed: uint32 scalar.
      d: the vector's size.
    """

    values: Any
    seed: Array
    d: int = dataclasses.field(metadata=STATIC)


def _checked(comp: float) -> float:
    return float(check_number("comp", comp, minimum=0.0, maximum=1.0, exclusive_maximum=True))


def _kept(comp: float):
    return lambda d: max(1, round((1 - comp) * d))


@suggest_keywords
def top_k(comp: float, *, selection: str = "bisection") -> Compressor:
    """Keep the k largest magnitudes; of equal ones, those with the lowest indices.

    ||C(v) - v||^2 <= (1 - k/d) ||v||^2 for every v. Positions cost ceil(log2 d) bits each.

    Args:
      comp: fraction of coordinates that is dropped, in [0, 1).
      selection: "bisection": exact, on the bits of the k-th magnitude, with a cost linear in d for
        any k. "sort": the same coordinates by ``lax.top_k``. "approximate": ``lax.approx_max_k``,
        which on TPU may miss some of them and chooses freely among equal ones; it keeps the largest
        of each of many bins, so the bound still holds.

    Raises:
      ValueError: ``comp`` lies outside [0, 1), or ``selection`` is unknown.
    """
    comp = _checked(comp)
    select = _SELECTIONS[check_choice("selection", selection, _SELECTIONS)]
    kept = _kept(comp)

    def compress(key, v):
        d = size_of(v)
        indices = select(jnp.abs(v), kept(d))
        return Sparse(v[indices], indices, d)

    def decompress(message):
        zeros = jnp.zeros(message.d, message.values.dtype)
        return zeros.at[message.indices].set(message.values, unique_indices=True)

    def direct_parts(key, parts):
        d = sum(part.size for part in parts)
        masks = _are_largest([_ordered_bits(jnp.abs(part)) for part in parts], kept(d))
        return [jnp.where(mask, part, 0) for mask, part in zip(masks, parts, strict=True)]

    def unpack_positions(reader, d):
        indices = reader.bits(kept(d), wire.width_of(d))
        if indices.max() >= d or np.unique(indices).size < indices.size:
            raise ValueError(
                f"the packed message has positions up to {indices.max()}; they must be distinct "
                f"and below {d}."
            )
        return Sparse(None, indices.astype(np.int32), d)

    positions = Positions(
        kept,
        lambda message: wire.pack_bits(message.indices, wire.width_of(message.d)),
        unpack_positions,
        lambda d: wire.section_bytes(kept(d), wire.width_of(d)),
    )
    options = {"comp": comp, "selection": selection}
    compressor = _fixed_size("top_k", options, compress, decompress, positions)
    if select is not _bisection:
        return compressor

    def direct(key, v):
        return direct_parts(key, [v])[0]

    return dataclasses.replace(compressor, direct=direct, direct_parts=direct_parts)


@suggest_keywords
def random_k(comp: float, *, rescale: bool = False) -> Compressor:
    """Keep k random coordinates, drawn without replacement from a seed in the message.

    E||C(v) - v||^2 = (1 - k/d) ||v||^2; with ``rescale``, (d/k - 1) ||v||^2.

    Args:
      comp: fraction of coordinates that is dropped, in [0, 1).
      rescale: multiply kept values by d/k, so that the result is unbiased.

    Raises:
      ValueError: ``comp`` lies outside [0, 1).
    """
    comp = _checked(comp)
    kept = _kept(comp)

    def are_kept(seed, d):
        return _drawn(seed, d, kept(d))

    def scaled(v, d):
        return tree.scale(v, d / kept(d)) if rescale else v

    def compress(key, v):
        d = size_of(v)
        seed = jax.random.bits(compact(key), (), jnp.uint32)
        return Seeded(scaled(v[_places(are_kept(seed, d), kept(d))], d), seed, d)

    def decompress(message):
        zeros = jnp.zeros(message.d, message.values.dtype)
        where = _places(are_kept(message.seed, message.d), kept(message.d))
        return zeros.at[where].set(message.values, unique_indices=True)

    def direct(key, v):
        d, seed = size_of(v), jax.random.bits(compact(key), (), jnp.uint32)
        return jnp.where(are_kept(seed, d), scaled(v, d), 0)

    positions = Positions(
        kept,
        lambda message: wire.pack_bits(np.reshape(message.seed, 1), 32),
        lambda reader, d: Seeded(None, reader.bits(1, 32)[0], d),
        lambda d: _SEED_BYTES,
    )
    options = {"comp": comp, "rescale": rescale}
    compressor = _fixed_size("random_k", options, compress, decompress, positions, rescale)
    return dataclasses.replace(compressor, direct=direct)


def _fixed_size(name, options, compress, decompress, positions, unbiased=False) -> Compressor:
    """Build a sparsifier that keeps exactly k values: packed floats, then their positions."""
    kept = positions.kept

    def unpack(data, d, dtype="float32"):
        reader = wire.Reader(data)
        values = reader.floats(kept(d), jnp.dtype(dtype))
        message = dataclasses.replace(positions.unpack(reader, d), values=values)
        reader.end()
        return message

    return Compressor(
        name,
        options,
        compress,
        decompress,
        pack=lambda message: wire.pack_floats(message.values) + positions.pack(message),
        unpack=unpack,
        bytes=lambda d, dtype="float32": kept(d) * jnp.dtype(dtype).itemsize + positions.bytes(d),
        snr_bound=lambda d: d / kept(d) - 1 if unbiased else 1 - kept(d) / d,
        unbiased=unbiased,
        positions=positions,
    )


@suggest_keywords
def random_drop(comp: float, *, rescale: bool = False) -> Compressor:
    """Keep each coordinate with probability 1 - comp, drawn from a seed in the message.

    E||C(v) - v||^2 = comp ||v||^2; with ``rescale``, comp / (1 - comp) ||v||^2, which is below
    ||v||^2 only for comp < 1/2. The number of kept values is random: a packed message has its true
    size, and ``bytes`` is the rounded expected size.

    Args:
      comp: probability that a coordinate is dropped, in [0, 1).
      rescale: divide kept values by 1 - comp, so that the result is unbiased.

    Raises:
      ValueError: ``comp`` lies outside [0, 1).
    """
    comp = _checked(comp)
    threshold = np.uint32(min(round(comp * 2**32), 2**32 - 1))

    def is_kept(seed, d):
        return jax.random.bits(_drawn_key(seed), (d,), jnp.uint32) >= threshold

    def compress(key, v):
        d = size_of(v)
        seed = jax.random.bits(compact(key), (), jnp.uint32)
        scaled = tree.scale(v, 1 / (1 - comp)) if rescale else v
        return Seeded(jnp.where(is_kept(seed, d), scaled, 0), seed, d)

    def pack(message):
        mask = np.asarray(is_kept(message.seed, message.d))
        seed = wire.pack_bits(np.reshape(message.seed, 1), 32)
        return seed + wire.pack_floats(np.asarray(message.values)[mask])

    def unpack(data, d, dtype="float32"):
        reader = wire.Reader(data)
        seed = reader.bits(1, 32)[0]
        mask = np.asarray(is_kept(seed, d))
        values = np.zeros(d, jnp.dtype(dtype))
        values[mask] = reader.floats(int(mask.sum()), jnp.dtype(dtype))
        reader.end()
        return Seeded(values, seed, d)

    def size(d, dtype="float32"):
        return round((1 - comp) * d * jnp.dtype(dtype).itemsize) + _SEED_BYTES

    return Compressor(
        "random_drop",
        {"comp": comp, "rescale": rescale},
        compress,
        decompress=lambda message: jnp.asarray(message.values),
        pack=pack,
        unpack=unpack,
        bytes=size,
        snr_bound=lambda d: comp / (1 - comp) if rescale else comp,
        unbiased=rescale,
    )


# Without jit, each message outside of jit would compile its loop again.
@functools.partial(jax.jit, static_argnames=("d", "k"))
def _drawn(seed: jax.Array, d: int, k: int) -> jax.Array:
    """Draw k of d coordinates from a message's seed, bool [d]."""
    return _are_largest([jax.random.bits(_drawn_key(seed), (d,), jnp.uint32)], k)[0]


def _drawn_key(seed: jax.Array):
    """Make a key from a message's seed, of a kind whose bits do not depend on vmap."""
    return compact(seeded(seed))


def _sort(magnitudes: jax.Array, k: int) -> jax.Array:
    return jax.lax.top_k(magnitudes, k)[1]


def _approximate(magnitudes: jax.Array, k: int) -> jax.Array:
    return jax.lax.approx_max_k(magnitudes, k)[1]


def _bisection(magnitudes: jax.Array, k: int) -> jax.Array:
    return _places(_are_largest([_ordered_bits(magnitudes)], k)[0], k)


def _ordered_bits(magnitudes: jax.Array) -> jax.Array:
    """Return the bits of nonnegative floats as unsigned numbers, which have the same order."""
    if magnitudes.dtype.itemsize < 4:
        magnitudes = magnitudes.astype(jnp.float32)
    return magnitudes.view(jnp.uint64 if magnitudes.dtype.itemsize == 8 else jnp.uint32)


_SELECTIONS = {"approximate": _approximate, "bisection": _bisection, "sort": _sort}


def _are_largest(parts: list[jax.Array], k: int) -> list[jax.Array]:
    """Select the k largest of d unsigned numbers; of equal ones, those with lowest indices.

    Numbers and results (bool) are in parts of any shapes, because joining them into one vector
    would rearrange them on accelerators.
    """
    sizes = [part.size for part in parts]
    d = sum(sizes)
    bound, count = _search(lambda x: [part >= x for part in parts], parts[0].dtype, None, d, k)
    ends = np.cumsum(sizes)
    behind = [_numbers_behind(part.shape, d - end) for part, end in zip(parts, ends, strict=True)]

    def up_to(x):  # of those equal to ``bound``, the ones that at least x numbers follow
        pairs = zip(parts, behind, strict=True)
        return [(part > bound) | ((part == bound) & (rest >= x)) for part, rest in pairs]

    x, _ = _search(up_to, jnp.uint32, d.bit_length(), count, k)  # no step without ties
    return up_to(x)


def _numbers_behind(shape: tuple[int, ...], behind_all: int) -> jax.Array:
    """Count the numbers after each one of an array, row by row, with those after it, uint32."""
    last = math.prod(shape) - 1 + int(behind_all)
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
        stride *= shape[axis]
    return np.uint32(max(last, 0)) - index


def _search(holds, dtype, width, count, k) -> tuple[jax.Array, jax.Array]:
    """Find the largest x for which ``holds`` is true for k numbers or more: (x, their number).

    The search stops early at an x with exactly k of them. Each pass finds two bits of x, because
    three counts together take no longer than one.

    Args:
      holds: x -> bools, in parts of any shape; True for fewer numbers the larger x is.
      width: number of low bits of x that may be set; None: all.
      count: number of Trues of ``holds(0)``, at least ``k``.
      k: number of wanted Trues.
    """
    width = 8 * jnp.dtype(dtype).itemsize if width is None else width

    def proceed(state):
        shift, _, count = state
        return (shift >= 0) & (count != k)

    def next_bits(state):
        shift, x, count = state
        candidates = [x + (jnp.asarray(j, dtype) << shift.astype(dtype)) for j in (1, 2, 3)]
        counts = (np.int32(0),) * 3
        for masks in zip(*map(holds, candidates), strict=True):  # of one part
            values = tuple(mask.astype(jnp.int32) for mask in masks)
            axes = tuple(range(values[0].ndim))
            own = jax.lax.reduce(values, (np.int32(0),) * 3, _add_each, axes)
            counts = _add_each(counts, own)
        for candidate, counted in zip(candidates, counts, strict=True):
            enough = counted >= k
            x, count = jnp.where(enough, candidate, x), jnp.where(enough, counted, count)
        return shift - 2, x, count

    first = (jnp.int32((width - 1) // 2 * 2), jnp.zeros((), dtype), jnp.asarray(count, jnp.int32))
    _, x, count = jax.lax.while_loop(proceed, next_bits, first)
    return x, count


def _add_each(left, right):
    return tuple(map(jnp.add, left, right))


def _places(taken: jax.Array, k: int) -> jax.Array:
    """Return the indices of the k Trues of a mask, ascending, int32."""
    # The mask as words, bit i for 32 w + i, and the number of Trues up to each word's end.
    bits = jnp.pad(taken, (0, -taken.shape[0] % _WORD)).reshape(-1, _WORD).astype(jnp.uint32)
    words = (bits << jnp.arange(_WORD, dtype=jnp.uint32)[None]).sum(1, dtype=jnp.uint32)
    through = jnp.cumsum(jax.lax.population_count(words).astype(jnp.int32))
    # The True of rank r is in the first word up to whose end there are more than r Trues.
    word = jnp.cumsum(jnp.zeros(k, jnp.int32).at[through].add(1, mode="drop"))
    rank = jnp.arange(k, dtype=jnp.int32)
    bits = words[word]
    rank = rank - (through[word] - jax.lax.population_count(bits).astype(jnp.int32))
    place = word * _WORD
    for half in (16, 8, 4, 2, 1):
        lower = bits & np.uint32((1 << half) - 1)
        count = jax.lax.population_count(lower).astype(jnp.int32)
        upper = rank >= count
        bits = jnp.where(upper, bits >> half, lower)
        rank = jnp.where(upper, rank - count, rank)
        place = place + jnp.where(upper, half, 0)
    return place
