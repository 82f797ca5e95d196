"""Clipped and noised gradients of examples, against closed forms of a linear model in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import algorithms
from fedjax_lab.clients.local import Gradient, Step
from fedjax_lab.types import ClientBatch
from tests.federations import batch_of

D = 5


def loss_fn(params, examples, key):
    residual = examples["x"] @ params["w"] + params["b"] - examples["y"]
    return 0.5 * residual**2, {"size": jnp.abs(residual), "two": jnp.asarray(2.0)}


def of_numpy(w, b, x, y, clip):
    """Sum of the clipped gradients [D + 1], by the closed form (x w + b - y) (x, 1)."""
    each = (x @ w + b - y)[:, None] * np.concatenate([x, np.ones((len(x), 1))], 1)
    norms = np.linalg.norm(each, axis=1, keepdims=True)
    return (each * np.minimum(1, clip / norms)).sum(0)


def drawn(size, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, D)), rng.normal(size=size), rng.normal(size=D)


def as_step(x, y, mask=None, seed=0):
    examples = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}
    return Step(examples, mask, jax.random.key(seed), (), ())


def flat(tree):
    return np.concatenate([np.asarray(tree["w"]), np.atleast_1d(np.asarray(tree["b"]))])


def test_each_example_counts_for_no_more_than_the_clip():
    """Some are shortened and some are not; what is masked counts for nothing, whatever it is."""
    x, y, w = drawn(8)
    x[:4] *= 0.1
    params = {"w": jnp.asarray(w, jnp.float32), "b": jnp.float32(0.3)}
    mask = np.arange(8) % 3 != 2
    x[2], y[5] = np.inf, 1e30
    gradient = jax.jit(Gradient(loss_fn, example_clip=0.8).raw)
    got, report = gradient(params, as_step(x, y, jnp.asarray(mask)))
    real = x[mask], y[mask]
    np.testing.assert_allclose(flat(got), of_numpy(w, 0.3, *real, 0.8) / mask.sum(), rtol=1e-5)
    residual = real[0] @ w + 0.3 - real[1]
    assert report.loss == pytest.approx(0.5 * np.mean(residual**2), rel=1e-5)
    assert report.num_examples == mask.sum()
    assert report.metrics["two"] == pytest.approx(2.0)
    assert report.example_metrics["size"] == pytest.approx(np.abs(residual).mean(), rel=1e-5)


def test_an_example_that_is_not_finite_adds_nothing():
    """It would take the whole client out of the round, and so be seen."""
    x, y, w = drawn(6)
    x[1, 2], y[3], y[4] = np.inf, np.nan, 1e30
    params = {"w": jnp.asarray(w, jnp.float32), "b": jnp.float32(0.3)}
    got, report = jax.jit(Gradient(loss_fn, example_clip=0.8).raw)(params, as_step(x, y))
    fine = [0, 2, 5]
    np.testing.assert_allclose(flat(got), of_numpy(w, 0.3, x[fine], y[fine], 0.8) / 6, rtol=1e-5)
    assert not np.isfinite(report.loss)  # which is for who watches, and says so


def test_the_noise_on_the_sum():
    """Its deviation is noise times clip in each number, and keys draw it anew."""
    x, y, w = drawn(4)
    params = {"w": jnp.asarray(w, jnp.float32), "b": jnp.float32(0.3)}
    gradient = Gradient(loss_fn, example_clip=0.5, example_noise=1.3)

    def one(seed):
        step = as_step(x, y)._replace(key=jax.random.key(seed))
        return gradient.raw(params, step)[0]

    got = jax.jit(jax.vmap(one))(jnp.arange(2000))
    noise = np.concatenate([np.asarray(got["w"]), np.asarray(got["b"])[:, None]], 1) * 4
    noise -= of_numpy(w, 0.3, x, y, 0.5)
    assert noise.std() == pytest.approx(1.3 * 0.5, rel=0.02)
    assert stats.kstest(noise.ravel() / 0.65, "norm").pvalue > 1e-4
    assert np.abs(np.corrcoef(noise.T)[np.triu_indices(D + 1, 1)]).max() < 0.12


def test_a_round_of_local_steps():
    """FedAvg with two clients and two steps, one of them short, against NumPy."""
    x, y, w = drawn(2 * 2 * 3, seed=1)
    x, y = x.reshape(2, 2, 3, D), y.reshape(2, 2, 3)
    mask = np.ones((2, 2, 3), bool)
    mask[1, 1, 1:] = False
    examples = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}
    batch = batch_of(examples, example_mask=jnp.asarray(mask))
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.3, example_clip=0.4)
    start = {"w": jnp.asarray(w, jnp.float32), "b": jnp.float32(0.0)}
    state, _ = jax.jit(algorithm.round_fn)(algorithm.init(start, 2), batch)
    ends = []
    for client in range(2):
        at = np.concatenate([w, [0.0]])
        for step in range(2):
            real = mask[client, step]
            examples = x[client, step][real], y[client, step][real]
            at = at - 0.3 * of_numpy(at[:D], at[D], *examples, 0.4) / real.sum()
        ends.append(at)
    np.testing.assert_allclose(flat(algorithm.params(state)), np.mean(ends, 0), rtol=1e-5)


def test_a_full_gradient_has_each_example_once_under_its_noise():
    """Another example moves the noised sum by two clips at most, however often steps draw it."""
    x, y, _ = drawn(6)
    held, mask = jnp.asarray([0, 1, 2, 3, 0]), jnp.asarray([True] * 4 + [False])
    batch = ClientBatch(
        examples=jnp.tile(jnp.asarray([[0, 3], [1, 3]]), (4, 1)),
        example_mask=None,
        step_mask=None,
        num_steps=jnp.int32(8),
        key=jax.random.key(0),
        round=jnp.int32(0),
        full_examples=held,
        full_mask=mask,
        source=None,
    )
    full = jax.jit(Gradient(loss_fn, example_clip=0.4, example_noise=1.0).full)
    params, got = {"w": jnp.ones(D), "b": jnp.float32(0.0)}, []
    for sign in (1, -1):
        x[3], y[3] = 9.0, sign * 1e3
        got.append(flat(full(params, batch._replace(source=as_step(x, y).examples))))
    assert 4 * np.linalg.norm(got[0] - got[1]) == pytest.approx(2 * 0.4, rel=1e-4)


WITH_FULL_GRADIENTS = {
    "fedmo": {"control_update": "I"},
    "fedmoswa": {"control_update": "I"},
    "mimelite": {"momentum": 0.5},
    "scaffold": {"control_update": "I"},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("fed")) for n in WITH_FULL_GRADIENTS],
)
def test_the_rounds_examples_do_not_stand_in_under_noise(name):
    """There an example comes once for each pass; without noise that is nobody's harm."""
    x, y, _ = drawn(6)
    indices = jnp.tile(jnp.asarray([[0, 1], [2, 0]]), (2, 2, 1))
    batch = batch_of(indices, source=as_step(x, y).examples)
    everything = {"full_examples": jnp.arange(6).reshape(2, 3), "full_mask": jnp.ones((2, 3), bool)}
    params = {"w": jnp.ones(D), "b": jnp.float32(0.0)}

    def trace(batch, **options):
        make = getattr(algorithms, name)
        algorithm = make(loss_fn, client_lr=0.1, **WITH_FULL_GRADIENTS[name], **options)
        jax.eval_shape(lambda batch: algorithm.round_fn(algorithm.init(params, 2), batch), batch)

    with pytest.raises(
        ValueError, match=r"example_noise is 1\.0, but the batch has no full_examples\. .* pass"
    ):
        trace(batch, example_clip=0.4, example_noise=1.0)
    trace(batch._replace(**everything), example_clip=0.4, example_noise=1.0)
    trace(batch, example_clip=0.4)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"example_noise is 1\.0; give example_clip with it"):
        algorithms.fedavg(loss_fn, client_lr=0.1, example_noise=1.0)
    with pytest.raises(ValueError, match="example_clip is 0; it must be finite and greater than 0"):
        algorithms.fedavg(loss_fn, client_lr=0.1, example_clip=0)
    with pytest.raises(ValueError, match="fedsam takes 2 gradients in a step with one key"):
        algorithms.fedsam(
            loss_fn, client_lr=0.1, perturbation_radius=0.1, example_clip=1.0, example_noise=1.0
        )
    made = algorithms.scaffold(loss_fn, client_lr=0.1, example_clip=1.0, example_noise=0.5)
    assert made.hyperparameters["example_noise"] == 0.5
    assert "example_clip" not in algorithms.scaffold(loss_fn, client_lr=0.1).hyperparameters


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_no_example_counts_for_more_than_the_clip_in_few_bits(dtype):
    """Over 61 leaves; in float16 the sum of the first one's squares is beyond the range."""
    values = [200.0, *[3.0] * 60] if dtype == jnp.float16 else [1.0, *[0.1] * 60]
    like = [jnp.full(5000, value, dtype) for value in values]

    def of_all(params, examples, key):
        return sum((a * b).sum() for a, b in zip(params, like, strict=True))[None].astype(float)

    params = [jnp.zeros(5000, dtype) for _ in like]
    gradient = jax.jit(Gradient(of_all, example_clip=0.5).raw)
    got, _ = gradient(params, Step(jnp.ones((1, 1)), None, jax.random.key(0), (), ()))
    assert {leaf.dtype for leaf in got} == {jnp.dtype(dtype)}
    assert np.sqrt(sum(np.square(np.float64(leaf)).sum() for leaf in got)) == pytest.approx(
        0.5, rel=4e-3
    )
