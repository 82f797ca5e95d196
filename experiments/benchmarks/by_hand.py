"""Rounds written by hand in plain JAX: how large a program a method's equations need.

``make bench-latency`` compiles them next to the library's rounds. They know nothing of client maps,
stragglers, weights, transforms, schedules, or clients that are not finite: a cohort of clients one
after the other, of which each takes all its steps, plain means, and one metric, the loss.

Each is ``method(loss_fn, num_clients, ...) -> (start, round)``: ``start(params)`` is a dict, and
``round(state, batch)`` is (state, loss) for a ``CohortBatch``, of which the client ids, the
examples, their mask and their source are read.
"""

import jax
import jax.numpy as jnp


def _map(function, *trees):
    return jax.tree.map(function, *trees)


def _minibatch_gradient(loss_fn, batch):
    """(params, mini-batch) -> (loss, gradient) of the mean loss over real examples."""

    def mean_loss(params, minibatch):
        examples, mask = minibatch
        if batch.source is not None:
            examples = _map(lambda leaf: leaf[examples], batch.source)
        losses = loss_fn(params, examples, batch.key)
        return losses.mean() if mask is None else jnp.where(mask, losses, 0).sum() / mask.sum()

    return jax.value_and_grad(mean_loss)


def _over_clients(client, batch, rows=()):
    """Run ``client(row, mini-batches) -> (message, new row, loss)`` for the cohort.

    Returns:
      (mean message, new rows [S, ...], mean loss)
    """

    def one(total, slot):
        message, row, loss = client(*slot)
        return _map(jnp.add, total, message), (row, loss)

    slots = (rows, (batch.examples, batch.example_mask))
    first = _map(lambda leaf: leaf[0], slots)
    like = jax.eval_shape(client, *first)[0]
    zeros = _map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    total, (rows, losses) = jax.lax.scan(one, zeros, slots)
    return _map(lambda leaf: leaf / batch.client_ids.size, total), rows, losses.mean()


def _take(table, batch):
    return _map(lambda leaf: leaf[batch.client_ids], table)


def _put(table, rows, batch):
    return _map(lambda leaf, new: leaf.at[batch.client_ids].set(new), table, rows)


def _rows(params, num_clients):
    return _map(lambda p: jnp.zeros((num_clients, *p.shape), p.dtype), params)


def _norm(tree):
    return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree)))


def fedavg(loss_fn, num_clients, *, client_lr):
    """McMahan et al., AISTATS 2017."""

    def round(state, batch):
        gradient, x = _minibatch_gradient(loss_fn, batch), state["params"]

        def client(_, minibatches):
            def step(y, minibatch):
                loss, g = gradient(y, minibatch)
                return _map(lambda y, g: y - client_lr * g, y, g), loss

            y, losses = jax.lax.scan(step, x, minibatches)
            return y, (), losses.mean()

        mean, _, loss = _over_clients(client, batch)
        return {"params": mean}, loss

    return lambda params: {"params": params}, round


def scaffold(loss_fn, num_clients, *, client_lr):
    """Karimireddy et al., ICML 2020, option II."""

    def round(state, batch):
        gradient, x, c = _minibatch_gradient(loss_fn, batch), state["params"], state["control"]

        def client(c_i, minibatches):
            def step(y, minibatch):
                loss, g = gradient(y, minibatch)
                return _map(lambda y, g, i, c: y - client_lr * (g - i + c), y, g, c_i, c), loss

            y, losses = jax.lax.scan(step, x, minibatches)
            scale = 1 / (losses.size * client_lr)
            new = _map(lambda i, c, x, y: i - c + scale * (x - y), c_i, c, x, y)
            change = _map(jnp.subtract, new, c_i)
            return (y, change), new, losses.mean()

        (mean, change), rows, loss = _over_clients(client, batch, _take(state["rows"], batch))
        share = batch.client_ids.size / num_clients
        control = _map(lambda c, d: c + share * d, c, change)
        return {"params": mean, "control": control, "rows": _put(state["rows"], rows, batch)}, loss

    def start(params):
        zeros = _map(jnp.zeros_like, params)
        return {"params": params, "control": zeros, "rows": _rows(params, num_clients)}

    return start, round


def fedspeed(loss_fn, num_clients, *, client_lr, prox_weight=0.1, perturbation_radius=0.1):
    """Sun et al., ICLR 2023, with a normalised perturbation of weight 1."""

    def round(state, batch):
        gradient, x = _minibatch_gradient(loss_fn, batch), state["params"]

        def client(c_i, minibatches):
            def step(y, minibatch):
                loss, g = gradient(y, minibatch)
                radius = perturbation_radius / _norm(g)
                _, g = gradient(_map(lambda y, g: y + radius * g, y, g), minibatch)

                def descend(y, g, c, x):
                    return y - client_lr * (g - c + prox_weight * (y - x))

                return _map(descend, y, g, c_i, x), loss

            y, losses = jax.lax.scan(step, x, minibatches)
            new = _map(lambda c, x, y: c + prox_weight * (x - y), c_i, x, y)
            return _map(lambda y, c: y - c / prox_weight, y, new), new, losses.mean()

        mean, rows, loss = _over_clients(client, batch, _take(state["rows"], batch))
        return {"params": mean, "rows": _put(state["rows"], rows, batch)}, loss

    return lambda params: {"params": params, "rows": _rows(params, num_clients)}, round


