"""Problems with a known optimum, and noise shaped like images.

Axes: N clients, M examples of a client, n = N M examples, d dimensions.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_int, check_number
from fedjax_lab.data.sources import Examples
from fedjax_lab.signatures import suggest_keywords


class Problem(NamedTuple):
    """A federated problem whose solution is known.

    ``partition(problem.examples, problem.client_ids, num_clients)`` creates the federation. All
    clients have M examples, so the optimum is the same for uniform weights and example weights.

    Attributes:
      examples: ``Examples`` of n = N M rows.
      client_ids: int32 [n], for the natural partition.
      optimum: float64 [d], minimiser of the mean of the clients' objectives.
      minimum: the objective at the optimum.
      loss_fn: (params float [d], examples [B], key) -> losses float [B].
    """

    examples: Examples
    client_ids: np.ndarray
    optimum: np.ndarray
    minimum: float
    loss_fn: Callable[[jax.Array, Examples, jax.Array | None], jax.Array]


@suggest_keywords
def quadratics(
    num_clients: int,
    dim: int,
    *,
    heterogeneity: float = 1.0,
    condition: float = 10.0,
    noise: float = 0.0,
    examples_per_client: int = 2,
    seed: int = 0,
) -> Problem:
    """Create quadratic clients f_i(y) = 1/2 sum_j a_ij (y_j - b_ij)^2, up to a constant.

    Args:
      num_clients: N.
      dim: d.
      heterogeneity: standard deviation of the centres b_i over the clients.
      condition: curvatures a_ij lie in [1, condition], log-uniformly.
      noise: standard deviation of the centres of single examples around b_i, which makes
        mini-batch gradients random; a client's examples have mean b_i exactly (to rounding).
      examples_per_client: M.
      seed: seed of all random numbers.

    Returns:
      ``Problem``; ``examples.x`` is float32 [n, 2, d] (curvature and centre), ``examples.y``
      the client ids. The optimum is sum_i a_i b_i / sum_i a_i.

    Raises:
      TypeError, ValueError: an argument has the wrong type or range.
    """
    shape = _check_sizes(num_clients, dim, examples_per_client, seed)
    check_number("heterogeneity", heterogeneity, minimum=0)
    check_number("condition", condition, minimum=1)
    check_number("noise", noise, minimum=0)
    rng = np.random.default_rng(seed)
    curvature = np.exp(rng.uniform(0, np.log(condition), (num_clients, 1, dim)))
    centre = heterogeneity * rng.standard_normal((num_clients, 1, dim))
    offset = noise * rng.standard_normal(shape)
    centres = centre + offset - offset.mean(1, keepdims=True)
    x = np.stack(np.broadcast_arrays(curvature, centres), axis=2)
    x = x.reshape(-1, 2, dim).astype(np.float32)
    client_ids = np.repeat(np.arange(num_clients, dtype=np.int32), examples_per_client)
    # Computed from the rounded numbers that the clients have, so that it is exact for them.
    a, b = x[:, 0].astype(np.float64), x[:, 1].astype(np.float64)
    optimum = (a * b).sum(0) / a.sum(0)
    minimum = float(0.5 * (a * (optimum - b) ** 2).sum(1).mean())
    return Problem(Examples(x, client_ids), client_ids, optimum, minimum, _quadratic_loss)


@suggest_keywords
def logistic_regression(
    num_clients: int,
    dim: int,
    *,
    heterogeneity: float = 1.0,
    l2: float = 0.01,
    examples_per_client: int = 50,
    seed: int = 0,
) -> Problem:
    """Create binary logistic regression: clients differ in features and in true parameters.

    Client i has features N(u_i, I) and labels Bernoulli(sigmoid(x . w_i)), where u_i and
    w_i - w are N(0, heterogeneity^2 I / d). The loss of an example is
    log(1 + exp(x . y)) - label * x . y + l2/2 ||y||^2.

    Args:
      num_clients: N.
      dim: d.
      heterogeneity: standard deviation of the differences between clients, times sqrt(d); 0:
        identically distributed clients.
      l2: weight of the squared norm, positive so that the optimum is unique.
      examples_per_client: M.
      seed: seed of all random numbers.

    Returns:
      ``Problem``; ``examples.x`` is float32 [n, d], ``examples.y`` the labels 0 and 1. The
      optimum is found by Newton's method in float64.

    Raises:
      TypeError, ValueError: an argument has the wrong type or range.
    """
    shape = _check_sizes(num_clients, dim, examples_per_client, seed)
    check_number("heterogeneity", heterogeneity, minimum=0)
    check_number("l2", l2, minimum=0, exclusive_minimum=True)
    rng = np.random.default_rng(seed)
    spread = heterogeneity / np.sqrt(dim)
    shift = spread * rng.standard_normal((num_clients, 1, dim))
    x = (shift + rng.standard_normal(shape)).astype(np.float32)
    true = rng.standard_normal(dim) + spread * rng.standard_normal((num_clients, dim))
    logits = np.einsum("nmd,nd->nm", x, true)
    labels = (rng.random(logits.shape) < _sigmoid(logits)).astype(np.int32).ravel()
    x = x.reshape(-1, dim)
    optimum, minimum = _newton(x.astype(np.float64), labels, l2)
    client_ids = np.repeat(np.arange(num_clients, dtype=np.int32), examples_per_client)

    def loss_fn(params, examples, key):
        del key
        logits = examples.x @ params
        penalty = 0.5 * l2 * jnp.vdot(params, params)
        return jnp.logaddexp(0.0, logits) - examples.y * logits + penalty

    return Problem(Examples(x, labels), client_ids, optimum, minimum, loss_fn)


@suggest_keywords
def noise_images(
    n: int, shape: tuple[int, ...] = (32, 32, 3), num_classes: int = 10, seed: int = 0
) -> Examples:
    """Create uniform random bytes with random labels, to measure speed and memory.

    Args:
      n: number of examples.
      shape: shape of an example.
      num_classes: labels lie in [0, num_classes).
      seed: the same seed gives the same bytes.

    Returns:
      ``Examples``: uint8 ``[n, *shape]`` and int32 [n] in [0, num_classes).

    Raises:
      TypeError, ValueError: an argument has the wrong type or range.
    """
    check_int("n", n, minimum=1)
    for size in shape:
        check_int("shape", size, minimum=1)
    check_int("num_classes", num_classes, minimum=1)
    check_int("seed", seed, minimum=0)
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
    return Examples(x, rng.integers(0, num_classes, n, dtype=np.int32))


def _quadratic_loss(params, examples, key):
    del key
    curvature, centre = examples.x[:, 0], examples.x[:, 1]
    return 0.5 * (curvature * jnp.square(params[None] - centre)).sum(1)


def _check_sizes(num_clients, dim, examples_per_client, seed) -> tuple[int, int, int]:
    check_int("seed", seed, minimum=0)
    return (
        check_int("num_clients", num_clients, minimum=1),
        check_int("examples_per_client", examples_per_client, minimum=1),
        check_int("dim", dim, minimum=1),
    )


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * z))


def _newton(x: np.ndarray, labels: np.ndarray, l2: float) -> tuple[np.ndarray, float]:
    """Compute minimiser [d] and minimum of the mean logistic loss plus l2/2 ||y||^2."""
    n, dim = x.shape

    def objective(y):
        logits = x @ y
        return float((np.logaddexp(0, logits) - labels * logits).mean() + 0.5 * l2 * y @ y)

    y = np.zeros(dim)
    for _ in range(100):
        p = _sigmoid(x @ y)
        gradient = x.T @ (p - labels) / n + l2 * y
        if np.linalg.norm(gradient) < 1e-13:
            break
        hessian = (x.T * (p * (1 - p))) @ x / n + l2 * np.eye(dim)
        step = np.linalg.solve(hessian, gradient)
        size = 1.0
        # Halved while it overshoots; near the optimum rounding hides any decrease.
        while size > 1e-6 and objective(y - size * step) > objective(y) + 1e-15:
            size /= 2
        y = y - size * step
    return y, objective(y)
