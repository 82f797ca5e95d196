"""What is computed: the arguments that ``simulate``, ``sweep``, ``tune`` and ``plan`` share."""

from typing import Any

from fedjax_lab.data import ClientTimes
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.data.streams import AnyClients
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.client_data import with_times, without_examples
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.going_on import going_on_from, params_of
from fedjax_lab.simulation.host_store import with_all_rows
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.types import FedState, Params
from fedjax_lab.wrappers.ledger import key_of


def computation_of(
    algorithm: Algorithm,
    params: Params | None,
    clients: AnyClients,
    given: Schedule,
    times: ClientTimes | None,
    *,
    seed: int = 0,
    state: FedState | None = None,
    **settings: Any,
) -> tuple[Computation, AnyClients]:
    """Return (the computation, the clients' data with their arrays and times).

    Args:
      params: the initial global model, or its shapes; None with ``state``.
      given: the schedule; its arrays become a part of the clients' data.
      times: as in ``simulate``.
      state: as in ``simulate``; all processes call this function.
      **settings: further fields of ``Computation``.

    Raises:
      TypeError, ValueError: an argument is wrong, or ``state`` cannot be continued.
    """
    processes = Processes.here()
    schedule, clients = given.bind(clients)
    if state is None:
        model = processes.local(params)
    else:
        state = with_all_rows(state)
        model = params_of(algorithm, state)
    run = Computation(algorithm, schedule, key=key_of(seed, state), params=model, **settings)
    clients = with_times(clients, times, algorithm, model)
    if state is not None:
        state = processes.gathered(state, everywhere=True)
        run = going_on_from(state, run, without_examples(clients, schedule, run.eval_every))
    return run, clients
