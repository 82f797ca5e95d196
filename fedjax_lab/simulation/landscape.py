"""How flat the loss is around a model: eigenvalues of its Hessian, and its surface on a plane.

Sharpness-aware methods and FedSWA argue with flat minima; these are the usual ways to see one.
The largest eigenvalue of the Hessian is the curvature in the sharpest direction. Loss surfaces
(FedSWA, ICML 2025, Figures 1 and 4) are those of Li, Xu, Taylor, Studer, Goldstein: Visualizing
the Loss Landscape of Neural Nets. NeurIPS 2018, Section 4: the loss on a plane through the model
that two random, filter-normalised directions span.

The loss is the mean over all examples, for any batch size. All functions call ``loss_fn`` with one
fixed key, so use a loss without dropout and augmentation, such as
``lambda p, e, key: accuracy_counts(model.apply)(p, e)[1]``. BatchNorm then uses its running
statistics; a training loss would normalise each batch separately, including its padding. Running
statistics are constants, not parameters.

Axes: n examples, B examples of a batch, d parameters, P points along a direction.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from fedjax_lab import tree
from fedjax_lab.checks import check_int, check_number
from fedjax_lab.clients.metrics import apply_loss
from fedjax_lab.machine.keys import seeded
from fedjax_lab.models.batch_norm import running_statistics
from fedjax_lab.types import LossFn, Params, PyTree

_MAX_RESTARTS = 100  # each with at least 20 products; far more than a Hessian needs


class Surface(NamedTuple):
    """The loss on a plane through a model.

    Attributes:
      offsets: float64 [P], a and b, from -radius to radius; 0 is among them if P is odd.
      losses: float [P, P], the mean loss at params + offsets[i] u + offsets[j] v.
    """

    offsets: np.ndarray
    losses: np.ndarray


def hessian_eigenvalues(
    loss_fn: LossFn,
    params: Params,
    examples: PyTree,
    *,
    count: int = 1,
    batch_size: int = 500,
    seed: int = 0,
    tolerance: float = 1e-4,
) -> np.ndarray:
    """Compute the largest eigenvalues (not in magnitude) of the Hessian of the mean loss.

    The method is a Lanczos iteration on products of the Hessian with vectors. Each product is the
    exact mean over all examples and costs three to four gradients. One eigenvalue needs at least 21
    products. The host stores max(20, 2 count + 1) vectors of d numbers.

    The relative error of an eigenvalue is at most ``tolerance``. Rounding of the products adds
    about 1e-6 (float32 params) or 1e-14 (float64) of the eigenvalue that is largest in magnitude.
    At the kink of a ReLU, the second derivative is that of either side.

    Args:
      loss_fn: (params, examples [B, ...], key) -> per-example losses, float [B]; called with
        a fixed key.
      params: pytree of float arrays, d numbers in all.
      examples: pytree [n, ...].
      count: number of eigenvalues, below d.
      batch_size: examples per step of the pass over the data.
      seed: seed of the first vector; the same seed gives the same result.
      tolerance: bound on the relative residual of an eigenvector.

    Returns:
      [count], the largest one first; float64 for float64 params, else float32.

    Raises:
      ValueError: an argument is out of range, or ``loss_fn`` does not return losses [B].
      TypeError: an argument has the wrong type.
      FloatingPointError: the Hessian at ``params`` is not finite.
      RuntimeError: the iteration has not converged.
    """
    params, examples = _on_device(params, examples)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    check_int("count", count, minimum=1)
    if count >= size:
        raise ValueError(f"count is {count}; it must be below the number of parameters, {size}.")
    check_int("batch_size", batch_size, minimum=1)
    check_number("tolerance", tolerance, minimum=0, exclusive_minimum=True)
    generator = np.random.default_rng(check_int("seed", seed, minimum=0))
    wide = any(leaf.dtype == np.float64 for leaf in jax.tree.leaves(params))
    dtype = np.float64 if wide else np.float32

    def product(vector: np.ndarray) -> np.ndarray:
        result = np.asarray(_hessian_product(loss_fn, batch_size, params, vector, examples), dtype)
        if not np.isfinite(result).all():
            raise FloatingPointError(
                "the Hessian at params has entries that are not finite; has the run diverged?"
            )
        return result

    operator = LinearOperator((size, size), matvec=product, dtype=dtype)
    start = generator.standard_normal(size).astype(dtype)
    if not product(start).any():  # a linear loss, with which the iteration cannot start
        return np.zeros(count, dtype)
    try:
        found = eigsh(
            operator,
            count,
            which="LA",
            v0=start,
            tol=tolerance,
            maxiter=_MAX_RESTARTS,
            return_eigenvectors=False,
        )
    except ArpackNoConvergence as error:
        raise RuntimeError(
            f"{len(error.eigenvalues)} of {count} eigenvalues have converged after {_MAX_RESTARTS} "
            f"restarts; use a larger tolerance than {tolerance:g}, or another count."
        ) from error
    return np.sort(found)[::-1]


def loss_surface(
    loss_fn: LossFn,
    params: Params,
    examples: PyTree,
    *,
    radius: float = 1.0,
    points: int = 21,
    seed: int = 0,
    batch_size: int = 1000,
    directions: tuple[Params, Params] | None = None,
) -> Surface:
    """Compute the mean loss on a grid of P x P points of the plane params + a u + b v.

    To compare several models, use the same seed for all. Their directions are then the same random
    numbers, normalised by each model, as intended by filter normalisation. The whole grid is one
    program with P² passes over the examples.

    Args:
      loss_fn: (params, examples [B, ...], key) -> per-example losses, float [B]; called with
        a fixed key.
      params: pytree of float arrays.
      examples: pytree [n, ...].
      radius: largest value of a and b.
      points: P, at least 2; with an odd number, the model itself is in the middle.
      seed: seed for ``random_directions``; unused with ``directions``.
      batch_size: examples per step of the pass over the data.
      directions: (u, v), two pytrees with the structure of ``params``, used without normalisation:
        differences of models, or another model's ``random_directions``. None:
        ``random_directions(params, seed)``.

    Returns:
      ``Surface``; losses far from the model may be infinite or NaN.

    Raises:
      ValueError: an argument is out of range, or ``loss_fn`` does not return losses [B].
      TypeError: an argument has the wrong type.
    """
    params, examples = _on_device(params, examples)
    check_number("radius", radius, minimum=0, exclusive_minimum=True)
    check_int("points", points, minimum=2)
    check_int("batch_size", batch_size, minimum=1)
    if directions is None:
        directions = random_directions(params, seed)
    directions = _pair_like(params, directions)
    # Not linspace, so that the points are exactly symmetric with 0 in the middle.
    offsets = radius * np.arange(1 - points, points, 2) / (points - 1)
    a, b = np.meshgrid(offsets, offsets, indexing="ij")
    grid = np.stack([a.ravel(), b.ravel()], axis=1)
    losses = _losses_at(loss_fn, batch_size, params, directions, grid, examples)
    return Surface(offsets, np.asarray(losses).reshape(points, points))


def random_directions(params: Params, seed: int = 0) -> tuple[Params, Params]:
    """Draw two random directions with filter normalisation.

    The directions are standard normal numbers from ``numpy.random.default_rng(seed)``, first all of
    u and then all of v, leaf by leaf. Each filter of a direction is then scaled to the norm of the
    same filter of ``params``. A filter has the numbers with the same index on the last axis, for
    dense kernels [in, out] and for convolutions [h, w, C, F]. For leaves with fewer than two axes,
    such as biases and scales of norms, the direction is 0.

    Args:
      params: pytree of float arrays.
      seed: a non-negative integer.

    Returns:
      (u, v), pytrees of NumPy arrays with the structure of ``params``.

    Raises:
      TypeError, ValueError: ``seed`` is no such integer.
    """
    generator = np.random.default_rng(check_int("seed", seed, minimum=0))

    def draw(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        if leaf.ndim < 2:
            return np.zeros_like(leaf)
        direction = generator.standard_normal(leaf.shape)
        others = tuple(range(leaf.ndim - 1))
        wanted = np.linalg.norm(leaf.astype(np.float64).reshape(-1, leaf.shape[-1]), axis=0)
        norms = np.sqrt(np.square(direction).sum(others))
        return (direction * (wanted / norms)).astype(leaf.dtype)

    return jax.tree.map(draw, params), jax.tree.map(draw, params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _hessian_product(loss_fn, batch_size, params, vector, examples):
    """Compute the product of the Hessian of the mean loss and ``vector``, [d].

    It is the gradient of <gradient, vector>, because the convolutions on CPU have no forward-mode
    derivative.
    """
    direction = tree.unflatten(vector, params)

    def of_batch(batch, real):
        def slope(params):
            gradient = jax.grad(functools.partial(_total_loss, loss_fn))(params, batch, real)
            return optax.tree.vdot(gradient, direction)

        return jax.grad(slope)(params)

    with jax.default_matmul_precision("float32"):  # GPUs' TF32 makes the product asymmetric
        product = _sum_over_batches(of_batch, tree.zeros_like(params), examples, batch_size)
    return tree.flatten(product) / _length(examples)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses_at(loss_fn, batch_size, params, directions, grid, examples):
    """Compute the mean loss at params + a u + b v for all rows (a, b) of ``grid``."""
    u, v = directions

    def mean_loss(point):
        moved = tree.add_scaled(tree.add_scaled(params, point[0], u), point[1], v)
        of_batch = functools.partial(_total_loss, loss_fn, moved)
        return _sum_over_batches(of_batch, jnp.zeros(()), examples, batch_size) / _length(examples)

    return jax.lax.map(mean_loss, grid)


def _total_loss(loss_fn, params, batch, real):
    """Sum the losses of the real examples of a batch."""
    fixed = running_statistics(params)
    params = jax.tree.map(lambda f, p: jax.lax.stop_gradient(p) if f else p, fixed, params)
    losses, _ = apply_loss(loss_fn, params, batch, seeded(0), real)
    return jnp.where(real, losses, 0).sum()


def _sum_over_batches(of_batch, zero, examples, batch_size):
    """Sum ``of_batch(batch, real)`` over all batches, from ``zero``; the last batch is padded."""
    total = _length(examples)
    size = min(batch_size, total)
    rows = jnp.arange(-(-total // size) * size).reshape(-1, size)

    def add(result, rows):
        batch = jax.tree.map(lambda leaf: leaf[rows % total], examples)
        return tree.add(result, of_batch(batch, rows < total)), None

    return jax.lax.scan(add, zero, rows)[0]


def _length(examples: PyTree) -> int:
    """Return n, the length of all leaves of ``examples``."""
    return jax.tree.leaves(examples)[0].shape[0]


def _on_device(params: Params, examples: PyTree) -> tuple[Params, PyTree]:
    """Check params and examples, and convert them to uncommitted arrays."""
    params, examples = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), (params, examples))
    for leaf in jax.tree.leaves(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"params have a leaf of dtype {leaf.dtype}; all must be floats.")
    shapes = [leaf.shape for leaf in jax.tree.leaves(examples)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or lengths <= {(), (0,)}:
        raise ValueError(
            f"examples have leaves of shapes {shapes}; all must be [n, ...] with one n above 0."
        )
    return params, examples


def _pair_like(params: Params, directions: Any) -> tuple[Params, Params]:
    """Convert ``directions`` to two trees with the shapes and dtypes of ``params``."""
    shapes = jax.tree.map(jnp.shape, params)
    if len(directions) != 2 or any(jax.tree.map(np.shape, d) != shapes for d in directions):
        raise ValueError(
            "directions must be two pytrees with the structure and shapes of params, such as "
            "random_directions returns."
        )
    u, v = (jax.tree.map(lambda p, x: jnp.asarray(x, p.dtype), params, d) for d in directions)
    return u, v
