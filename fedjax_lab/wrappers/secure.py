"""Secure aggregation, for methods whose server needs only sums: it sees nothing but the sum.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: Practical Secure
Aggregation for Privacy-Preserving Machine Learning. CCS 2017, Protocol 1 with pairwise masks.
Masks with some of the others: Bell, Bonawitz, Gascón, Lepoint, Raykova: Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead. CCS 2020.

=========================  ==========================================
paper                      here
=========================  ==========================================
x_u, R                     an encoded message, 2^``bits``
s_{u,v}                    ``pair_key``, from the round's key and both ids
PRG(s_{u,v})               ``jax.random.bits``
U_1, U_3                   slots that hold a client, those that take part
k of Bell et al.           ``neighbours``, in a Harary graph over the clients in random order
=========================  ==========================================
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.checks import check_int, check_number
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Cohort, Key, PyTree, Scalar
from fedjax_lab.wrappers.base import Place, State, Wrapper, tag
from fedjax_lab.wrappers.client_messages import select, stack_all

_MASKS = tag(6)  # folded into a round's key
_RING = tag(1)  # folded into the round's key for masks; client ids are smaller


@suggest_keywords
def with_secure_aggregation(
    algorithm: Algorithm, bits: int, clip: float, neighbours: int | None = None
) -> Algorithm:
    """Simulate secure aggregation: the server learns only the sum of the messages.

    1. Encoding: every number x of a message is clipped to [-clip, clip]. It becomes the integer
       x L / clip, rounded towards zero, so that norms do not grow. L is the largest integer with
       S L < 2^(bits - 1) for S slots, so the sum cannot overflow. In fields that the server
       averages with the batch's weights, the integer is p x M / clip, where p is the client's share
       of the weights, and M is 2^(bits - 1) - 1, less the rounding of the shares. The shares add up
       to 1, so that the sum cannot overflow either.
    2. Masking: each pair of clients of the cohort shares a mask of uniform integers below 2^bits.
       One client adds it and the other subtracts it, modulo 2^bits. The masked message of a client
       is uniform.
    3. Sum: the masks cancel exactly. If clients drop out of the round, the server removes their
       remaining masks, as it could with shares of their seeds.

    With ``neighbours``, a client shares masks only with this number of other clients, half of them
    on each side in a ring of the round's clients, whose order is drawn in every round. The sum has
    the same bits. A client is hidden if at least one of its neighbours reports. The server sees
    only the one sum unless neighbours / 2 consecutive clients drop out at two places of the ring.

    A mean differs from that of the clipped numbers by less than clip / L, whatever the weights, and
    a sum over n clients by less than n clip / L; in addition, by the rounding of their dtype.

    Bytes up: ceil(numbers * bits / 8) for all fields, including those that a server could derive
    from a plain message. Keys and their shares are not counted. The masks come from JAX's random
    numbers, and the whole protocol runs in one program. It simulates the effect on a method's
    numbers and keeps nothing secret.

    Memory and time: all messages are in memory; S (S - 1) / 2 masks of the size of a message, or
    S neighbours / 2, are drawn one after the other. First estimates (FAFED, STEM) are aggregated
    securely in the first round, not by ``init``.

    Metrics of the last phase, over the participants: ``saturated``, the share of numbers that were
    clipped, and ``vanished``, the share of nonzero numbers that became 0 because ``bits`` is small.
    A NaN (``on_nonfinite="keep"``) is sent as 0 and counts as clipped.

    Source: Bonawitz et al., CCS 2017, Protocol 1; ``neighbours``: Bell et al., CCS 2020.

    Args:
      algorithm: any method that sends messages and whose server uses neither single ones (GradMA,
        GradMA-S, FedExP) nor the clients' numbers of steps (FedNova).
      bits: bits of an integer in a message, 2 to 32.
      clip: largest absolute value of a number, from 1e-30 to 1e30.
      neighbours: number of clients with which a client shares masks, even. None, or as many as
        there are: all clients of the cohort.

    Raises:
      TypeError, ValueError: an argument is out of range; the server uses values of single clients
        (when the method is made or started); the order of wrappers has no meaning; or (when the
        round is traced) ``bits`` is too small for the cohort.
    """
    wrapper = Wrapper(algorithm, "secure")
    check_int("bits", bits, minimum=2, maximum=32)
    check_number("clip", clip, minimum=0.0, exclusive_minimum=True)
    # Beyond these, x / clip or its inverse is no normal number of float32.
    check_number("clip", clip, minimum=1e-30, maximum=1e30)
    if neighbours is not None:
        check_neighbours(neighbours)
    if algorithm.hyperparameters.get("dp_adaptive_quantile") is not None:
        raise ValueError(
            f"algorithm is {algorithm.name}: its clients also send whether they were clipped, a "
            "number to which clip does not apply; with_secure_aggregation requires with_dp without "
            "adaptive_quantile."
        )
    wrapper.refuse_stacks("the server sees no message by itself")

    def around(params, num_clients, server, rows):
        wrapper.refuse_step_counts(params, server)
        return server, rows

    return wrapper.wrap(
        "secure",
        lambda phase, place: _secure(algorithm.name, phase, place, bits, float(clip), neighbours),
        needs_floats=True,
        state=State(around),
        hyperparameters={
            "secure_bits": bits,
            "secure_clip": float(clip),
            **({} if neighbours is None else {"secure_neighbours": neighbours}),
        },
    )


def check_neighbours(neighbours: int, argument: str = "neighbours") -> int:
    """Check that ``neighbours`` is an even number of at least 2, and return it.

    Args:
      neighbours: number of clients with which a client shares masks.
      argument: name of the argument, for the error.

    Raises:
      TypeError, ValueError: it is no such number.
    """
    if check_int(argument, neighbours, minimum=2) % 2:
        raise ValueError(f"{argument} is {neighbours}; it must be even, half on each side.")
    return neighbours


def levels(bits: int, slots: int) -> int:
    """Compute L, the largest integer for which a sum of ``slots`` such integers has ``bits`` bits.

    Args:
      bits: bits of an integer, including its sign.
      slots: S.
    """
    return (2 ** (bits - 1) - 1) // slots


def shared_levels(bits: int, slots: int) -> int:
    """Compute M: a sum of ``slots`` integers p M, whose shares p add up to 1, has ``bits`` bits.

    M is as much smaller than 2^(bits - 1) as float32 may round the shares and products up.

    Args:
      bits: bits of an integer, including its sign.
      slots: S.
    """
    largest = 2 ** (bits - 1) - 1
    return largest - int(largest * (slots + 8) * float(np.finfo(np.float32).eps))


def encode(values: jax.Array, factors: jax.Array, clip: float, largest: int) -> jax.Array:
    """Encode numbers as integers, uint32 [S, ...], negative ones modulo 2^32; a NaN becomes 0.

    Args:
      values: [S, ...].
      factors: float [S] in [0, 1], factors of the clients' numbers.
      clip: largest absolute value of a number.
      largest: L or M, the integer for ``clip`` and a factor of 1.
    """
    dtype = tree.wide_dtype(values.dtype)
    # The largest number of this type that is at most ``largest``.
    limit = np.asarray(largest, dtype)
    limit = np.nextafter(limit, np.asarray(0, dtype)) if int(limit) > largest else limit
    values = jnp.where(jnp.isnan(values), 0, values).astype(dtype)
    unit = jnp.clip(values, -clip, clip) / clip
    scaled = tree.scale_rows(unit, factors) * limit
    return jnp.trunc(jnp.clip(scaled, -limit, limit)).astype(jnp.int32).astype(jnp.uint32)


def decode(total: jax.Array, bits: int, clip: float, largest: int, dtype: Any) -> jax.Array:
    """Decode a sum of encoded numbers, modulo 2^bits.

    Args:
      total: uint32 [...]; only the lower ``bits`` are used.
      bits, clip, largest: as in ``encode``.
      dtype: dtype of the result [...].
    """
    shift = np.uint32(32 - bits)
    signed = jax.lax.bitcast_convert_type(total << shift, jnp.int32) >> np.int32(32 - bits)
    wide = tree.wide_dtype(dtype)
    return (signed.astype(wide) * jnp.asarray(clip / largest, wide)).astype(dtype)


def pair_key(key: Key, one: jax.Array, other: jax.Array) -> Key:
    """Derive the key that two clients share in a round; it is symmetric in the clients.

    Args:
      key: the round's key for masks.
      one, other: int32 scalars, ids of the clients.
    """
    low, high = jnp.minimum(one, other), jnp.maximum(one, other)
    return jax.random.fold_in(jax.random.fold_in(key, low), high)


def mask(
    encoded: jax.Array,
    key: Key,
    client_ids: jax.Array,
    present: jax.Array,
    reports: jax.Array,
    neighbours: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mask the messages; returns (masked messages, masks that remain in their sum).

    Args:
      encoded: uint32 [S, d].
      key: the round's key for masks.
      client_ids: int32 [S].
      present: bool [S], clients that started the round and share masks with their neighbours.
      reports: bool [S], clients whose message arrives.
      neighbours: number of neighbours, even; None: all clients.

    Returns:
      (uint32 [S, d], modulo 2^32; uint32 [d], the masks that reporting clients share with clients
      that do not report).
    """
    slots, count = encoded.shape[0], present.sum(dtype=jnp.int32)
    furthest = (slots if neighbours is None else min(neighbours, slots)) // 2
    ring = jax.random.permutation(jax.random.fold_in(key, _RING), slots)
    ring = ring[jnp.argsort(~present[ring], stable=True)]

    def one_pair(carry, pair):
        seen, left = carry
        place, step = pair
        i, j = ring[place], ring[(place + step) % jnp.maximum(count, 1)]
        # If the ring is so small that the steps go around it, each pair is used only once.
        is_met = (place < count) & ((2 * step < count) | ((2 * step == count) & (place < step)))
        shared = pair_key(key, client_ids[i], client_ids[j])
        drawn = jax.lax.cond(
            is_met,
            lambda: jax.random.bits(shared, encoded.shape[1:], jnp.uint32),
            lambda: jnp.zeros(encoded.shape[1:], jnp.uint32),
        )
        # The client with the smaller id adds the mask.
        drawn = jnp.where(client_ids[i] < client_ids[j], drawn, -drawn)
        seen = seen.at[i].add(drawn).at[j].add(-drawn)
        lonely = jnp.where(reports[i], drawn, -drawn)
        left = left + jnp.where(reports[i] != reports[j], lonely, 0)
        return (seen, left), None

    places = jnp.tile(jnp.arange(slots, dtype=jnp.int32), furthest)
    steps = jnp.repeat(jnp.arange(1, furthest + 1, dtype=jnp.int32), slots)
    start = (encoded, jnp.zeros(encoded.shape[1:], jnp.uint32))
    return jax.lax.scan(one_pair, start, (places, steps))[0]


