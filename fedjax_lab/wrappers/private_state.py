"""Privacy of runs that start from a private state: a key of their own, continued accounting."""

from collections.abc import Callable
from typing import Any

from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.machine.keys import seeded
from fedjax_lab.round import Algorithm
from fedjax_lab.types import FedState, Key
from fedjax_lab.wrappers.privacy import DPServer
from fedjax_lab.wrappers.released import OTHER, Released, describe, go_on, nothing_released, run_key

_INSTEAD = (
    "or start from params=algorithm.params(state) with another seed, and add what was spent before"
)


def key_of(seed: int, state: Any) -> Key:
    """Create the key of a run; it differs from the seed's if the state has private rounds.

    Args:
      seed: as in ``simulate``.
      state: initial state of the run, or None.
    """
    released = _released(state)
    key = seeded(seed)
    return key if released is None else run_key(key, int(released.rounds))


def noted(state: FedState, schedule: Schedule, clients: FederatedArrays) -> FedState:
    """Record the cohorts of the coming rounds in a private state; others are unchanged.

    Args:
      state: result of ``algorithm.init``.
      schedule: client sampling.
      clients: the clients' data.
    """
    released = _released(state)
    if released is None:
        return state
    return _with(state, go_on(released, released.multiplier, *_cohorts(schedule, clients)))


def taken_up(
    algorithm: Algorithm, state: FedState, schedule: Schedule, clients: FederatedArrays
) -> FedState:
    """Check that a run may start from a private state, and prepare the state for it.

    Args:
      algorithm: the method.
      state: a state of the method.
      schedule: client sampling of the run.
      clients: the clients' data.

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
    rounds, cohorts = int(released.rounds), _cohorts(schedule, clients)
    if rounds and settings.get("dp_noise_bands", 1) > 1:
        raise ValueError(
            f"state has {rounds} released rounds and {name} noise_bands "
            f"{settings['dp_noise_bands']}; a new run would draw new groups, and clients would "
            "participate again earlier than the noise allows. Continue in the run's own run_dir "
            f"with a larger rounds, {_INSTEAD}."
        )
    new = go_on(released, settings["dp_noise_multiplier"], *cohorts)
    is_counted = settings.get("dp_delta") is not None and cohorts[2] != OTHER
    if rounds and is_counted and describe(new) is None:
        before = describe(released) or "several or unknown kinds"
        now = describe(go_on(nothing_released(new.multiplier), new.multiplier, *cohorts))
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
      algorithm: the method.
      schedule: client sampling.
      clients: the clients' data.
      state: result of ``taken_up``, whose earlier rounds are counted; None: no earlier rounds.

    Raises:
      ValueError: the accounting assumes uniform client sampling, and the run has its own.
    """
    spent = algorithm.spent
    if spent is None:
        return lambda rounds: {}
    if clients.times is not None and clients.times.chooses:
        raise ValueError(
            f"times have availability or over_selection; the accounting of {algorithm.name} "
            "assumes uniform sampling from all clients. Omit delta, or these options of times."
        )
    if schedule.sample_cohort is not None:
        raise ValueError(
            f"sample_cohort is set; the accounting of {algorithm.name} assumes uniform client "
            "sampling. Omit sample_cohort or delta."
        )
    among = _cohorts(schedule, clients)
    released = _released(state)
    before = 0 if released is None else int(released.rounds)
    spent(before + 1, *among)  # a missing package is reported before the first round
    return lambda rounds: dict(spent(before + rounds, *among))


def _released(state: Any) -> Released | None:
    server = getattr(state, "server", None)
    return server.released if isinstance(server, DPServer) else None


def _with(state: FedState, released: Released) -> FedState:
    return state._replace(server=state.server._replace(released=released))


def _cohorts(schedule: Schedule, clients: FederatedArrays) -> tuple[int, int, str]:
    """Return (cohort size, number of clients that may be sampled, kind of sampling)."""
    own = schedule.sample_cohort is not None or (
        clients.times is not None and clients.times.chooses
    )
    return schedule.cohort_size, clients.num_available, OTHER if own else schedule.sampling
