"""Every block of docs/your_own_model.md runs as printed and keeps the contract it states."""

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data
from tests.federations import batch_of
from tests.tiers import few

DOC = Path(__file__).parents[2] / "docs" / "your_own_model.md"
NORM = "Dropout and BatchNorm in any library"
FRAMEWORKS = ["Plain JAX", "Flax linen", "Flax NNX", "Equinox", NORM, "With the library's helpers"]
INSIDE = "Methods that look inside"
MASK = "A loss that compares examples"
STATISTICS = "Statistics over a mini-batch"
MAX_LINES = 15  # of code


def read_blocks() -> dict[str, tuple[int, str]]:
    """Heading -> (first line, source) of the fenced Python block under it, one each."""
    found: dict[str, tuple[int, str]] = {}
    text = DOC.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        before = text[: match.start()]
        heading = re.findall(r"^#+ (.*)$", before, re.M)[-1]
        assert heading not in found, f"two blocks under {heading!r}"
        found[heading] = (before.count("\n") + 1, match[1])
    return found


BLOCKS = read_blocks()


def execute(heading: str, namespace: dict[str, Any]) -> None:
    line, source = BLOCKS[heading]
    exec(compile("\n" * line + source, str(DOC), "exec"), namespace)


@functools.cache
def execute_example(heading: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "own_model_example"}
    execute("Your own model", namespace)
    execute(heading, namespace)
    return namespace


@pytest.fixture(params=few(2, FRAMEWORKS))
def namespace(request) -> dict[str, Any]:
    """What the shared block and one example define; the example runs once for all tests."""
    if request.param in ("Equinox", NORM) and importlib.util.find_spec("equinox") is None:
        pytest.skip("equinox is not installed (extra [test])")
    return dict(execute_example(request.param))


def test_every_block_is_tested():
    assert set(BLOCKS) == {"Your own model", MASK, STATISTICS, *FRAMEWORKS, INSIDE, "Run it"}


@pytest.mark.parametrize("heading", FRAMEWORKS)
def test_examples_are_short(heading):
    code = [line for line in BLOCKS[heading][1].splitlines() if line.strip()]
    assert len(code) <= MAX_LINES


@pytest.mark.methods
def test_a_loss_with_batch_norm_passes_its_mask_on():
    """What stands under masked places does not matter."""
    namespace = execute_example(STATISTICS)
    model, loss = namespace["model"], namespace["smooth_loss"]
    x = np.random.default_rng(0).integers(0, 17, (4, 8, 8, 1), np.uint8)
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(x, jnp.float32))
    mask = jnp.array([True, True, True, False])
    y, key = jnp.zeros(4, jnp.int32), jax.random.key(1)
    other = np.where(np.arange(4).reshape(4, 1, 1, 1) == 3, 16 - x, x)
    losses = [loss(params, data.Examples(jnp.asarray(at), y), key, mask)[:3] for at in (x, other)]
    np.testing.assert_array_equal(*losses)
    unmasked = loss(params, data.Examples(jnp.asarray(other), y), key)[:3]
    assert not np.allclose(losses[0], unmasked)


@pytest.mark.methods
def test_batch_norm_in_equinox_trains_by_the_mini_batch_and_evaluates_by_running_statistics():
    pytest.importorskip("equinox")
    namespace = execute_example(NORM)
    apply, params = namespace["apply"], namespace["params"]
    x = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    first, last = params["first"], params["last"]
    h = x @ np.asarray(first.weight).T + np.asarray(first.bias)

    def logits_of(h):
        return np.maximum(h, 0) @ np.asarray(last.weight).T + np.asarray(last.bias)

    expected = logits_of(h / np.sqrt(1 + 1e-5))
    np.testing.assert_allclose(apply(params, x), expected, atol=1e-5)
    real, key = jnp.arange(6) < 4, jax.random.key(1)
    gradient = jax.grad(lambda p: apply(p, x, key, mask=real)[:4].sum())(params)["norm"]
    np.testing.assert_allclose(-gradient["running_mean"], h[:4].mean(0), atol=1e-5)
    np.testing.assert_allclose(1 - gradient["running_var"], h[:4].var(0, ddof=1), atol=1e-5)


def test_the_parts_of_a_model_make_the_whole_and_a_round():
    namespace = execute_example(INSIDE)
    model, params, algorithm = (namespace[name] for name in ("model", "params", "algorithm"))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32)
    h, key = x, jax.random.key(1)
    for block in model.blocks:
        h = block(params, h, key)
    parts = model.head(params, model.features(params, x, key), key)
    for logits in (h, parts):
        np.testing.assert_array_equal(logits, model.apply(params, x, key))
    images = jnp.zeros((2, 3, 4, 8, 8, 1), jnp.uint8)
    batch = batch_of(data.Examples(images, jnp.zeros((2, 3, 4), int)))
    state, _ = jax.eval_shape(algorithm.round_fn, algorithm.init(params, 5), batch)  # traced only
    assert jax.tree.structure(algorithm.params(state)) == jax.tree.structure(params)


def test_example_keeps_the_contract(namespace):
    loss_fn, params = namespace["loss_fn"], namespace["params"]
    rng = np.random.default_rng(0)
    examples = data.Examples(
        jnp.asarray(rng.integers(0, 17, (6, 8, 8, 1)), jnp.uint8),
        jnp.asarray(rng.integers(0, 10, 6), jnp.int32),
    )

    leaves = jax.tree.leaves(params)
    assert leaves
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in leaves)

    def mean_loss(params, key):
        losses = loss_fn(params, examples, key)
        return losses.mean(), losses

    def step(params, key):
        gradient, losses = jax.grad(mean_loss, has_aux=True)(params, key)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient), losses

    # Structure is kept, so a run can be scanned; 20 steps learn six examples.
    keys = jax.random.split(jax.random.key(1), 20)
    trained, losses = jax.lax.scan(step, params, keys)
    losses = np.asarray(losses)
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    assert losses.shape == (20, 6)
    assert losses.dtype == jnp.float32
    assert np.isfinite(losses).all()
    assert losses[-1].mean() < 0.8 * losses[0].mean()

    # A loss is that example's own: a change of one leaves the others alone.
    changed = examples._replace(y=examples.y.at[0].set((examples.y[0] + 1) % 10))
    loss_fn = jax.jit(loss_fn)
    before, after = (np.asarray(loss_fn(params, e, keys[0])) for e in (examples, changed))
    assert before[0] != after[0]
    np.testing.assert_array_equal(before[1:], after[1:])


@pytest.mark.example
def test_example_runs_end_to_end(namespace, capsys):
    import fedjax_lab

    if not hasattr(fedjax_lab, "simulate"):
        pytest.skip("fedjax_lab.simulate does not exist yet")
    execute("Run it", namespace)
    params, trained = namespace["params"], namespace["trained"]
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trained))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), params, trained)
    assert any(jax.tree.leaves(moved))
    assert capsys.readouterr().out.strip()


def test_a_loss_with_a_mask_leaves_padding_out():
    namespace = dict(execute_example(MASK))
    x, params = np.random.default_rng(0).integers(0, 17, (4, 8, 8)), {"w": jnp.ones(64)}
    examples = data.Examples(jnp.asarray(x), jnp.zeros(4, jnp.int32))
    mask = jnp.array([True, True, True, False])
    losses = namespace["centred_loss"](params, examples, None, mask)
    outputs = x.reshape(4, 64).sum(1)[:3] / 16
    np.testing.assert_allclose(losses[:3], (outputs - outputs.mean()) ** 2, rtol=1e-4)
