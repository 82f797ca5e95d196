"""Secure aggregation around any method whose server needs sums: it sees the sum alone.

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

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.checks import check_int, check_number
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Cohort, Key, PyTree
from fedjax_lab.wrappers.frame import Frame, Place, State, tag
from fedjax_lab.wrappers.stacked import select, stack_all

_MASKS = tag(6)  # folded into a round's key
_RING = tag(1)  # into that of its masks; ids of clients are smaller


@suggest_keywords
def with_secure_aggregation(
    algorithm: Algorithm, bits: int, clip: float, neighbours: int | None = None
) -> Algorithm:
    """The same method whose server learns the sum of the messages and nothing else of them.

    Every number x of a message is clipped to [-clip, clip], multiplied by the client's weight in
    units of the largest weight of the round (for fields that the server sums: by 1), and becomes
    the integer x L / clip, rounded towards zero, so that no norm grows. L is the largest integer
    with S L < 2^(bits - 1) for S slots: the sum cannot overflow, whatever the clients send. Each
    pair of clients of the cohort shares a mask, uniform integers below 2^bits, that one adds and
    the other subtracts, modulo 2^bits. The masks cancel exactly in the sum; where clients drop out
    of the round, the server takes off what is left of theirs, as it could with their shares of
    the seeds. What the server sees of one client is uniform.

    With ``neighbours``, a client shares masks with so many others alone, half of them on either
    side in a ring of the round's clients, whose order is drawn every round. The sum is the same to
    the bit. A client is hidden as long as one of its neighbours reports, and nothing but the one
    sum is seen as long as neighbours / 2 in a row do not drop out at two places of the ring.

    The mean is then that of the clipped numbers, each too near to zero by less than clip / L.

    Bytes up: ceil(numbers * bits / 8) of all fields, also those that a server could derive from a
    plain message. Keys and their shares are not counted. The masks come from JAX's generator, and
    the whole protocol runs in one program: this shows what it does to a method's numbers, and
    keeps no secret.

    Memory and time: all messages are kept and masked; S (S - 1) / 2 masks as large as a message, or
    S neighbours / 2, are drawn one after the other. First estimates (FAFED, STEM) are summed like
    this in the first round, not by ``init``.

    Metrics, of the last exchange and of those taking part: ``saturated``, the share of the numbers
    that were clipped, and ``vanished``, the share of those other than 0 that became 0 because
    ``bits`` are few. A NaN (``on_nonfinite="keep"``) is sent as 0 and counts as clipped.

    Args:
      algorithm: any method but those whose server works with single messages (GradMA, GradMA-S)
        or single numbers of steps (FedNova).
      bits: of an integer on its way, 2 to 32.
      clip: largest absolute value of a number, above 0.
      neighbours: clients that one shares masks with, an even number; all where that is as many, or
        None.

    Raises:
      TypeError, ValueError: an argument is out of range, the method's server sees single clients
        (when it is made or started), or the wrappers' order has no meaning; or, when the round is
        traced, ``bits`` are too few for the cohort.
    """
    frame = Frame(algorithm, "secure")
    check_int("bits", bits, minimum=2, maximum=32)
    check_number("clip", clip, minimum=0.0, exclusive_minimum=True)
    if neighbours is not None:
        check_neighbours(neighbours)
    if algorithm.hyperparameters.get("dp_adaptive_quantile") is not None:
        raise ValueError(
            f"algorithm is {algorithm.name}: its clients also send whether they were clipped, a "
            "number that clip does not fit; with_secure_aggregation takes with_dp without "
            "adaptive_quantile."
        )
    frame.refuse_stacks("the server sees no message by itself")

    def around(params, num_clients, server, rows):
        frame.refuse_step_counts(params, server)
        return server, rows

    return frame.wrap(
        "secure",
        lambda phase, place: _secure(algorithm.name, phase, place, bits, float(clip), neighbours),
        state=State(around),
        hyperparameters={
            "secure_bits": bits,
            "secure_clip": float(clip),
            **({} if neighbours is None else {"secure_neighbours": neighbours}),
        },
        whole_messages=True,
    )


def check_neighbours(neighbours: int, argument: str = "neighbours") -> int:
    """Return ``neighbours`` if it is an even number of at least 2.

    Args:
      neighbours: with how many others a client shares masks.
      argument: the argument's name, for the error.

    Raises:
      TypeError, ValueError: it is not.
    """
    if check_int(argument, neighbours, minimum=2) % 2:
        raise ValueError(f"{argument} is {neighbours}; it must be even, half on either side.")
    return neighbours


def levels(bits: int, slots: int) -> int:
    """L: the largest integer of a message, so that the sum of ``slots`` of them has ``bits`` bits.

    Args:
      bits: of an integer, its sign included.
      slots: S.
    """
    return (2 ** (bits - 1) - 1) // slots


def encode(values: jax.Array, factors: jax.Array, clip: float, largest: int) -> jax.Array:
    """Integers for numbers, uint32 [S, ...], negative ones as their complement to 2^32; 0 for NaN.

    Args:
      values: [S, ...].
      factors: float [S] in [0, 1], by which a client's numbers are multiplied.
      clip: what numbers are clipped to, both ways.
      largest: L, what ``clip`` becomes.
    """
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    # The largest number of this type that is not beyond L.
    limit = np.asarray(largest, dtype)
    limit = np.nextafter(limit, np.asarray(0, dtype)) if int(limit) > largest else limit
    values = jnp.where(jnp.isnan(values), 0, values).astype(dtype)
    unit = jnp.clip(values, -clip, clip) / clip
    scaled = tree.scale_rows(unit, factors) * limit
    return jnp.trunc(jnp.clip(scaled, -limit, limit)).astype(jnp.int32).astype(jnp.uint32)


def decode(total: jax.Array, bits: int, clip: float, largest: int, dtype: Any) -> jax.Array:
    """The number for a sum of encoded ones, modulo 2^bits.

    Args:
      total: uint32 [...], of which the lower ``bits`` count.
      bits, clip, largest: as of ``encode``.
      dtype: of the result [...].
    """
    shift = np.uint32(32 - bits)
    signed = jax.lax.bitcast_convert_type(total << shift, jnp.int32) >> np.int32(32 - bits)
    wide = jnp.promote_types(dtype, jnp.float32)
    return (signed.astype(wide) * jnp.asarray(clip / largest, wide)).astype(dtype)


def pair_key(key: Key, one: jax.Array, other: jax.Array) -> Key:
    """What two clients share in a round, the same from either side.

    Args:
      key: the round's key for masks.
      one, other: int32 scalars, their ids.
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
    """What the server sees of each client, and what is left of the masks in their sum.

    Args:
      encoded: uint32 [S, d].
      key: the round's key for masks.
      client_ids: int32 [S].
      present: bool [S], who began the round and so has a mask with its neighbours.
      reports: bool [S], whose message arrives.
      neighbours: how many, an even number; None: everyone.

    Returns:
      (uint32 [S, d], modulo 2^32; uint32 [d]: the masks that those who report have with those who
      do not).
    """
    slots, count = encoded.shape[0], present.sum(dtype=jnp.int32)
    furthest = (slots if neighbours is None else min(neighbours, slots)) // 2
    ring = jax.random.permutation(jax.random.fold_in(key, _RING), slots)
    ring = ring[jnp.argsort(~present[ring], stable=True)]

    def one_pair(carry, pair):
        seen, left = carry
        place, step = pair
        i, j = ring[place], ring[(place + step) % jnp.maximum(count, 1)]
        # In a ring of so few that the steps go around it, every pair is met once.
        is_met = (place < count) & ((2 * step < count) | ((2 * step == count) & (place < step)))
        shared = pair_key(key, client_ids[i], client_ids[j])
        drawn = jax.lax.cond(
            is_met,
            lambda: jax.random.bits(shared, encoded.shape[1:], jnp.uint32),
            lambda: jnp.zeros(encoded.shape[1:], jnp.uint32),
        )
        # The one of the smaller id adds it.
        drawn = jnp.where(client_ids[i] < client_ids[j], drawn, -drawn)
        seen = seen.at[i].add(drawn).at[j].add(-drawn)
        lonely = jnp.where(reports[i], drawn, -drawn)
        left = left + jnp.where(reports[i] != reports[j], lonely, 0)
        return (seen, left), None

    places = jnp.tile(jnp.arange(slots, dtype=jnp.int32), furthest)
    steps = jnp.repeat(jnp.arange(1, furthest + 1, dtype=jnp.int32), slots)
    start = (encoded, jnp.zeros(encoded.shape[1:], jnp.uint32))
    return jax.lax.scan(one_pair, start, (places, steps))[0]


