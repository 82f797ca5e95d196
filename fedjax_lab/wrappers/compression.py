"""Compression of the messages of any method with any compressor.

Yang, Fang, Liu: CFedAvg: Achieving Efficient Communication and Fast Convergence in Non-IID
Federated Learning. MobiHoc 2021, Algorithm 1, for every field of every message.

=========================  ==========================================
paper                      here
=========================  ==========================================
Δ̄_i (the local change)     u_i, a field of the method's message
e_i                        a residual in the client's row
C(Δ̄_i + e_i)               Δ_i, what the server receives
=========================  ==========================================
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_lab import tree
from fedjax_lab.checks import check_choice, check_number, warn
from fedjax_lab.clients.results import check_message
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.compressors.base import Compressor
from fedjax_lab.compressors.by_name import as_compressor
from fedjax_lab.machine.keys import seeded
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Key, Params, PyTree
from fedjax_lab.wrappers.base import Place, State, Wrapper, add_metrics, tag

_MESSAGES = tag(2)  # folded into a client's key
_SQUARES = ("message_sq", "error_sq", "change_sq")


class CompressedRow(NamedTuple):
    """A client's row.

    Attributes:
      inner: the method's own row.
      residuals: {field: e_i, shaped like the field} for each compressed phase; () without error
        feedback.
      squares: sums over the earlier phases of a round; () if there is only one phase.
    """

    inner: PyTree
    residuals: tuple[dict[str, PyTree], ...]
    squares: jax.Array | tuple[()]


class CompressedServer(NamedTuple):
    """Server state with a compressed broadcast.

    Attributes:
      inner: the method's own server state.
      held: the clients' copies h of the broadcast vectors, for each compressed phase.
    """

    inner: PyTree
    held: tuple[list[Params], ...]


def message_key(client_key: Key, field: int, inner: int = 0) -> Key:
    """Derive the key with which a client compresses a field."""
    return _apart(jax.random.fold_in(jax.random.fold_in(client_key, _MESSAGES), field), inner)


def _apart(key: Key, inner: int) -> Key:
    """Fold in how many compressions lie inside; a single one has the key itself."""
    return jax.random.fold_in(key, inner) if inner else key


@suggest_keywords
def with_compression(
    algorithm: Algorithm,
    compressor: Compressor | str,
    *,
    error_feedback: bool = True,
    downlink: Compressor | str | None = None,
    scope: str = "global",
) -> Algorithm:
    """Compress the messages of a method, with or without error feedback.

    Uplink: every field u_i of a message is compressed separately, p_i = u_i + e_i, Δ_i = C(p_i),
    e_i <- p_i - Δ_i, with a key of its own, and the server uses Δ_i. A field may be any pytree of
    floats. The residuals e_i are part of the client's row; each has the shape of its field. A
    client that does not participate (K_i = 0) sends nothing, and its e_i are unchanged. First
    estimates (phases with ``once``) are not compressed.

    Downlink, with ``downlink``: clients have a copy h of each broadcast vector x that is shaped
    like the params; other values are broadcast uncompressed. In each round the server sends
    D(x - h), server and clients set h <- h + D(x - h), and the clients use h. The compression error
    stays in x - h and is sent later; this is the server's error feedback. All clients know the
    initial h, and absent clients are assumed to receive every broadcast, but ``bytes_down`` counts
    only the cohort. D's randomness depends on the round and the phase, not on the run's seed.

    A client's row has the exact values that the client computed, while the server adds the
    compressed ones. Invariants between the two then hold only up to the compression error:

    - the server's c is the mean of the c_i (SCAFFOLD, FedMoSWA);
    - the mean dual is the mean of the duals (FedSpeed with ``server_dual="all"``);
    - the rows of a memory are the clients' deltas (GradMA, MIFA).

    With error feedback, the sum over rounds of a client's sent messages, plus its residual, is the
    sum of its exact messages. With ``downlink``, clients start from h, so a delta is a difference
    to h. Residuals stay bounded if the compressor's error is below its input (``snr_bound`` below
    1); a warning says where it may not be.

    Bytes are those of the packed messages, for params of their dtype, plus the method's additional
    bytes. Metrics: ``message_sq``, ``error_sq`` and ``change_sq`` are the cohort's means of
    ||Δ_i||², ||e_i||² (0 without error feedback) and ||u_i||², over all fields and phases of the
    round.

    Source: Yang et al. (CFedAvg), MobiHoc 2021, Algorithm 1, for every field of every message.

    Args:
      algorithm: any method.
      compressor: compressor of the clients' messages, or text such as "top_k:0.99".
      error_feedback: whether to add the compression error to the client's next message.
      downlink: compressor of the broadcast; None: no compression.
      scope: "global": all arrays of a field as one vector; "per_leaf": each array separately.

    Raises:
      TypeError: a compressor is neither a ``Compressor`` nor text.
      ValueError: the scope is unknown, a compressor's text is invalid, the method's messages are
        already clipped, masked or attacked, or (when it is started) a field of a message has
        numbers that are not floats, or the compressor's ``bytes`` are no number from 0.
    """
    wrapper = Wrapper(algorithm, "compression")
    up = as_compressor("compressor", compressor)
    down = None if downlink is None else as_compressor("downlink", downlink)
    check_choice("scope", scope, ("global", "per_leaf"))
    compressed = list(filter(_is_compressed, algorithm.phases))
    inner = algorithm.wrappers.count("compression")

    def around(params, num_clients, server, rows):
        residuals = tuple(
            zero_row_per_client(phase.message_like(params), num_clients)
            for phase in compressed
            if error_feedback
        )
        fields = [field for phase in compressed for field in phase.message_like(params).values()]
        _warn_if_larger(algorithm.name, up, fields, scope)
        if error_feedback:
            _warn_if_growing(up, fields, scope)
        dtype = jnp.result_type(float)
        squares = jnp.zeros((num_clients, len(_SQUARES)), dtype) if len(compressed) > 1 else ()
        if down is not None:
            first = jnp.zeros((), jnp.int32)
            held = (_vectors(phase.broadcast(server, first), params) for phase in compressed)
            server = CompressedServer(server, jax.tree.map(jnp.copy, tuple(held)))
        return server, CompressedRow(rows, residuals, squares)

    def change(phase, place):
        phase = _compress_messages(phase, place, up, error_feedback, scope, inner)
        if down is None:
            return phase
        return _compress_broadcast(phase, place.index, down, scope, inner)

    return wrapper.wrap(
        up.name,
        change,
        of=_is_compressed,
        needs_floats=True,
        state=State(
            around, None if down is None else CompressedServer, CompressedRow, first_batch=True
        ),
        hyperparameters={
            "compressor": str(up),
            "error_feedback": error_feedback,
            "downlink": None if down is None else str(down),
            "scope": scope,
        },
    )


def _is_compressed(phase: Phase) -> bool:
    return not phase.once


def _warn_if_larger(name: str, up: Compressor, fields: list[PyTree], scope: str) -> None:
    """Warn of a compressor whose messages are larger than uncompressed ones."""
    plain = sum(map(tree.nbytes, fields))
    packed = sum(_packed_bytes(up, field, scope) for field in fields)
    if packed > plain:
        warn(
            f"{up} sends {packed:,} bytes in place of {name}'s {plain:,}: more than without "
            "compression. Its additional data, such as positions, outweigh the omitted values.",
        )


def _warn_if_growing(up: Compressor, fields: list[PyTree], scope: str) -> None:
    """Warn of a compressor whose error feedback need not stay bounded."""
    sizes = [[leaf.size for leaf in jax.tree.leaves(field) if leaf.size] for field in fields]
    largest = max(
        (max(own) if scope == "per_leaf" else sum(own) for own in sizes if own), default=0
    )
    bound = up.snr_bound(largest) if largest else 0.0
    if bound >= 1:
        warn(
            f"error feedback needs a compressor whose error is below its input; {up} has a bound "
            f"of {bound:.3g} times the input's squared norm for {largest:,} numbers, so that "
            "residuals may grow without limit. Use error_feedback=False, or a form with "
            "scaled=True, such as qsgd:15:scaled."
        )


def _compress_messages(phase: Phase, place: Place, up, error_feedback, scope, inner) -> Phase:
    """Wrap a phase so that its messages are compressed."""
    index = place.index

    def client_update(received, row, batch):
        message, row, report = phase.client_update(received, row, batch)
        sent, errors = dict(message), {}
        if error_feedback:  # whose residuals have the shapes that the messages must have
            check_message(message, row.residuals[index], phase.reduce)
        is_finite = tree.all_finite(message)  # some compressors turn a NaN into a number
        for field, name in enumerate(phase.reduce):
            p = message[name]
            if error_feedback:
                p = tree.add(p, row.residuals[index][name])
            sent[name] = _through(up, message_key(batch.key, field, inner), p, scope)
            if error_feedback:
                errors[name] = tree.subtract(p, sent[name])
            sent[name] = jax.tree.map(lambda x: jnp.where(is_finite, x, jnp.nan), sent[name])
        squares = jnp.stack(
            [jnp.asarray(tree.norm(t, squared=True)) for t in (sent, errors, message)]
        )
        residuals = row.residuals
        if error_feedback:
            residuals = (*residuals[:index], errors, *residuals[index + 1 :])
        row = row._replace(residuals=residuals)
        if place.count > 1:
            squares = squares if index == 0 else row.squares + squares
            row = row._replace(squares=squares.astype(row.squares.dtype))
        if place.is_last:
            one = jnp.ones((), squares.dtype)
            own = {name: (squares[i], one) for i, name in enumerate(_SQUARES)}
            report = add_metrics(report, own)
        return sent, row, report

    def packed(message):
        return sum(_packed_bytes(up, field, scope) for field in message.values())

    costs = phase.costs._replace(up=packed, derived=(), whole=(*phase.costs.whole, "up"))
    return phase._replace(client_update=client_update, costs=costs)


def _compress_broadcast(
    phase: Phase, index: int, down: Compressor, scope: str, inner: int
) -> Phase:
    """Wrap a phase so that its broadcast is compressed."""

    def heard(server, round):
        """Compute the clients' copies after this round's broadcast."""
        held = server.held[index]
        key = _apart(jax.random.fold_in(jax.random.fold_in(seeded(0), round), index), inner)
        vectors = _vectors(phase.broadcast(server, round), held[0]) if held else []
        changes = [
            _through(down, jax.random.fold_in(key, i), tree.subtract(x, h), scope)
            for i, (x, h) in enumerate(zip(vectors, held, strict=True))
        ]
        return [tree.add(h, change) for h, change in zip(held, changes, strict=True)]

    def broadcast(server, round):
        received = phase.broadcast(server, round)
        new = heard(server, round)
        return _replace_vectors(received, new) if new else received

    def server_update(server, messages, cohort):
        held = (*server.held[:index], heard(server, cohort.round), *server.held[index + 1 :])
        server, metrics = phase.server_update(server, messages, cohort)
        return server._replace(held=held), metrics

    def received_bytes(received, params):
        vectors = _vectors(received, params)
        packed = sum(_packed_bytes(down, vector, scope) for vector in vectors)
        return packed + phase.costs.down(received, params) - tree.nbytes(vectors)

    costs = phase.costs._replace(down=received_bytes, whole=(*phase.costs.whole, "down"))
    # The copies change even in a round without participants, so the state must be restored.
    return phase._replace(
        broadcast=broadcast,
        server_update=server_update,
        costs=costs,
        if_nobody="restored",
    )


def _like(params: Params):
    """Return a test whether a tree is the params or a part: personal leaves are None or empty."""

    def form(candidate: PyTree) -> Any:
        leaves, structure = jax.tree.flatten(candidate, is_leaf=lambda node: node is None)
        return structure, [None if leaf is None else jnp.shape(leaf) for leaf in leaves]

    structure, shapes = form(params)

    def test(candidate: PyTree) -> bool:
        own, found = form(candidate)
        if own != structure:
            return False
        alike = [one == other for one, other in zip(found, shapes, strict=True)]
        left_out = [shape is None or shape == (0,) for shape in found]
        return any(alike) and all(a or b for a, b in zip(alike, left_out, strict=True))

    return test


def _vectors(received: PyTree, params: Params) -> list[Params]:
    """Return the parts of a broadcast that are the params or a part of them, in order."""
    is_like = _like(params)
    return [part for part in jax.tree.leaves(received, is_leaf=is_like) if is_like(part)]


def _replace_vectors(received: PyTree, vectors: list[Params]) -> PyTree:
    """Replace the vectors of a broadcast."""
    is_like, remaining = _like(vectors[0]), iter(vectors)
    parts, structure = jax.tree.flatten(received, is_leaf=is_like)
    parts = [next(remaining) if is_like(part) else part for part in parts]
    return jax.tree.unflatten(structure, parts)


def _through(compressor: Compressor, key: Key, vector: PyTree, scope: str) -> PyTree:
    """Compress and decompress a tree."""
    leaves, structure = jax.tree.flatten(vector)
    if scope == "per_leaf":
        arrived = [
            compressor.apply(jax.random.fold_in(key, i), leaf.reshape(-1)).reshape(leaf.shape)
            if leaf.size
            else leaf
            for i, leaf in enumerate(leaves)
        ]
    elif not any(leaf.size for leaf in leaves):
        return vector
    elif compressor.direct_parts is not None:
        dtype = jnp.result_type(*leaves)
        arrived = compressor.direct_parts(key, [leaf.astype(dtype) for leaf in leaves])
        arrived = [sent.astype(leaf.dtype) for sent, leaf in zip(arrived, leaves, strict=True)]
    else:
        flat, unravel = ravel_pytree(vector)
        return unravel(compressor.apply(key, flat))
    return jax.tree.unflatten(structure, arrived)


def _packed_bytes(compressor: Compressor, params: Params, scope: str) -> int:
    """Compute the bytes of a packed tree, such as the params."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if leaf.size]
    vectors = [(leaf.size, leaf.dtype) for leaf in leaves]
    if scope == "global" and leaves:
        vectors = [(sum(leaf.size for leaf in leaves), jnp.result_type(*leaves))]
    about = f"bytes of the compressor {compressor}"
    return sum(check_number(about, compressor.bytes(*vector), minimum=0) for vector in vectors)
