"""How flat is the loss around a model? Eigenvalues of its Hessian, and its values on a plane.

Sharpness-aware methods and FedSWA argue with flat minima. The largest eigenvalue of the Hessian is
the curvature in the sharpest direction. The plane is that of Li, Xu, Taylor, Studer, Goldstein:
Visualizing the Loss Landscape of Neural Nets. NeurIPS 2018, Section 4: it contains the model, and
two random, filter-normalised directions span it.

python -m fedjax_lab.recipes.flatness
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from scipy.sparse.linalg import LinearOperator, eigsh

from fedjax_lab import algorithms, data, models, simulate


class Surface(NamedTuple):
    """The loss on a plane through a model.

    Attributes:
      offsets: float64 [P], a and b, from -radius to radius; 0 is among them if P is odd.
      losses: float [P, P], the mean loss at params + offsets[i] u + offsets[j] v.
    """

    offsets: np.ndarray
    losses: np.ndarray


def hessian_eigenvalues(
    loss_fn, params, examples, *, count=1, batch_size=500, seed=0, tolerance=1e-4
):
    """Compute the largest eigenvalues (not in magnitude) of the Hessian of the mean loss.

    Each product of the Hessian with a vector costs three to four gradients of all examples; an
    eigenvalue needs at least 21 products.

    Args:
      loss_fn: (params, examples [B, ...], key) -> losses [B], called with one fixed key: use a loss
        without dropout and augmentation.
      params: pytree of float arrays.
      examples: pytree [n, ...].
      count: number of eigenvalues, below the number of parameters.
      batch_size: examples that are differentiated at once.
      seed: seed of the iteration's first vector.
      tolerance: bound on an eigenvalue's relative error.

    Returns:
      [count], the largest one first.

    Raises:
      FloatingPointError: the Hessian at ``params`` is not finite.
      scipy.sparse.linalg.ArpackNoConvergence: the iteration has not converged.
    """
    start = np.asarray(ravel_pytree(params)[0])
    start = np.random.default_rng(seed).standard_normal(start.size).astype(start.dtype)

    def product(vector):
        found = np.asarray(_hessian_product(loss_fn, batch_size, params, vector, examples))
        if not np.isfinite(found).all():
            raise FloatingPointError("the Hessian is not finite at params; has the run diverged?")
        return found

    hessian = LinearOperator((start.size, start.size), matvec=product, dtype=start.dtype)
    found = eigsh(
        hessian, count, which="LA", v0=start, tol=tolerance, maxiter=100, return_eigenvectors=False
    )
    return np.sort(found)[::-1]


def loss_surface(
    loss_fn, params, examples, *, radius=1.0, points=21, seed=0, batch_size=1000, directions=None
):
    """Compute the mean loss on a grid of P x P points of the plane params + a u + b v.

    To compare several models, use the same seed for all.

    Args:
      loss_fn, params, examples, batch_size: as in ``hessian_eigenvalues``.
      radius: largest value of a and b.
      points: P; with an odd number, the model itself is in the middle.
      seed: seed of ``random_directions``.
      directions: (u, v), pytrees like ``params``. None: ``random_directions(params, seed)``.

    Returns:
      ``Surface``; losses far from the model may be infinite or NaN.
    """
    u, v = random_directions(params, seed) if directions is None else directions
    # Not linspace, so that the points are exactly symmetric with 0 in the middle.
    offsets = radius * np.arange(1 - points, points, 2) / (points - 1)
    a, b = np.meshgrid(offsets, offsets, indexing="ij")
    grid = np.stack([a.ravel(), b.ravel()], axis=1)
    losses = _losses_at(loss_fn, batch_size, params, u, v, grid, examples)
    return Surface(offsets, np.asarray(losses).reshape(points, points))


def random_directions(params, seed=0):
    """Draw two random directions, each filter scaled to the norm of the same filter of ``params``.

    A filter has the numbers with the same index on the last axis. The direction of leaves with
    fewer than two axes, such as biases, is 0.

    Args:
      params: pytree of float arrays.
      seed: seed of ``numpy.random.default_rng``.

    Returns:
      (u, v), pytrees of NumPy arrays like ``params``.
    """
    generator = np.random.default_rng(seed)

    def draw(leaf):
        leaf = np.asarray(leaf)
        if leaf.ndim < 2:
            return np.zeros_like(leaf)
        direction = generator.standard_normal(leaf.shape)
        others = tuple(range(leaf.ndim - 1))
        wanted = np.linalg.norm(leaf.astype(np.float64).reshape(-1, leaf.shape[-1]), axis=0)
        return (direction * (wanted / np.sqrt((direction**2).sum(others)))).astype(leaf.dtype)

    return jax.tree.map(draw, params), jax.tree.map(draw, params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _hessian_product(loss_fn, batch_size, params, vector, examples):
    """The gradient of <gradient, vector>: convolutions on CPU have no forward-mode derivative."""
    direction = ravel_pytree(params)[1](vector)

    def slope(params, batch):
        gradient = jax.grad(functools.partial(_total_loss, loss_fn))(params, batch)
        return optax.tree.vdot(gradient, direction)

    with jax.default_matmul_precision("float32"):  # GPUs' TF32 makes the product asymmetric
        product = _mean(lambda batch: jax.grad(slope)(params, batch), examples, batch_size)
    return ravel_pytree(product)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses_at(loss_fn, batch_size, params, u, v, grid, examples):
    def mean_loss(point):
        moved = jax.tree.map(
            lambda p, u, v: p + point[0].astype(p.dtype) * u + point[1].astype(p.dtype) * v,
            *(params, u, v),
        )
        return _mean(functools.partial(_total_loss, loss_fn, moved), examples, batch_size)

    return jax.lax.map(mean_loss, grid)


def _total_loss(loss_fn, params, batch):
    fixed = models.running_statistics(params)  # constants, not parameters
    params = jax.tree.map(lambda f, p: jax.lax.stop_gradient(p) if f else p, fixed, params)
    losses = loss_fn(params, batch, jax.random.key(0))
    return (losses[0] if isinstance(losses, tuple) else losses).sum()  # without its metrics


def _mean(total, examples, batch_size):
    """Add up ``total(batch)`` over all batches, the last one smaller, and divide by n."""
    n = jax.tree.leaves(examples)[0].shape[0]
    size = min(batch_size, n)
    whole = n // size * size
    batches = jax.tree.map(lambda x: jnp.reshape(x[:whole], (-1, size, *x.shape[1:])), examples)
    shapes = jax.eval_shape(total, jax.tree.map(lambda x: x[0], batches))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, _ = jax.lax.scan(lambda sums, x: (optax.tree.add(sums, total(x)), None), zeros, batches)
    if whole < n:
        sums = optax.tree.add(sums, total(jax.tree.map(lambda x: x[whole:], examples)))
    return jax.tree.map(lambda x: x / n, sums)


def main():
    """Train with and without a perturbation towards sharp directions, and compare."""
    train, _ = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    model = models.mlp(10, hidden=(32,))
    params = model.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(model.apply, data.preprocess(scale=16))
    methods = {
        "fedavg": algorithms.fedavg(loss_fn, client_lr=0.1),
        "fedsam": algorithms.fedsam(loss_fn, client_lr=0.1, perturbation_radius=0.2),
    }
    for name, algorithm in methods.items():
        result = simulate(
            algorithm, params, clients, rounds=20, cohort_size=5, local_steps=5, batch_size=16
        )
        (largest,) = hessian_eigenvalues(loss_fn, result.params, train)
        surface = loss_surface(loss_fn, result.params, train, points=5)
        here, around = surface.losses[2, 2], surface.losses.mean()
        print(f"{name}: largest eigenvalue {largest:.1f}; loss {here:.2f}, around it {around:.2f}")


if __name__ == "__main__":
    main()