def _secure(
    name: str, phase: Phase, place: Place, bits: int, clip: float, neighbours: int | None
) -> Phase:
    """The phase whose server half gets what comes of the masked sum."""

    def server_update(server, messages, cohort):
        messages = {field: messages[field] for field in phase.reduce}
        largest = _check_bits(name, bits, cohort)
        messages = select(cohort.participates, messages)
        heaviest = cohort.weights.max()
        factors = {
            "mean": tree.safe_divide(cohort.weights, heaviest),
            "sum": cohort.participates.astype(cohort.weights.dtype),
        }
        encoded = {
            field: jax.tree.map(lambda x, f=factors[how]: encode(x, f, clip, largest), value)
            for field, value in messages.items()
            for how in [phase.reduce[field]]
        }
        total = _masked_total(tree.flatten(encoded, 1), place.number, cohort, neighbours)
        shapes = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], jnp.uint32), encoded)
        sums = tree.unflatten(total, shapes)
        decoded = jax.tree.map(
            lambda x, like: decode(x, bits, clip, largest, like.dtype), sums, messages
        )
        received = {
            field: tree.scale(value, heaviest) if phase.reduce[field] == "mean" else value
            for field, value in decoded.items()
        }
        inner, metrics = phase.server_update(server, received, cohort)
        if place.is_last:
            metrics = {**metrics, **_losses(messages, encoded, clip, cohort)}
        return inner, metrics

    def message_bytes(message):
        numbers = sum(leaf.size for leaf in jax.tree.leaves(message))
        return -(-numbers * bits // 8)

    return stack_all(phase)._replace(
        server_update=server_update, message_bytes=message_bytes, derived=(), extra_bytes=0
    )


def _masked_total(
    encoded: jax.Array, number: int, cohort: Cohort, neighbours: int | None
) -> jax.Array:
    """The sum of the masked messages without what is left of the masks, uint32 [d]."""
    key = jax.random.fold_in(jax.random.fold_in(cohort.key, _MASKS), number)
    present = cohort.client_ids < cohort.num_clients
    reports = cohort.participates
    seen, left = mask(encoded, key, cohort.client_ids, present, reports, neighbours)
    return jnp.where(reports[:, None], seen, 0).sum(0, dtype=jnp.uint32) - left


def _losses(
    messages: dict[str, PyTree], encoded: dict[str, PyTree], clip: float, cohort: Cohort
) -> dict[str, jax.Array]:
    """The shares of the numbers sent that are beyond ``clip``, and of those not 0 that became 0."""
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


def _check_bits(name: str, bits: int, cohort: Cohort) -> int:
    slots = cohort.client_ids.shape[0]
    largest = levels(bits, slots)
    if largest < 1:
        needed = next(b for b in range(2, 64) if levels(b, slots) >= 1)
        raise ValueError(
            f"bits is {bits}; the sum of {name}'s cohort of {slots} messages may overflow unless "
            f"it is at least {needed}."
        )
    return largest
