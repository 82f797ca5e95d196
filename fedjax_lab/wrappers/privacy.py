"""Client-level differential privacy around any method whose server needs sums of messages.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR
2018. Adaptive clipping: Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with
Adaptive Clipping. NeurIPS 2021, Algorithm 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
C, S                       ``clip_norm``, the ``clip`` of the server
z                          ``noise_multiplier``
γ                          ``adaptive_quantile``
η_C                        0.2
b_i                        ``within_clip`` of the message, in the paper less 1/2
σ_b                        max(n / 20, z), n clients taking part, or expected to
z_Δ                        (z^-2 - (2 σ_b)^-2)^(-1/2), the multiplier of the messages' noise
=========================  ==========================================

What it costs: ``fedjax_lab.wrappers.accounting``.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.checks import check_number, is_traced
from fedjax_lab.clients.local import metrics_of
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Cohort, Key, PyTree, Scalar
from fedjax_lab.wrappers.accounting import check_bands, epsilon
from fedjax_lab.wrappers.accounting import noise_multiplier as noise_multiplier
from fedjax_lab.wrappers.correlated import correlate, no_noise_yet
from fedjax_lab.wrappers.frame import (
    Frame,
    Place,
    State,
    add_metrics,
    recorded,
    sends,
    tag,
    with_field,
)
from fedjax_lab.wrappers.released import Released, noise_index, nothing_released, one_more
from fedjax_lab.wrappers.rules import clip_factors

_NOISE = tag(5)  # folded into a round's key
_WITHIN = "within_clip"
_NUMBER_BYTES = 4  # the clip norm on its way down, and what counts for it on its way up
_CLIP_RATE = 0.2  # η_C
_COUNT_SHARE = 1 / 20  # of the clients, the noise of their count


class DPServer(NamedTuple):
    """Server state.

    Attributes:
      inner: the method's own server state.
      clip: float [exchanges], the clip norm of each exchange in which messages are sent.
      noise: of each exchange, the noise of the last ``noise_bands`` - 1 rounds, of standard
        deviation 1 but for its correlation: a tree like the sums with leaves [bands - 1, ...]; ()
        where it is independent.
      released: how many rounds there were, of this run and those before, and of which cohorts.
    """

    inner: PyTree
    clip: jax.Array
    noise: tuple[PyTree, ...]
    released: Released


@suggest_keywords
def with_dp(
    algorithm: Algorithm,
    clip_norm: Scalar,
    noise_multiplier: Scalar,
    delta: float | None = None,
    adaptive_quantile: float | None = None,
    noise_bands: int = 1,
) -> Algorithm:
    """The same method under client-level differential privacy, with a trusted server.

    A client shortens its message, all fields as one vector, to a norm of at most ``clip_norm``. The
    server adds up the messages and adds Gaussian noise to the sum, of standard deviation
    ``noise_multiplier * clip_norm`` in every number of every field, drawn once a round from the
    round's key. Then it goes on as the method says, with the noised sum divided by the number of
    clients where the method wants a mean. All that the server keeps, broadcasts and serves is made
    of noised sums.

    In a cohort of a fixed size, replacing a client by any other changes a sum by at most 2
    clip_norm, which is what ``epsilon`` counts. How many take part is taken to be known, who they
    are is not: that a cohort is drawn at random counts for as long as it is a secret. In a Poisson
    cohort (``simulate(..., sampling="poisson")``), a client more or less changes a sum by at most
    clip_norm, and nobody learns who came, nor how many: means are sums divided by the number of
    clients that was expected, and a round to which nobody came has its noise like any other.

    Weights would change these sensitivities, so that a batch with weights is an error. A client
    whose message or row is not finite sends zeros, keeps its row, and counts as having taken part.
    A method of several exchanges is noised in each, and each counts. First estimates (FAFED, STEM)
    are made in the first round and noised like the rest.

    With ``noise_bands`` above 1 the noise of a round takes back a part of that of the rounds before
    it (DP-FTRL with a banded matrix, ``fedjax_lab.wrappers.correlated``), so that the model, which
    adds up all rounds, is less noisy at the same epsilon, the more so the longer a client stays
    away. How long that is must be known: ``simulate(..., sampling="cyclic")``, where cohorts take
    turns and their being random earns nothing. Memory: bands - 1 models in the server's state.

    What is not covered: metrics of the clients (``loss``, ``clipped_clients``), which are computed
    without noise for who watches the simulation; the rows that clients keep for themselves, with
    them ``personal`` leaves and their mean, and models of their own; the sums before noise, which
    the server has in hand; and what floating-point numbers betray of the noise.

    A client's row keeps what it computed and the server adds up what it received: as under
    compression, invariants that tie the two hold no longer. Noise that a server sums over rounds
    (SCAFFOLD's c, MIFA's mean) stays in the sum.

    The state counts its rounds. A run from it draws new noise and new cohorts, and its ``epsilon``
    is that of all rounds; it is refused where the noise multiplier or the cohorts are others and
    ``delta`` is given, or where noise is correlated. A run from params begins anew.

    Metrics: ``clipped_clients``, the share of those taking part whose message was shortened or not
    finite, and ``clip_norm``, both of the last exchange.

    Args:
      algorithm: any method but those whose server works with single messages (GradMA, GradMA-S)
        or single numbers of steps (FedNova).
      clip_norm: C, above 0.
      noise_multiplier: at least 0; both may be swept.
      delta: with it, the rows of ``simulate`` and ``sweep`` have ``epsilon``: of all rounds of the
        state so far, as their cohorts are drawn; of Poisson and cyclic ones by their loss
        distribution ("pld"). None: no accounting.
      adaptive_quantile: share of the clients, between 0 and 1, that C should leave unclipped; C
        starts at ``clip_norm`` and is multiplied after every round by exp(-0.2 (b - quantile)),
        where b is the noised share that was not clipped. The messages' noise is larger for it (by
        at most 16 %), so that count and messages together cost what ``noise_multiplier`` does.
        None: C is fixed.
      noise_bands: rounds over which noise is correlated, such as those after which a client comes
        back; 1: independent noise. The first estimates' noise is independent.

    Raises:
      TypeError, ValueError: a number is out of range, the method's server sees single clients
        (when it is made or started), the wrappers' order has no meaning, a batch has weights (when
        the round is traced), or noise is correlated and the clip norm adaptive or cohorts (when a
        run starts) not cyclic.
      ImportError: ``delta`` is given and dp-accounting is not installed (when a row is made).
    """
    frame = Frame(algorithm, "dp")
    _check_numbers(clip_norm, noise_multiplier, delta, adaptive_quantile, noise_bands)
    frame.refuse_stacks("noise hides a client in a sum, not a message by itself")
    sending = list(filter(sends, algorithm.phases))
    adaptive = None if adaptive_quantile is None else float(adaptive_quantile)

    def around(params, num_clients, server, rows):
        frame.refuse_step_counts(params, server)
        clip = jnp.full(len(sending), clip_norm, jnp.result_type(float))
        likes = [(phase, phase.message_like(params)) for phase in sending]
        noise = tuple(
            no_noise_yet({name: like[name] for name in phase.reduce}, _bands(phase, noise_bands))
            for phase, like in likes
        )
        return DPServer(server, clip, noise, nothing_released(noise_multiplier)), rows

    def spent(
        rounds: int, cohort_size: int, num_clients: int, sampling: str
    ) -> Mapping[str, float]:
        check_bands(noise_bands, sampling)
        if delta is None:
            return {}
        regular = sum(not phase.once for phase in sending)
        value = epsilon(
            float(noise_multiplier),
            delta,
            rounds,
            cohort_size=cohort_size,
            num_clients=num_clients,
            sampling=sampling,
            accountant="rdp" if sampling == "without_replacement" else "pld",
            exchanges=regular,
            first_exchanges=len(sending),
            noise_bands=noise_bands,
        )
        return {"epsilon": value}

    def change(phase, place):
        bands = _bands(phase, noise_bands)
        return _private(phase, place, algorithm.name, noise_multiplier, adaptive, bands)

    wrapped = frame.wrap(
        "dp",
        change,
        otherwise=_unless_nobody,
        state=State(around, server=DPServer),
        hyperparameters={
            "dp_clip_norm": recorded(clip_norm),
            "dp_noise_multiplier": recorded(noise_multiplier),
            "dp_delta": delta,
            "dp_adaptive_quantile": adaptive,
            **({"dp_noise_bands": noise_bands} if noise_bands > 1 else {}),
        },
    )
    # Of a sweep's traced numbers nothing can be counted, and its points count for themselves.
    uncounted = (delta is None and noise_bands == 1) or is_traced(noise_multiplier)
    return dataclasses.replace(wrapped, spent=None if uncounted else spent)


def _check_numbers(clip_norm, noise_multiplier, delta, adaptive_quantile, noise_bands) -> None:
    check_number("clip_norm", clip_norm, minimum=0.0, exclusive_minimum=True)
    check_number("noise_multiplier", noise_multiplier, minimum=0.0)
    for name, value in (("delta", delta), ("adaptive_quantile", adaptive_quantile)):
        if value is not None:
            check_number(name, value, minimum=0, maximum=1, exclusive_minimum=True)
            check_number(name, value, maximum=1, exclusive_maximum=True)
    check_bands(noise_bands)
    if noise_bands > 1 and adaptive_quantile is not None:
        raise ValueError(
            f"noise_bands is {noise_bands} and adaptive_quantile {adaptive_quantile}; the noise of "
            "several rounds cancels where it is of one scale: leave the clip norm fixed."
        )


def _bands(phase: Phase, noise_bands: int) -> int:
    return 1 if phase.once else noise_bands


def _unless_nobody(phase: Phase) -> Phase:
    """A phase in which nothing is sent; if nobody comes, the server stays as it is."""

    def server_update(server, messages, cohort):
        new, metrics = phase.server_update(server, messages, cohort)
        return _unless_empty(cohort, new, server), metrics

    return phase._replace(server_update=server_update, if_nobody="updated")


def _unless_empty(cohort: Cohort, new: PyTree, old: PyTree) -> PyTree:
    """The new server, or the old one where nobody came and everybody knows."""
    if cohort.expected_size is not None:
        return new
    return tree.where(cohort.participates.any(), new, old)


def _private(phase: Phase, place: Place, name: str, multiplier, quantile, bands) -> Phase:
    """The phase with clipped messages and noised sums."""
    index, is_last = place.index, place.is_last

    def client_update(received, row, batch):
        received, clip = received
        message, new_row, report = phase.client_update(received, row, batch)
        finite = tree.all_finite((message, new_row))
        message, report = tree.zero_unless(finite, (message, metrics_of(report)))
        message, within = _clip(message, clip)
        kept = jnp.where(finite & within, 1.0, 0.0)
        if quantile is not None:
            message[_WITHIN] = kept
        if is_last:
            report = add_metrics(report, {"clipped_clients": (1 - kept, jnp.ones_like(kept))})
        return message, tree.where(finite, new_row, row), report

    def server_update(server, messages, cohort):
        if not cohort.equal_weights:
            raise ValueError(
                f"the batch has weights; {name} under with_dp counts every client once, "
                "as its noise is meant for a sum to which each adds clip_norm at most. Leave them "
                "out (weights='uniform')."
            )
        if bands > 1 and cohort.expected_size is not None:
            check_bands(bands, "poisson")
        clip = server.clip[index]
        came = cohort.participates.sum(dtype=clip.dtype)
        n = came if cohort.expected_size is None else cohort.expected_size.astype(clip.dtype)
        number = noise_index(server.released, index, place.count, cohort.round)
        key, count_key = jax.random.split(
            jax.random.fold_in(jax.random.fold_in(cohort.key, _NOISE), number)
        )
        z, sums, new_clips = jnp.asarray(multiplier, clip.dtype), dict(messages), server.clip
        if quantile is not None:
            # Less 1/2 for each that came, so that one more or less changes it by 1/2.
            count = sums.pop(_WITHIN) - came / 2
            z, new_clip = _adapted(clip, z, quantile, count, n, count_key)
            new_clips = server.clip.at[index].set(new_clip)
        sums = {name: sums[name] for name in phase.reduce}
        drawn, kept = correlate(_draw(key, sums), server.noise[index], bands)
        noise = (*server.noise[:index], kept, *server.noise[index + 1 :])
        sums = jax.tree.map(functools.partial(_add_noise, z * clip), sums, drawn)
        received = {
            name: tree.scale(field, tree.safe_divide(1.0, n))
            if phase.reduce[name] == "mean"
            else field
            for name, field in sums.items()
        }
        new, metrics = phase.server_update(server, received, cohort)
        if is_last:
            metrics = {**metrics, "clip_norm": clip}
        new = _unless_empty(cohort, new._replace(clip=new_clips), server)
        # Rounds to which nobody came count, or clients would come back sooner than they do.
        released = one_more(server.released, multiplier) if is_last else server.released
        return new._replace(noise=noise, released=released), metrics

    def broadcast(server, round):
        return phase.broadcast(server, round), server.clip[index]

    def broadcast_bytes(received, params):
        adaptive = quantile is not None
        return phase.broadcast_bytes(received[0], params) + _NUMBER_BYTES * adaptive

    wrapped = phase._replace(
        broadcast=broadcast,
        client_update=client_update,
        server_update=server_update,
        reduce=dict.fromkeys(phase.reduce, "sum"),
        broadcast_bytes=broadcast_bytes,
        if_nobody="updated",
    )
    if quantile is None:
        return wrapped
    return with_field(wrapped, _WITHIN, float, "sum", _NUMBER_BYTES)


def _adapted(clip, z, quantile, count, n, key) -> tuple[jax.Array, jax.Array]:
    """(z of the messages' noise, the next clip norm) by the noised count of those within it."""
    count_noise = jnp.where(z > 0, jnp.maximum(_COUNT_SHARE * n, z), 0)
    z = z / jnp.sqrt(1 - jnp.square(tree.safe_divide(z, 2 * count_noise)))
    count = count + count_noise * jax.random.normal(key, (), clip.dtype)
    share = tree.safe_divide(count, n) + 0.5
    return z, clip * jnp.exp(-_CLIP_RATE * (share - quantile))


def _clip(message: dict[str, PyTree], clip: jax.Array) -> tuple[dict[str, PyTree], jax.Array]:
    """The message with a norm of at most ``clip``, and whether it had that already."""
    leaves = [leaf for leaf in jax.tree.leaves(message) if leaf.size]
    factor = clip_factors([leaf[None] for leaf in leaves], clip)[0]
    within = factor == 1
    # So much shorter that no rounding makes the norm larger.
    coarsest = max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)
    factor = jnp.where(within, 1, factor * (1 - 2 * coarsest))
    return dict(tree.scale(message, factor)), within


def _draw(key: Key, like: dict[str, PyTree]) -> dict[str, PyTree]:
    """Independent standard normal numbers, in float32 at least."""
    leaves, structure = jax.tree.flatten(like)
    drawn = []
    for number, leaf in enumerate(leaves):
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        drawn.append(jax.random.normal(jax.random.fold_in(key, number), leaf.shape, dtype))
    return jax.tree.unflatten(structure, drawn)


def _add_noise(deviation: jax.Array, total: jax.Array, drawn: jax.Array) -> jax.Array:
    noised = total.astype(drawn.dtype) + deviation.astype(drawn.dtype) * drawn
    return noised.astype(total.dtype)
