"""What a run owes to the privacy of its state: a key of its own, an account that goes on."""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.round import Algorithm
from fedjax_lab.types import FedState, Key
from fedjax_lab.wrappers.privacy import DPServer
from fedjax_lab.wrappers.released import OTHER, Released, describe, go_on, nothing_released, run_key

_INSTEAD = (
    "or start from params=algorithm.params(state) with another seed, and add what was spent before"
)


def key_of(seed: int, state: Any) -> Key:
    """The run's key: that of its seed, or one apart where private rounds were run on its state.

    Args:
      seed: as of ``simulate``.
      state: what the run starts from, or None.
    """
    released = _released(state)
    key = jax.random.key(seed)
    return key if released is None else run_key(key, int(released.rounds))


def noted(state: FedState, schedule: Schedule, clients: FederatedArrays) -> FedState:
    """A state before round 0 that says of which cohorts its rounds will be, if it is private.

    Args:
      state: as of ``algorithm.init``.
      schedule: how cohorts are drawn.
      clients: the clients' data.
    """
    released = _released(state)
    if released is None:
        return state
    return _with(state, go_on(released, released.multiplier, *_cohorts(schedule, clients)))


def taken_up(
    algorithm: Algorithm, state: FedState, schedule: Schedule, clients: FederatedArrays
) -> FedState:
    """A state of which it is checked that a run may go on from it, as the run begins with it.

    Args:
      algorithm: the method.
      state: one of it.
      schedule: how the run draws its cohorts.
      clients: the clients' data.

    Raises:
      ValueError: noise might be drawn twice, or nobody knows what all rounds cost together.
    """
    settings, name = algorithm.hyperparameters, algorithm.name
    if settings.get("example_noise") not in (None, 0):
        raise ValueError(
            f"state is given, and {name} has example_noise {settings['example_noise']}; the state "
            "does not say which noise its clients have drawn, so that they might draw it twice. "
            f"Go on in the run's own run_dir with a larger rounds, {_INSTEAD}."
        )
    released = _released(state)
    if released is None:
        return state
    rounds, cohorts = int(released.rounds), _cohorts(schedule, clients)
    if rounds and settings.get("dp_noise_bands", 1) > 1:
        raise ValueError(
            f"state has {rounds} released rounds and {name} noise_bands "
            f"{settings['dp_noise_bands']}; a new run deals its groups anew, and clients would "
            "come back sooner than their noise is taken back. Go on in the run's own run_dir with "
            f"a larger rounds, {_INSTEAD}."
        )
    new = go_on(released, settings["dp_noise_multiplier"], *cohorts)
    is_counted = settings.get("dp_delta") is not None and cohorts[2] != OTHER
    if rounds and is_counted and describe(new) is None:
        before = describe(released) or "several kinds, or of one that simulate was not told"
        now = describe(go_on(nothing_released(new.multiplier), new.multiplier, *cohorts))
        raise ValueError(
            f"state has {rounds} released rounds of {before}, and this run has {now}; the epsilon "
            f"of both together is not known. Go on with the same, leave out delta, {_INSTEAD}."
        )
    return _with(state, new)


def guarantees(
    algorithm: Algorithm,
    schedule: Schedule,
    clients: FederatedArrays,
    state: FedState | None = None,
) -> Callable[[int], dict[str, Any]]:
    """rounds -> what the rows of so many rounds say of the method's guarantees, or nothing.

    Args:
      algorithm: the method.
      schedule: how cohorts are drawn.
      clients: the clients' data.
      state: as of ``taken_up``, whose rounds count; None: there were none.

    Raises:
      ValueError: the method counts what uniform cohorts cost, and the run draws its own.
    """
    spent = algorithm.spent
    if spent is None:
        return lambda rounds: {}
    if clients.times is not None and clients.times.chooses:
        raise ValueError(
            f"times have availability or over_selection; {algorithm.name} counts what uniform "
            "cohorts of all clients cost. Leave out delta, or what chooses among the clients."
        )
    if schedule.sample_cohort is not None:
        raise ValueError(
            f"sample_cohort is given; {algorithm.name} counts what uniform cohorts cost. Leave out "
            "one of it and delta."
        )
    among = _cohorts(schedule, clients)
    released = _released(state)
    before = 0 if released is None else int(released.rounds)
    spent(before + 1, *among)  # what is not installed is said before the first round
    return lambda rounds: dict(spent(before + rounds, *among))


def _released(state: Any) -> Released | None:
    server = getattr(state, "server", None)
    return server.released if isinstance(server, DPServer) else None


def _with(state: FedState, released: Released) -> FedState:
    return state._replace(server=state.server._replace(released=released))


def _cohorts(schedule: Schedule, clients: FederatedArrays) -> tuple[int, int, str]:
    """Cohort size, clients that may be drawn, and the sampling."""
    own = schedule.sample_cohort is not None or (
        clients.times is not None and clients.times.chooses
    )
    return schedule.cohort_size, clients.num_available, OTHER if own else schedule.sampling
