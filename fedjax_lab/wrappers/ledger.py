"""The ledger of a private run: the noised rounds that were released, which its epsilon counts.

A private server (``with_dp``) records its noised rounds in its state. A run that starts from such a
state draws new noise and new cohorts, and its epsilon includes the earlier rounds.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.data.cyclic import turns
from fedjax_lab.machine.keys import seeded
from fedjax_lab.round import Algorithm
from fedjax_lab.types import FedState, Key, Scalar
from fedjax_lab.wrappers.accountants import ACCOUNTED, check_bands, epsilon

_RUN = np.uint32(2**32 - 33)  # folded into a run's key, apart from rounds, groups and devices
_INSTEAD = (
    "or start from params=algorithm.params(state) with another seed, and add what was spent before"
)


class Sampling(enum.IntEnum):
    """Kinds of client sampling in ``Released``. Checkpoints have the numbers: never change one."""

    OTHER = -1  # custom sampling, or rounds of different kinds: no accounting
    NOT_RECORDED = 0
    CYCLIC = 1
    POISSON = 2
    WITHOUT_REPLACEMENT = 3


class Released(NamedTuple):
    """The noised rounds that a private server has released, a part of its state.

    Attributes:
      rounds: int32 scalar, number of noised rounds of all runs. For cyclic cohorts, the rounds of
        each earlier run are rounded up to full cycles.
      multiplier: float scalar, noise multiplier of these rounds.
      cohort_size: int32 scalar, cohort size of these rounds.
      available: int32 scalar, number of clients that might be sampled.
      sampling: int32 scalar, a ``Sampling``.
    """

    rounds: jax.Array
    multiplier: jax.Array
    cohort_size: jax.Array
    available: jax.Array
    sampling: jax.Array


def nothing_released(multiplier: Scalar) -> Released:
    """Create the record before the first round."""
    return Released(
        jnp.zeros((), jnp.int32),
        jnp.asarray(multiplier, jnp.result_type(float)),
        *jnp.zeros((3,), jnp.int32),
    )


def one_more(released: Released, multiplier: Scalar) -> Released:
    """Add a round to the record."""
    is_alike = released.multiplier == jnp.asarray(multiplier, released.multiplier.dtype)
    return released._replace(
        rounds=released.rounds + 1,
        sampling=jnp.where(is_alike, released.sampling, Sampling.OTHER),
    )


def noise_index(released: Released, index: int, exchanges: int, round: jax.Array) -> jax.Array:
    """Return the number to fold into a round's key for noise, unique over several runs.

    It equals ``index`` as long as the number of the round equals the number of released rounds.

    Args:
      round: int32 scalar, number of the round in the run.
    """
    before = (released.rounds - round).astype(jnp.uint32)
    return jnp.uint32(index) + jnp.uint32(exchanges) * before


def key_of(seed: int, state: Any) -> Key:
    """Create the key of a run; it differs from the seed's if the state has private rounds.

    The epsilon of random cohorts assumes that every round samples independently.

    Args:
      state: initial state of the run, or None.
    """
    released, key = _released(state), seeded(seed)
    rounds = 0 if released is None else int(released.rounds)
    return jax.random.fold_in(jax.random.fold_in(key, _RUN), rounds) if rounds else key


def record_cohorts(state: FedState, schedule: Schedule, clients: FederatedArrays) -> FedState:
    """Record the cohorts of the coming rounds in a private state; others are unchanged."""
    released = _released(state)
    if released is None:
        return state
    return _with(state, _followed_by(released, _kind_of(released.multiplier, schedule, clients)))


def resume_privately(
    algorithm: Algorithm, state: FedState, schedule: Schedule, clients: FederatedArrays
) -> FedState:
    """Check that a run may start from a private state, and prepare the state for it.

    Raises:
      ValueError: noise might be repeated, or the total privacy cost would be unknown.
    """
    settings, name = algorithm.hyperparameters, algorithm.name
    if settings.get("example_noise") not in (None, 0):
        raise ValueError(
            f"state is set, and {name} has example_noise {settings['example_noise']}; the state "
            "does not record the noise of its clients, which might be repeated. Continue in the "
            f"run's own run_dir with a larger rounds, {_INSTEAD}."
        )
    released = _released(state)
    if released is None:
        return state
    rounds = int(released.rounds)
    if rounds and settings.get("dp_noise_bands", 1) > 1:
        raise ValueError(
            f"state has {rounds} released rounds and {name} noise_bands "
            f"{settings['dp_noise_bands']}; a new run would draw new groups, and clients would "
            "participate again earlier than the noise allows. Continue in the run's own run_dir "
            f"with a larger rounds, {_INSTEAD}."
        )
    kind = _kind_of(settings["dp_noise_multiplier"], schedule, clients)
    new = _followed_by(released, kind)
    is_counted = settings.get("dp_delta") is not None and kind.sampling != Sampling.OTHER
    if rounds and is_counted and _describe(new) is None:
        before, now = _describe(released) or "several or unknown kinds", _describe(kind)
        raise ValueError(
            f"state has {rounds} released rounds of {before}, and this run has {now}; their total "
            f"epsilon is unknown. Use the same settings, omit delta, {_INSTEAD}."
        )
    return _with(state, new)


def guarantees(
    algorithm: Algorithm,
    schedule: Schedule,
    clients: FederatedArrays,
    state: FedState | None = None,
) -> Callable[[int], dict[str, Any]]:
    """Build a function: number of rounds -> privacy guarantees for the rows (may be empty).

    Args:
      state: result of ``resume_privately``, whose earlier rounds are counted; None: no earlier
        rounds.

    Raises:
      ValueError: the accounting assumes uniform client sampling, and the run has its own.
    """
    settings = algorithm.hyperparameters
    multiplier, delta = settings.get("dp_noise_multiplier"), settings.get("dp_delta")
    noise_bands = settings.get("dp_noise_bands", 1)
    # Traced numbers of a sweep cannot be counted; the sweep's points do the accounting.
    if not isinstance(multiplier, float) or (delta is None and noise_bands == 1):
        return lambda rounds: {}
    if clients.times is not None and clients.times.chooses:
        raise ValueError(
            f"times have availability or over_selection; the accounting of {algorithm.name} "
            "assumes uniform sampling from all clients. Omit delta, or these options of times."
        )
    if schedule.sample_cohort is not None:
        raise ValueError(
            f"sample_cohort is set; the accounting of {algorithm.name} assumes uniform client "
            f"sampling. Omit sample_cohort or {'noise_bands' if delta is None else 'delta'}."
        )
    check_bands(noise_bands, schedule.sampling)
    if delta is None:
        return lambda rounds: {}
    released = _released(state)
    before = 0 if released is None else int(released.rounds)
    sending = [phase for phase in algorithm.phases if phase.reduce]

    def spent(rounds: int) -> dict[str, Any]:
        value = epsilon(
            multiplier,
            delta,
            before + rounds,
            cohort_size=schedule.cohort_size,
            num_clients=clients.num_available,
            sampling=schedule.sampling,
            accountant="rdp" if schedule.sampling == "without_replacement" else "pld",
            exchanges=sum(not phase.once for phase in sending),
            first_exchanges=len(sending),
            noise_bands=noise_bands,
        )
        return {"epsilon": value}

    spent(1)  # a missing package is reported before the first round
    return spent


def _released(state: Any) -> Released | None:
    released = getattr(getattr(state, "server", None), "released", None)
    return released if isinstance(released, Released) else None


def _with(state: FedState, released: Released) -> FedState:
    return state._replace(server=state.server._replace(released=released))


class _Kind(NamedTuple):
    """Noise and cohorts of rounds; the epsilon is known only if all rounds have the same."""

    multiplier: Scalar
    cohort_size: int
    available: int
    sampling: Sampling


def _kind_of(multiplier: Scalar, schedule: Schedule, clients: FederatedArrays) -> _Kind:
    """Return the kind of a run's rounds."""
    chooses = clients.times is not None and clients.times.chooses
    is_own = chooses or schedule.sample_cohort is not None or schedule.sampling not in ACCOUNTED
    sampling = Sampling.OTHER if is_own else Sampling[schedule.sampling.upper()]
    return _Kind(multiplier, schedule.cohort_size, clients.num_available, sampling)


def _followed_by(released: Released, kind: _Kind) -> Released:
    """Return the record before the rounds of a new run."""
    rounds = released.rounds
    if kind.sampling == Sampling.CYCLIC:
        turn = turns(kind.cohort_size, kind.available)
        rounds = jnp.asarray(-(-rounds // turn) * turn, jnp.int32)
    multiplier = jnp.asarray(kind.multiplier, released.multiplier.dtype)
    new = Released(rounds, multiplier, *(jnp.asarray(number, jnp.int32) for number in kind[1:]))
    alike = [a == b for a, b in zip(new[1:], released[1:], strict=True)]
    is_one_kind = (released.rounds == 0) | jnp.stack(alike).all()
    return new._replace(sampling=jnp.where(is_one_kind, new.sampling, Sampling.OTHER))


def _describe(released: Released | _Kind) -> str | None:
    """Describe the kind of the rounds; None if it was not recorded, or for several kinds."""
    sampling = Sampling(int(released.sampling))
    if sampling in (Sampling.OTHER, Sampling.NOT_RECORDED):
        return None
    return (
        f"noise_multiplier {float(released.multiplier):g} and {sampling.name.lower()} cohorts of "
        f"{int(released.cohort_size)} of {int(released.available)} clients"
    )
