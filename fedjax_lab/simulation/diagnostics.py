"""Diagnostics from papers that need a pass over all data.

Cheap diagnostics are metrics of the round: ``client_drift`` (mean ||x^i_K - x_t||²) of
all methods, ``message_sq``, ``change_sq`` and ``error_sq`` of compressed ones (CFedAvg, Figure
3), active constraints and KKT residual of GradMA.

Axes: N clients, n_i examples of client i.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.checks import check_int
from fedjax_lab.clients.metrics import apply_loss
from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.streams import check_resident
from fedjax_lab.machine.keys import seeded
from fedjax_lab.types import FedState, LossFn, Params, PyTree


def build_control_error(
    loss_fn: LossFn, clients: FederatedArrays, batch_size: int = 500
) -> Callable[[FedState], dict[str, jax.Array]]:
    """Build ``diagnose(state) -> scalars``: errors of control variates.

    For methods whose server state has ``params`` x and ``control`` c (m in FedMoSWA), and whose
    client rows are the c_i: SCAFFOLD, FedMoSWA, FedMo. With f_i the mean loss of client i
    over its own data, and all means over the clients that have data:

    - ``control_error``: mean of ||c_i - ∇f_i(x)||² (the error Ξ of FedMoSWA's analysis, at x);
    - ``server_control_error``: ||c - mean of ∇f_i(x)||²;
    - ``gradient_dissimilarity``: mean of ||∇f_i(x)||², the error of c_i = 0.

    Args:
      loss_fn: (params, examples [B, ...], key) -> per-example losses, float [B]; called with
        a fixed key.
      clients: the clients' data.
      batch_size: examples per step of the pass over the data.

    Raises:
      TypeError: ``clients`` is a stream.
      ValueError: ``batch_size`` is below 1; or the method has no such control variates (when
        ``diagnose`` is traced).
    """
    check_resident(clients, "build_control_error")
    size = min(check_int("batch_size", batch_size, minimum=1), clients.max_size)
    key = seeded(0)

    def full_gradient(params, clients, client_id):
        start, count = clients.starts[client_id], clients.sizes[client_id]

        def total_loss(params, rows):
            real = rows < count
            places = clients.indices[start + jnp.where(real, rows, 0)]
            batch = jax.tree.map(lambda e: e[places], clients.examples)
            losses, _ = apply_loss(loss_fn, params, batch, key, real)
            return jnp.where(real, losses, 0).sum() / jnp.maximum(count, 1)

        def add(grads, rows):
            return tree.add(grads, jax.grad(total_loss)(params, rows)), None

        rows = jnp.arange(-(-clients.max_size // size) * size).reshape(-1, size)
        return jax.lax.scan(add, tree.zeros_like(params), rows)[0]

    @jax.jit
    def run(params, control, controls, clients):
        ids = clients.nonempty
        ids = jnp.arange(clients.num_clients) if ids is None else ids

        def one_client(mean_gradient, client_id):
            gradient = full_gradient(params, clients, client_id)
            own = jax.tree.map(lambda rows: rows[client_id], controls)
            error = tree.norm(tree.subtract(own, gradient), squared=True)
            mean_gradient = tree.add_scaled(mean_gradient, 1 / ids.shape[0], gradient)
            return mean_gradient, (error, tree.norm(gradient, squared=True))

        mean_gradient, (errors, squares) = jax.lax.scan(one_client, tree.zeros_like(params), ids)
        return {
            "control_error": errors.mean(),
            "server_control_error": tree.norm(tree.subtract(control, mean_gradient), squared=True),
            "gradient_dissimilarity": squares.mean(),
        }

    def diagnose(state: FedState) -> dict[str, jax.Array]:
        params, control = _controls(state)
        return run(params, control, state.clients, clients)

    return diagnose


def _controls(state: FedState) -> tuple[Params, PyTree]:
    """Return (x, c) of the state, and check that its clients hold the c_i."""
    params = getattr(state.server, "params", None)
    control = getattr(state.server, "control", None)
    shapes = [jax.tree.map(jnp.shape, value) for value in (params, control)]
    rows = jax.tree.map(lambda leaf: jnp.shape(leaf)[1:], state.clients)
    if control is None or shapes != [rows, rows]:
        raise ValueError(
            f"the state's server is a {type(state.server).__name__}; control variates need the "
            "state of scaffold, fedmoswa or fedmo, uncompressed."
        )
    return params, control