def fafed(loss_fn, num_clients, *, client_lr, momentum, second_moment_decay: float, stability=0.01):
    """Wu et al., AAAI 2023, after the first estimates, which ``start`` leaves at 0."""

    def preconditioned(m, v):
        return _map(lambda m, v: m / (jnp.sqrt(v) + stability), m, v)

    def average(v, g):
        return _map(lambda v, g: second_moment_decay * v + (1 - second_moment_decay) * g**2, v, g)

    def round(state, batch):
        gradient = _minibatch_gradient(loss_fn, batch)
        x, m, v = state["params"], state["momentum"], state["second_moment"]

        def client(previous, minibatches):
            steps = jax.tree.leaves(minibatches)[0].shape[0]

            def step(carry, xs):
                y, before, m_i, v_i = carry
                rate, minibatch = xs
                loss, g = gradient(y, minibatch)
                _, g_before = gradient(before, minibatch)
                m_i = _map(lambda g, m, b: g + (1 - momentum) * (m - b), g, m_i, g_before)
                descent = preconditioned(m_i, v)
                after = _map(lambda y, d: y - rate * d, y, descent)
                return (after, y, m_i, average(v_i, g)), loss

            rates = jnp.where(jnp.arange(steps) < steps - 1, client_lr, 0.0)  # the last: the sync
            carry, losses = jax.lax.scan(step, (x, previous, m, v), (rates, minibatches))
            y, _, m_i, v_i = carry
            return (y, m_i, v_i), y, losses.mean()

        (mean, m, v), rows, loss = _over_clients(client, batch, _take(state["rows"], batch))
        params = _map(lambda y, d: y - client_lr * d, mean, preconditioned(m, v))
        rows = _put(state["rows"], rows, batch)
        return {"params": params, "momentum": m, "second_moment": v, "rows": rows}, loss

    def start(params):
        zeros = _map(jnp.zeros_like, params)
        rows = _map(lambda p: jnp.broadcast_to(p, (num_clients, *p.shape)), params)
        return {"params": params, "momentum": zeros, "second_moment": zeros, "rows": rows}

    return start, round


def _project(p, rows):
    """The nearest vector to ``p`` without a negative inner product with a row (Hildreth)."""

    def products(leaf, other):
        return leaf.reshape(len(leaf), -1) @ other.reshape(-1, leaf[0].size).T

    gram = sum(jax.tree.leaves(_map(products, rows, rows)))
    length = jnp.sqrt(jnp.diagonal(gram))
    inverse = jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1), 0)
    gram = gram * inverse[:, None] * inverse[None]
    b = inverse * sum(jax.tree.leaves(_map(products, rows, p)))[:, 0]
    tolerance = 4 * jnp.finfo(b.dtype).eps * jnp.abs(b).max()

    def sweep(carry):
        z, _, count = carry

        def one(c, z):
            return z.at[c].set(jnp.maximum(z[c] - gram[c] @ z - b[c], 0))

        new = jax.lax.fori_loop(0, len(z), one, z)
        return new, jnp.abs(new - z).max(), count + 1

    def goes_on(carry):
        return (carry[1] > tolerance) & (carry[2] < 1000)

    start = jnp.zeros_like(b), jnp.full((), jnp.inf, b.dtype), 0
    z = inverse * jax.lax.while_loop(goes_on, sweep, start)[0]
    return _map(lambda p, row: p + jnp.tensordot(z, row, 1), p, rows)


def gradma(loss_fn, num_clients, *, client_lr, memory_size, server_momentum=0.9, memory_decay=0.5):
    """Luo et al., CVPR 2023, with a memory of all clients, so that nobody ever leaves it."""
    assert memory_size == num_clients

    def round(state, batch):
        gradient, x, ids = _minibatch_gradient(loss_fn, batch), state["params"], batch.client_ids

        def client(_, minibatches):
            def step(carry, minibatch):
                y, before = carry
                loss, g = gradient(y, minibatch)
                _, previous = gradient(before, minibatch)
                _, at_server = gradient(x, minibatch)
                moved = _map(jnp.subtract, y, x)
                rows = _map(lambda *leaves: jnp.stack(leaves), previous, at_server, moved)
                g = _project(g, rows)
                return (_map(lambda y, g: y - client_lr * g, y, g), y), loss

            (y, _), losses = jax.lax.scan(step, (x, x), minibatches)
            move = _map(jnp.subtract, x, y)
            return move, move, losses.mean()

        mean, moves, loss = _over_clients(client, batch)
        momentum = _map(lambda m, d: server_momentum * m + d, state["momentum"], mean)
        memory = _map(lambda D, d: (memory_decay * D).at[ids].add(d), state["memory"], moves)
        momentum = _project(momentum, memory)
        params = _map(jnp.subtract, x, momentum)
        return {"params": params, "momentum": momentum, "memory": memory}, loss

    def start(params):
        zeros = _map(jnp.zeros_like, params)
        return {"params": params, "momentum": zeros, "memory": _rows(params, num_clients)}

    return start, round