class _Code(NamedTuple):
    """How the numbers of a field are encoded."""

    factors: jax.Array  # float [S], of the clients' numbers
    largest: int  # the integer for ``clip``
    unit: Scalar  # factor of the decoded sum


def _secure(
    name: str, phase: Phase, place: Place, bits: int, clip: float, neighbours: int | None
) -> Phase:
    """Wrap a phase so that its server half gets the decoded sum of masked messages."""

    def server_update(server, messages, cohort):
        largest = check_bits(f"{name}'s cohort", bits, cohort.client_ids.shape[0])
        messages = select(cohort.participates, messages)
        weights = cohort.weights
        codes = {"sum": _Code(cohort.participates.astype(weights.dtype), largest, 1.0)}
        if cohort.equal_weights:
            heaviest = weights.max()
            codes["mean"] = _Code(tree.safe_divide(weights, heaviest), largest, heaviest)
        else:
            whole = weights.sum()
            shared = shared_levels(bits, weights.shape[0])
            codes["mean"] = _Code(tree.safe_divide(weights, whole), shared, whole)
        code = {field: codes[phase.reduce[field]] for field in messages}

        def encoded_leaf(code, values):
            return encode(values, code.factors, clip, code.largest)

        def decoded_leaf(code, total, like):
            value = decode(total, bits, clip, code.largest, _holding(like.dtype))
            return tree.scale(value, code.unit).astype(like.dtype)

        encoded = {
            field: jax.tree.map(functools.partial(encoded_leaf, code[field]), value)
            for field, value in messages.items()
        }
        total = _masked_total(tree.flatten(encoded, 1), place.number, cohort, neighbours)
        shapes = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], jnp.uint32), encoded)
        sums = tree.unflatten(total, shapes)
        received = {
            field: jax.tree.map(functools.partial(decoded_leaf, code[field]), sums[field], value)
            for field, value in messages.items()
        }
        inner, metrics = phase.server_update(server, received, cohort)
        if place.is_last:
            metrics = {**metrics, **_losses(messages, encoded, clip, cohort)}
        return inner, metrics

    def encoded_bytes(message):
        numbers = sum(leaf.size for leaf in jax.tree.leaves(message))
        return -(-numbers * bits // 8)

    whole = (*phase.costs.whole, "up")
    costs = phase.costs._replace(up=encoded_bytes, derived=(), extra=0, whole=whole)
    return stack_all(phase)._replace(server_update=server_update, costs=costs)


def _holding(dtype: Any) -> Any:
    """Return a dtype for the sum of a mean's numbers: that of float16 may be beyond it."""
    return dtype if jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp else jnp.float32


def _masked_total(
    encoded: jax.Array, number: int, cohort: Cohort, neighbours: int | None
) -> jax.Array:
    """Compute the sum of the masked messages without the remaining masks, uint32 [d]."""
    key = jax.random.fold_in(jax.random.fold_in(cohort.key, _MASKS), number)
    present = cohort.client_ids < cohort.num_clients
    reports = cohort.participates
    seen, left = mask(encoded, key, cohort.client_ids, present, reports, neighbours)
    return jnp.where(reports[:, None], seen, 0).sum(0, dtype=jnp.uint32) - left


def _losses(
    messages: dict[str, PyTree], encoded: dict[str, PyTree], clip: float, cohort: Cohort
) -> dict[str, jax.Array]:
    """Compute (share of the numbers beyond ``clip``, share of the nonzero ones that became 0)."""
    dtype = cohort.weights.dtype
    leaves = jax.tree.leaves(messages)
    pairs = list(zip(leaves, jax.tree.leaves(encoded), strict=True))
    beyond = sum((~(jnp.abs(x) <= clip)).sum(dtype=dtype) for x in leaves)
    gone = sum(((x != 0) & (e == 0)).sum(dtype=dtype) for x, e in pairs)
    some = sum((x != 0).sum(dtype=dtype) for x in leaves)
    size = sum(x.size // x.shape[0] for x in leaves)
    return {
        "saturated": tree.safe_divide(beyond, size * cohort.participates.sum(dtype=dtype)),
        "vanished": tree.safe_divide(gone, some),
    }


def check_bits(of: str, bits: int, slots: int) -> int:
    """Check that an integer has enough bits for the sum of a cohort's messages, and return L.

    Args:
      of: the cohort, for the error.
      bits: bits of an integer, including its sign.
      slots: S.

    Raises:
      ValueError: it has not.
    """
    largest = levels(bits, slots)
    if largest < 1:
        needed = next(b for b in range(2, 64) if levels(b, slots) >= 1)
        raise ValueError(
            f"bits is {bits}; it must be at least {needed}, or the sum of the {slots} messages of "
            f"{of} could overflow."
        )
    return largest
