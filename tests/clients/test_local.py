"""What one client does with its mini-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedjax_lab import algorithms, build_round
from fedjax_lab.clients.local import Gradient, Step
from tests.federations import batch_of


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
    indices, num_steps = jnp.zeros((slots, steps, size), jnp.int32), jnp.array([1, 2, 4])
    batch = batch_of(indices, num_steps=num_steps, source=source)
    state = algorithm.init(jnp.float32(1.0), num_clients=slots)
    traced = jax.make_jaxpr(build_round(algorithm, "vmap"))(state, batch)
    found = set(_shapes(traced.jaxpr))
    assert (slots, size, 1) in found  # the examples of one step
    assert not [shape for shape in found if shape[:2] == (slots, len(source))]


@pytest.mark.parametrize("client_map", ["scan", "vmap", "chunk:2", "shard_map:2"])
@pytest.mark.parametrize("steps", [16, 19])
def test_many_steps_of_which_most_are_skipped(client_map, steps):
    """Steps are skipped in blocks: against a loop of NumPy, with steps without examples between."""
    rng = np.random.default_rng(steps)
    num_steps = np.array([0, 1, 5, steps - 1, steps])
    x = rng.normal(size=(5, steps, 2))
    mask = rng.random((5, steps, 2)) < 0.6
    mask[:, 0] = True
    mask[3, 5:10] = False  # a block whose steps have no examples
    lr, losses, ends = 0.1, [], []
    for client in range(5):
        w = 1.0
        for k in range(num_steps[client]):
            held = x[client, k, mask[client, k]]
            if held.size:
                losses.extend((w - held) ** 2)
                w -= lr * 2 * (w - held).mean()
        ends.append(w)
    algorithm = algorithms.fedavg(lambda w, x, key: (w - x) ** 2, client_lr=lr)
    with jax.enable_x64(True):
        masks = {"example_mask": jnp.asarray(mask), "num_steps": jnp.asarray(num_steps)}
        batch = batch_of(jnp.asarray(x), **masks)
        round_fn = build_round(algorithm, client_map)

        def after(w):
            state, metrics = round_fn(algorithm.init(w, num_clients=5), batch)
            return algorithm.params(state), metrics

        (end, metrics), slope = jax.value_and_grad(after, has_aux=True)(jnp.float64(1.0))
        np.testing.assert_allclose(end, np.mean(ends[1:]), rtol=1e-12)
        np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-12)
        taken = [(mask[i, : num_steps[i]].any(-1)).sum() for i in range(1, 5)]
        np.testing.assert_allclose(metrics["local_steps"], np.mean(taken), rtol=1e-12)
        each = (1 - 2 * lr) ** np.array(taken)  # a step takes w - mean(x) to (1 - 2 lr) times it
        np.testing.assert_allclose(slope, each.mean(), rtol=1e-12)
