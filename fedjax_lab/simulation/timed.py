"""A run's clients with the time that a method's rounds take them."""

import copy
import dataclasses
from typing import Any

from fedjax_lab.data import ClientTimes, FederatedArrays, FederatedStream
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.fingerprint import hash_arrays
from fedjax_lab.types import Params


def with_times(
    clients: Any, times: ClientTimes | None, algorithm: Algorithm, params: Params
) -> Any:
    """The clients with ``times``, in which the method's own messages travel.

    Args:
      clients: the clients' data, on the device or a stream.
      times: as of ``simulate``; None leaves the clients as they are.
      algorithm: the method, which knows how many bytes a client sends and receives.
      params: the server model, or its shapes.

    Raises:
      TypeError: ``times`` is no ``ClientTimes``.
      ValueError: an array is of another N, or an asynchronous method is to wait for a cohort.
    """
    if times is None:
        return clients
    if not isinstance(times, ClientTimes):
        raise TypeError(f"times is {type(times).__name__}; it must be a data.ClientTimes.")
    waits = times.over_selection > 1 or times.deadline is not None
    if waits and "buffered" in algorithm.wrappers:
        raise ValueError(
            f"times have over_selection {times.over_selection:g} and deadline {times.deadline}; "
            f"the server of {algorithm.name} waits for no cohort: leave both out."
        )
    if isinstance(clients, FederatedStream):
        timed = copy.copy(clients)
        timed.index = with_times(clients.index, times, algorithm, params)
        return timed
    up, down = algorithm.uplink(params), algorithm.downlink(params)
    return dataclasses.replace(clients, times=times.resolve(clients.num_clients, up, down))


def record_times(clients: FederatedArrays) -> dict[str, Any]:
    """What config.json says of the clients' time; nothing, where it is not counted.

    Args:
      clients: what ``with_times`` returned.
    """
    if clients.times is None:
        return {}
    names = ("over_selection", "deadline", "rounds_per_period")
    policy = {name: getattr(clients.times, name) for name in names}
    return {"times": {**policy, "arrays": hash_arrays(clients.times)}}
