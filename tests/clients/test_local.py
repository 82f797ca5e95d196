"""What one client does with its mini-batches."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedjax_lab import CohortBatch, algorithms, build_round
from fedjax_lab.clients.local import Gradient, Step


def test_an_infinite_loss_of_a_masked_example_is_left_out():
    """0 times infinity is no number: what is masked must be left out, not multiplied by 0."""

    def loss_fn(params, examples, key):
        return params * examples["x"] + examples["penalty"]

    examples = {"x": jnp.array([1.0, 2.0, 3.0]), "penalty": jnp.array([0.0, jnp.inf, 4.0])}
    step = Step(examples, jnp.array([True, False, True]), jax.random.key(0), (), ())
    gradient, report = jax.jit(Gradient(loss_fn).raw)(jnp.float32(5.0), step)
    np.testing.assert_allclose(gradient, (1 + 3) / 2)
    np.testing.assert_allclose(report.loss, (5 + 15 + 4) / 2)
    assert report.num_examples == 2


def _shapes(jaxpr):
    """The shapes of all values of a traced program, inner ones included."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: isinstance(v, (ClosedJaxpr, Jaxpr))
        ):
            if isinstance(inner, (ClosedJaxpr, Jaxpr)):
                yield from _shapes(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def test_no_client_has_a_copy_of_the_source_under_vmap():
    """Clients with unequal numbers of steps: a batched choice would copy all that it reads."""
    slots, steps, size, source = 3, 4, 2, jnp.arange(77.0)[:, None]
    algorithm = algorithms.fedavg(lambda w, x, key: (w - x[:, 0]) ** 2, client_lr=0.1)
    batch = CohortBatch(
        client_ids=jnp.arange(slots),
        examples=jnp.zeros((slots, steps, size), jnp.int32),
        key=jax.random.key(0),
        round=jnp.int32(0),
        num_steps=jnp.array([1, 2, 4]),
        source=source,
    )
    state = algorithm.init(jnp.float32(1.0), num_clients=slots)
    traced = jax.make_jaxpr(build_round(algorithm, "vmap"))(state, batch)
    found = set(_shapes(traced.jaxpr))
    assert (slots, size, 1) in found  # the examples of one step
    assert not [shape for shape in found if shape[:2] == (slots, len(source))]
