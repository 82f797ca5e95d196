"""How far control variates are from the gradients they stand for, by ``diagnose=``.

python -m fedjax_lab.recipes.control_error
"""

import jax
import jax.numpy as jnp

from fedjax_lab import algorithms, data, models, simulate, tree


def build_control_error(loss_fn, clients, batch_size=500):
    """Build ``diagnose(state)``: errors of the control variates of SCAFFOLD, FedMoSWA or FedMo.

    With f_i the mean loss of client i over its own data, c_i its control variate, c the server's (m
    in FedMoSWA), and all means over the clients that have data:

    - ``control_error``: mean of ||c_i - ∇f_i(x)||² (the error Ξ of FedMoSWA's analysis, at x);
    - ``server_control_error``: ||c - mean of ∇f_i(x)||²;
    - ``gradient_dissimilarity``: mean of ||∇f_i(x)||², the error of c_i = 0.

    Args:
      loss_fn: (params, examples [B, ...], key) -> losses [B], called with one fixed key.
      clients: the clients' data, on the device.
      batch_size: examples that are differentiated at once.
    """

    def total_loss(params, batch, real):
        losses = loss_fn(params, batch, jax.random.key(0))
        losses = losses[0] if isinstance(losses, tuple) else losses  # without its metrics
        return jnp.where(real, losses, 0).sum()

    def full_gradient(params, clients, client_id):
        start, count = clients.starts[client_id], clients.sizes[client_id]

        def add(gradients, rows):
            real = rows < count
            places = clients.indices[start + jnp.where(real, rows, 0)]
            batch = jax.tree.map(lambda leaf: leaf[places], clients.examples)
            return tree.add(gradients, jax.grad(total_loss)(params, batch, real)), None

        size = min(batch_size, clients.max_size)
        rows = jnp.arange(-(-clients.max_size // size) * size).reshape(-1, size)
        return tree.scale(jax.lax.scan(add, tree.zeros_like(params), rows)[0], 1 / count)

    @jax.jit
    def errors(params, control, controls, clients):
        ids = jnp.flatnonzero(clients.sizes > 0, size=clients.num_available)

        def one_client(mean, client_id):
            gradient = full_gradient(params, clients, client_id)
            own = jax.tree.map(lambda rows: rows[client_id], controls)
            error = tree.norm(tree.subtract(own, gradient), squared=True)
            mean = tree.add_scaled(mean, 1 / len(ids), gradient)
            return mean, (error, tree.norm(gradient, squared=True))

        mean, (of_clients, squares) = jax.lax.scan(one_client, tree.zeros_like(params), ids)
        return {
            "control_error": of_clients.mean(),
            "server_control_error": tree.norm(tree.subtract(control, mean), squared=True),
            "gradient_dissimilarity": squares.mean(),
        }

    return lambda state: errors(state.server.params, state.server.control, state.clients, clients)


def main():
    """Train with SCAFFOLD, and print the errors of each evaluation."""
    train, _ = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    model = models.linear(10)
    params = model.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(model.apply, data.preprocess(scale=16))
    algorithm = algorithms.scaffold(loss_fn, client_lr=0.1)
    result = simulate(
        algorithm, params, clients, rounds=30, cohort_size=5, local_steps=5, batch_size=16,
        diagnose=build_control_error(loss_fn, clients),
    )  # fmt: skip
    for row in result.history:
        error, without = row["control_error"], row["gradient_dissimilarity"]
        print(f"round {row['round']}: error {error:.2f}; without control variates {without:.2f}")


if __name__ == "__main__":
    main()
