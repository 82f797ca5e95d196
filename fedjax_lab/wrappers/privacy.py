"""Client-level differential privacy for methods whose server needs only sums of messages.

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
z_Δ                        (z^-2 - (m / σ_b)^2)^(-1/2), the multiplier of the messages' noise,
                           with m = 1/2; in Poisson cohorts m = max(γ, 1 - γ)
=========================  ==========================================

The privacy accounting is in ``fedjax_lab.wrappers.ledger`` and ``accountants``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.checks import check_number, check_share
from fedjax_lab.clients.local import metrics_of
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Cohort, Key, PyTree, Scalar
from fedjax_lab.wrappers.accountants import check_bands
from fedjax_lab.wrappers.accountants import epsilon as epsilon
from fedjax_lab.wrappers.accountants import noise_multiplier as noise_multiplier
from fedjax_lab.wrappers.base import (
    Place,
    State,
    Wrapper,
    add_metrics,
    recorded,
    sends,
    tag,
    with_field,
)
from fedjax_lab.wrappers.correlated import correlate, no_noise_yet
from fedjax_lab.wrappers.ledger import Released, noise_index, nothing_released, one_more
from fedjax_lab.wrappers.rules import clip_factors

_NOISE = tag(5)  # folded into a round's key
_WITHIN = "within_clip"
_NUMBER_BYTES = 4  # the clip norm in the broadcast, and the indicator in a message
_CLIP_RATE = 0.2  # η_C
_COUNT_SHARE = 1 / 20  # standard deviation of the noise on the count, divided by the clients


class DPServer(NamedTuple):
    """Server state.

    Attributes:
      inner: the method's own server state.
      clip: float [exchanges], the clip norm of each phase in which messages are sent.
      noise: for each such phase, the unscaled noise of the last ``noise_bands`` - 1 rounds: a tree
        like the sums with leaves [bands - 1, ...]; () for independent noise.
      released: number and cohorts of the rounds of this run and earlier ones.
    """

    inner: PyTree
    clip: jax.Array
    noise: tuple[PyTree, ...]
    released: Released

    @staticmethod
    def of_arguments(hyperparameters):
        """Name the fields that a run takes from its method, not from an earlier state.

        Args:
          hyperparameters: of the method, as it records them.
        """
        return ("clip",) if hyperparameters["dp_adaptive_quantile"] is None else ()


@suggest_keywords
def with_dp(
    algorithm: Algorithm,
    clip_norm: Scalar,
    noise_multiplier: Scalar,
    delta: float | None = None,
    adaptive_quantile: float | None = None,
    noise_bands: int = 1,
) -> Algorithm:
    """Make a method differentially private at client level, with a trusted server.

    A client clips its message, all fields as one vector, to norm ``clip_norm``. The server adds up
    the messages, and adds Gaussian noise of standard deviation ``noise_multiplier * clip_norm`` to
    every number of the sum. The noise is drawn once per round from the round's key. For a mean, the
    noised sum is divided by the number of clients. The server then continues with the method, so
    its state, its broadcast and the global model depend only on noised sums.

    Which clients are protected against what depends on client sampling:

    - Cohorts of a fixed size: replacing a client by another one changes a sum by at most 2
      clip_norm, which ``epsilon`` takes into account. The number of participants is assumed to be
      public. Amplification by random sampling assumes that the cohort is secret.
    - Poisson cohorts (``simulate(..., sampling="poisson")``): adding or removing a client changes
      a sum by at most clip_norm. The participants and their number are secret: means are sums
      divided by the expected number of clients, and a round without participants has noise, too.

    Weights would change these sensitivities, so a batch with weights is an error. A client whose
    message or row is not finite sends zeros, keeps its row, and counts as a participant. In a
    method with several phases, each phase adds noise and is counted. First estimates (FAFED, STEM)
    are computed in the first round, with noise.

    With ``noise_bands`` above 1, the noise of a round cancels a part of the noise of earlier rounds
    (DP-FTRL with a banded matrix, ``fedjax_lab.wrappers.correlated``). The model, which sums over
    all rounds, then has less noise for the same epsilon, in particular if a client participates
    rarely. This requires ``simulate(..., sampling="cyclic")``, because the number of rounds between
    two participations must be known; there is no amplification by random sampling. Memory: bands -
    1 models in the server's state.

    Not protected are:

    - metrics of the clients (``loss``, ``clipped_clients``), which are computed without noise for
      the observer of the simulation;
    - client state, personal leaves and their mean, and the clients' own models;
    - the sums before noise is added, which the server knows;
    - information that floating-point numbers reveal about the noise.

    A client's row has the exact values that the client computed, while the server adds noised ones,
    so invariants between the two do not hold, as under compression. Noise that a server sums over
    rounds (SCAFFOLD's c, MIFA's mean) remains in the sum.

    The state counts its rounds. A run that starts from it draws new noise and new cohorts, and its
    ``epsilon`` includes the earlier rounds. Such a run is refused with correlated noise, and with
    ``delta`` if the noise multiplier or the cohorts differ. A run from params starts from zero.

    Metrics of the last phase: ``clipped_clients``, the share of participants whose message was
    clipped or not finite; ``finite_clients``, the share whose message was finite (a row counts the
    others in ``nonfinite_clients``); ``clip_norm``;
    for Poisson cohorts also ``server_updates``, which is 1, because noise moves the model even in a
    round without participants.

    Source: McMahan et al., ICLR 2018; adaptive clipping: Andrew et al., NeurIPS 2021; correlated
    noise: ``fedjax_lab.wrappers.correlated``.

    Args:
      algorithm: any method that sends messages and whose server uses neither single ones (GradMA,
        GradMA-S, FedExP) nor the clients' numbers of steps (FedNova).
      clip_norm: C, above 0; may be swept.
      noise_multiplier: at least 0; may be swept.
      delta: the delta for which rows of ``simulate`` and ``sweep`` have ``epsilon``, over all
        rounds of the state so far and for the run's client sampling. Poisson and cyclic cohorts use
        the accountant "pld". None: no accounting.
      adaptive_quantile: share of the clients, between 0 and 1, whose messages should not be
        clipped. C starts at ``clip_norm``, and is multiplied after every round by
        exp(-0.2 (b - quantile)), where b is the noised share of messages that were not clipped. The
        noise of the messages is larger, so that count and messages together have the cost of
        ``noise_multiplier``: by up to 16 %; in Poisson cohorts by up to the factor
        1 / sqrt(1 - m^2) with m = max(quantile, 1 - quantile), where few clients participate.
        None: C is fixed.
      noise_bands: number of rounds over which noise is correlated, such as the number of rounds
        between two participations; 1: independent noise. The noise of first estimates is
        independent.

    Raises:
      TypeError, ValueError: a number is out of range; the server uses values of single clients
        (when the method is made or started); the order of wrappers has no meaning; a batch has
        weights (when the round is traced); or noise is correlated with an adaptive clip norm or
        (when a run starts) without cyclic cohorts.
      ImportError: ``delta`` is set and dp-accounting is not installed (when a run starts).
    """
    wrapper = Wrapper(algorithm, "dp")
    _check_numbers(clip_norm, noise_multiplier, delta, adaptive_quantile, noise_bands)
    wrapper.refuse_stacks("noise hides a client in a sum, not a message by itself")
    sending = list(filter(sends, algorithm.phases))
    adaptive = None if adaptive_quantile is None else float(adaptive_quantile)

    def around(params, num_clients, server, rows):
        wrapper.refuse_step_counts(params, server)
        clip = jnp.full(len(sending), clip_norm, jnp.result_type(float))
        noise = tuple(
            no_noise_yet(phase.message_like(params), _bands(phase, noise_bands))
            for phase in sending
        )
        return DPServer(server, clip, noise, nothing_released(noise_multiplier)), rows

    def change(phase, place):
        bands = _bands(phase, noise_bands)
        return _private(phase, place, algorithm.name, noise_multiplier, adaptive, bands)

    return wrapper.wrap(
        "dp",
        change,
        otherwise=_unless_nobody,
        needs_floats=True,
        state=State(around, server=DPServer),
        hyperparameters={
            "dp_clip_norm": recorded(clip_norm),
            "dp_noise_multiplier": recorded(noise_multiplier),
            "dp_delta": delta,
            "dp_adaptive_quantile": adaptive,
            **({"dp_noise_bands": noise_bands} if noise_bands > 1 else {}),
        },
    )


def _check_numbers(clip_norm, noise_multiplier, delta, adaptive_quantile, noise_bands) -> None:
    check_number("clip_norm", clip_norm, minimum=0.0, exclusive_minimum=True)
    check_number("noise_multiplier", noise_multiplier, minimum=0.0)
    for name, value in (("delta", delta), ("adaptive_quantile", adaptive_quantile)):
        if value is not None:
            check_share(name, value)
    check_bands(noise_bands)
    if noise_bands > 1 and adaptive_quantile is not None:
        raise ValueError(
            f"noise_bands is {noise_bands} and adaptive_quantile {adaptive_quantile}; noise of "
            "several rounds cancels only if its scale is fixed: omit adaptive_quantile."
        )


def _bands(phase: Phase, noise_bands: int) -> int:
    return 1 if phase.once else noise_bands


def _unless_nobody(phase: Phase) -> Phase:
    """Wrap a phase without messages: without participants, the server is unchanged."""

    def server_update(server, messages, cohort):
        new, metrics = phase.server_update(server, messages, cohort)
        return _unless_empty(cohort, new, server), metrics

    return phase._replace(server_update=server_update, if_nobody="updated")


def _unless_empty(cohort: Cohort, new: PyTree, old: PyTree) -> PyTree:
    """Return the new server, or the old one if it is public that nobody participated."""
    if cohort.expected_size is not None:
        return new
    return tree.where(cohort.participates.any(), new, old)


def _private(phase: Phase, place: Place, name: str, multiplier, quantile, bands) -> Phase:
    """Wrap a phase so that messages are clipped and sums get noise."""
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
            one, is_finite = jnp.ones_like(kept), finite.astype(kept.dtype)
            shares = {"clipped_clients": (1 - kept, one), "finite_clients": (is_finite, one)}
            report = add_metrics(report, shares)
        return message, tree.where(finite, new_row, row), report

    def server_update(server, messages, cohort):
        if not cohort.equal_weights:
            raise ValueError(
                f"the batch has weights; {name} under with_dp counts every client once, because "
                "the noise is calibrated for clients that change a sum by at most clip_norm. Use "
                "weights='uniform'."
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
            # Minus 1/2 for each participant, so that one client changes the count by 1/2; minus the
            # quantile where the number is random, which then does not move the norm.
            centre = 0.5 if cohort.expected_size is None else quantile
            count = sums.pop(_WITHIN) - came * centre
            z, new_clip = _adapted(clip, z, quantile, count, n, centre, count_key)
            new_clips = server.clip.at[index].set(new_clip)
        drawn, kept = correlate(_draw(key, sums), server.noise[index], bands)
        noise = (*server.noise[:index], kept, *server.noise[index + 1 :])
        received = tree.add_scaled(sums, z * clip, drawn)
        for field, how in phase.reduce.items():
            if how == "mean":
                received[field] = tree.scale(received[field], tree.safe_divide(1.0, n))
        new, metrics = phase.server_update(server, received, cohort)
        if is_last:
            metrics = {**metrics, "clip_norm": clip}
        if is_last and cohort.expected_size is not None:  # noise, even if nobody participates
            metrics = {**metrics, "server_updates": jnp.ones_like(clip)}
        new = _unless_empty(cohort, new._replace(clip=new_clips), server)
        # Rounds without participants count, too, so that cycles keep their length.
        released = one_more(server.released, multiplier) if is_last else server.released
        return new._replace(noise=noise, released=released), metrics

    def broadcast(server, round):
        return phase.broadcast(server, round), server.clip[index]

    def received_bytes(received, params):
        adaptive = quantile is not None
        return phase.costs.down(received[0], params) + _NUMBER_BYTES * adaptive

    wrapped = phase._replace(
        broadcast=broadcast,
        client_update=client_update,
        server_update=server_update,
        reduce=dict.fromkeys(phase.reduce, "sum"),
        costs=phase.costs._replace(down=received_bytes),
        if_nobody="updated",
    )
    if quantile is None:
        return wrapped
    return with_field(wrapped, _WITHIN, lambda message: jnp.zeros(()), "sum", _NUMBER_BYTES)


def _adapted(clip, z, quantile, count, n, centre, key) -> tuple[jax.Array, jax.Array]:
    """Compute (z of the messages' noise, next clip norm) from the noised count."""
    change = max(centre, 1 - centre)  # of the count, by one client
    count_noise = jnp.where(z > 0, jnp.maximum(_COUNT_SHARE * n, z), 0)
    z = z / jnp.sqrt(1 - jnp.square(tree.safe_divide(z, count_noise / change)))
    count = count + count_noise * jax.random.normal(key, (), clip.dtype)
    share = tree.safe_divide(count, n) + centre
    return z, clip * jnp.exp(-_CLIP_RATE * (share - quantile))


def _clip(message: dict[str, PyTree], clip: jax.Array) -> tuple[dict[str, PyTree], jax.Array]:
    """Clip a message to norm ``clip``; returns (message, whether it was within the norm)."""
    leaves = [leaf for leaf in jax.tree.leaves(message) if leaf.size]
    factor = clip_factors([leaf[None] for leaf in leaves], clip)[0]
    within = factor == 1
    # A little shorter, so that rounding cannot make the norm larger than the limit.
    coarsest = max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)
    factor = jnp.where(within, 1, factor * (1 - 2 * coarsest))
    return dict(tree.scale(message, factor)), within


def _draw(key: Key, like: dict[str, PyTree]) -> dict[str, PyTree]:
    """Draw independent standard normal numbers, at least in float32."""
    leaves, structure = jax.tree.flatten(like)
    drawn = []
    for number, leaf in enumerate(leaves):
        dtype = tree.wide_dtype(leaf.dtype)
        drawn.append(jax.random.normal(jax.random.fold_in(key, number), leaf.shape, dtype))
    return jax.tree.unflatten(structure, drawn)
