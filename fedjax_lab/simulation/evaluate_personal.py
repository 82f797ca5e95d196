"""Evaluation of models of which each client has its own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_int
from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.streams import check_resident
from fedjax_lab.simulation.evaluate import CountFn
from fedjax_lab.types import FedState, Params


def build_personal_evaluation(
    count_fn: CountFn,
    model_of: Callable[[FedState, jax.Array], Params],
    clients: FederatedArrays,
    batch_size: int = 1000,
) -> Callable[[FedState], jax.Array]:
    """Build ``evaluate(state) -> accuracy [N]``: each client's own model on its own examples.

    A client without data gets NaN. The clients are evaluated one after the other.

    Args:
      count_fn: (params, examples [B, ...]) -> (correct [B], losses [B]), such as
        ``fedjax_lab.models.accuracy_counts`` returns.
      model_of: (state, int32 id) -> that client's params, traced: with personal leaves
        ``functools.partial(client_params, algorithm)``, or a few steps of fine-tuning.
      clients: the data; clients in the order of the state's rows, such as held-out parts of the
        training clients' own data.
      batch_size: most examples of an evaluation's step.

    Raises:
      ValueError: ``batch_size`` is below 1.
      TypeError: ``clients`` is a stream.
    """
    check_resident(clients, "build_personal_evaluation")
    check_int("batch_size", batch_size, minimum=1)
    largest = max(1, clients.max_size)
    size = min(batch_size, largest)
    places = jnp.arange(-(-largest // size) * size).reshape(-1, size)

    def of_client(state, clients, client_id):
        params = model_of(state, client_id)
        start, held = clients.starts[client_id], clients.sizes[client_id]

        def one_batch(places):
            rows = clients.indices[start + jnp.minimum(places, held - 1)]
            correct, _ = count_fn(params, jax.tree.map(lambda leaf: leaf[rows], clients.examples))
            return jnp.where(places < held, correct, 0).sum()

        return jax.lax.map(one_batch, places).sum() / held  # 0/0 is NaN: no data, no accuracy

    @jax.jit
    def all_clients(state, clients):
        ids = jnp.arange(clients.num_clients)
        return jax.lax.map(lambda client_id: of_client(state, clients, client_id), ids)

    return lambda state: all_clients(state, clients)
