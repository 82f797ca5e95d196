"""The twins' softmax regression, as the library sees it: a loss in JAX and padded batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_lab import CohortBatch, algorithms, build_round
from tests.federations import batch_of
from tests.reference import problem as reference

CLIENT_MAPS = ("vmap", "scan", "chunk:2", "pmap", "shard_map")


def loss_fn(params, examples, key):
    del key
    logits = examples["x"] @ params["W"] + params["b"][None, :]
    return optax.softmax_cross_entropy_with_integer_labels(logits, examples["y"])


def initial_params():
    weights, bias = reference.unpack(reference.initial_point())
    return {"W": jnp.asarray(weights), "b": jnp.asarray(bias)}


def flat(params):
    return reference.pack(np.asarray(params["W"]), np.asarray(params["b"]))


def to_batch(padded, t):
    """One round of ``reference.make_rounds`` as a ``CohortBatch``.

    ``jax.device_put`` compiles nothing, where ``jnp.asarray`` compiles a program for each shape.
    """
    full = "full_x" in padded
    return CohortBatch(
        client_ids=jax.device_put(padded["client_ids"]),
        examples={"x": jax.device_put(padded["x"]), "y": jax.device_put(padded["y"])},
        key=jax.random.fold_in(jax.random.key(1), t),
        round=jax.device_put(np.int32(t)),
        full_examples={"x": jax.device_put(padded["full_x"]), "y": jax.device_put(padded["full_y"])}
        if full
        else None,
        full_mask=jax.device_put(padded["full_mask"]) if full else None,
        example_mask=jax.device_put(padded["example_mask"]),
        num_steps=jax.device_put(padded["num_steps"]),
        weights=jax.device_put(padded["weights"]),
        participates=jax.device_put(padded["participates"]),
    )


def stack_rounds(drawn):
    """All rounds' batches with a leading axis of rounds, to be scanned."""
    batches = [to_batch(padded, t) for t, (_, padded) in enumerate(drawn)]

    def stack(*leaves):
        if jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
            return jnp.stack(leaves)
        return jax.device_put(np.stack(leaves))

    return jax.tree.map(stack, *batches)


def drawn(count=3, seed=3, has_weights=True, **options):
    """Batches of ``reference.make_rounds``."""
    options = {"cohort_size": 4, "max_steps": 3, "batch_size": 4, **options}
    made = reference.make_rounds(seed, count, **options)
    batches = [to_batch(padded, t) for t, (_, padded) in enumerate(made)]
    return batches if has_weights else [batch._replace(weights=None) for batch in batches]


def finish(algorithm, batches, client_map="vmap"):
    """(state after all rounds, metrics of the last one)."""
    init = jax.jit(lambda params, batch: algorithm.init(params, reference.NUM_CLIENTS, batch))
    state = init(initial_params(), batches[0])
    round_fn = jax.jit(build_round(algorithm, client_map))
    for batch in batches:
        state, metrics = round_fn(state, batch)
    return state, metrics


def assert_is_fedavg_after_one_step(algorithm, state, drawn, atol):
    """From ``state``, which is one gradient step of rate 0.2 from ``initial_params``."""
    x_1, x_0 = algorithm.params(state), flat(initial_params())
    examples = [client.round_examples() for client in drawn[0][0]]
    m_0 = np.mean([reference.gradient(x_0, e) for e in examples], axis=0)
    np.testing.assert_allclose(flat(x_1), x_0 - 0.2 * m_0, rtol=0, atol=atol)
    fedavg = algorithms.fedavg(loss_fn, client_lr=0.2)
    state, _ = run_rounds(algorithm.round_fn, state, drawn)
    expected, _ = run_rounds(fedavg.round_fn, fedavg.init(x_1, reference.NUM_CLIENTS), drawn)
    ours, theirs = flat(algorithm.params(state)), flat(fedavg.params(expected))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def toy_loss(y, examples, key):
    """The quadratics 1/2 sum of a (y - b)^2 of the twins' toy problem."""
    del key
    a, b = examples
    return 0.5 * (a * jnp.square(y[None, :] - b)).sum(-1)


def toy_round(t, cohort, steps=3):
    """One round of the toy: each client's one example in every step."""

    def examples(table):
        rows = jnp.asarray(table)[jnp.asarray(cohort)]
        return jnp.tile(rows[:, None, None, :], (1, steps, 1, 1))

    return batch_of((examples(reference.TOY_A), examples(reference.TOY_B)), t, ids=cohort)


def toy_path(algorithm, cohorts, state=None):
    """x after each round of the toy, [rounds, 2]."""
    state = algorithm.init(jnp.asarray(reference.TOY_X0), 4) if state is None else state
    path, round_fn = [], jax.jit(algorithm.round_fn)
    for t, cohort in enumerate(cohorts):
        state, _ = round_fn(state, toy_round(t, cohort))
        path.append(np.asarray(algorithm.params(state)))
    return np.array(path)


def run_rounds(round_fn, state, drawn):
    """All rounds one by one, so that one round is compiled; returns (state, stacked metrics)."""
    round_fn, rows = jax.jit(round_fn), []
    for t, (_, padded) in enumerate(drawn):
        state, metrics = round_fn(state, to_batch(padded, t))
        rows.append(metrics)
    return state, jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
