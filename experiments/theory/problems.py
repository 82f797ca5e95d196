"""Problems with known constants: separable functions with additive noise, and logistic regression.

Axes: N clients, d parameters, n examples of a client, S slots, K local steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedjax_lab import CohortBatch


@struct.dataclass
class Separable:
    """Clients minimize f_i(x) = sum_j a_ij phi(x_j - b_ij); f is their mean, its L is at most 1.

    phi(u) is u^2 / 2, or u^2 / (2 + 2 u^2), which is smooth and not convex. A stochastic gradient
    is that of f_i plus Gaussian noise, independent in each coordinate, step and client.

    Attributes:
      curvature: a, float [N, d], between 0.2 and 1.
      centre: b, float [N, d], with mean 0 over the clients.
      noise: standard deviation of the noise of a coordinate.
      is_convex: which phi it is.
      start: the first x in every coordinate.
    """

    curvature: jax.Array
    centre: jax.Array
    noise: float = 1.0
    start: float = 1.0
    is_convex: bool = struct.field(pytree_node=False, default=False)

    @property
    def num_clients(self):
        """N."""
        return len(self.curvature)

    def params(self):
        """Return the first model."""
        return {"x": jnp.full(self.curvature.shape[1], self.start)}

    def gradient(self, params):
        """Return the gradient of f, float [d]."""
        return (self.curvature * self._slope(params["x"][None] - self.centre)).mean(0)

    def loss(self, params, examples, key):
        """Return the losses [B] of examples (a, b, noise), [B, d] each."""
        del key
        curvature, centre, noise = examples
        x = params["x"][None]
        u = x - centre
        value = 0.5 * jnp.square(u) if self.is_convex else 0.5 * u**2 / (1 + u**2)
        return (curvature * value + noise * x).sum(-1)

    def batch(self, key, t, cohort_size, local_steps, num_steps=None):
        """Draw the batch of round ``t``.

        Args:
          key: PRNG key of the run.
          t: the round.
          cohort_size, local_steps: S and K.
          num_steps: int32 [S], K_i; None: K for all.
        """
        of_cohort, of_noise, of_round = jax.random.split(jax.random.fold_in(key, t), 3)
        ids = jax.random.permutation(of_cohort, len(self.curvature))[:cohort_size]
        shape = (cohort_size, local_steps, 1, self.curvature.shape[1])
        rows = [
            jnp.broadcast_to(table[ids][:, None, None], shape)
            for table in (self.curvature, self.centre)
        ]
        noise = self.noise * jax.random.normal(of_noise, shape)
        return CohortBatch(ids, (*rows, noise), of_round, t, num_steps=num_steps)

    def _slope(self, u):
        return u if self.is_convex else u / (1 + u**2) ** 2


def separable(num_clients, heterogeneity, *, dim=20, seed=0, **options):
    """Create a problem; curvatures of a larger one begin with those of a smaller one.

    Args:
      num_clients: N.
      heterogeneity: standard deviation of the centres over the clients.
      dim: d.
      seed: seed of curvatures and centres.
      **options: of ``Separable``.
    """
    draws = np.random.default_rng(seed).random((num_clients, 2, dim))
    curvature = 0.2 + 0.8 * draws[:, 0]
    centre = draws[:, 1] - draws[:, 1].mean(0)
    spread = max(np.sqrt(np.square(centre).mean()), 1e-12)
    arrays = curvature, heterogeneity / spread * centre
    return Separable(*(jnp.asarray(array, jnp.float32) for array in arrays), **options)


@struct.dataclass
class Logistic:
    """Logistic regression with a ridge; each client has inputs and labels of its own.

    Attributes:
      x: float [N, n, d], of norm 1 each.
      y: float [N, n], -1 or 1.
      ridge: weight of ||w||^2 / 2.
    """

    x: jax.Array
    y: jax.Array
    ridge: float = 0.01

    @property
    def num_clients(self):
        """N."""
        return len(self.x)

    def params(self):
        """Return the first model."""
        return {"w": jnp.zeros(self.x.shape[-1])}

    def loss(self, params, examples, key):
        """Return the losses [B] of examples (x, y)."""
        del key
        x, y = examples
        return jnp.logaddexp(0.0, -y * (x @ params["w"])) + 0.5 * self.ridge * jnp.sum(
            params["w"] ** 2
        )

    def gradient(self, params):
        """Return the gradient of the mean loss, float [d]."""
        share = -self.y * jax.nn.sigmoid(-self.y * (self.x @ params["w"]))
        return (share[..., None] * self.x).mean((0, 1)) + self.ridge * params["w"]

    def batch(self, key, t, cohort_size, local_steps, num_steps=None):
        """Draw the batch of round ``t``: single examples with replacement; see ``Separable``."""
        of_cohort, of_places, of_round = jax.random.split(jax.random.fold_in(key, t), 3)
        ids = jax.random.permutation(of_cohort, len(self.x))[:cohort_size]
        places = jax.random.randint(of_places, (cohort_size, local_steps, 1), 0, self.x.shape[1])
        rows = self.x[ids[:, None, None], places], self.y[ids[:, None, None], places]
        whole = self.x[ids], self.y[ids]
        mask = jnp.ones(whole[1].shape, bool)
        return CohortBatch(ids, rows, of_round, t, whole, mask, num_steps=num_steps)


def logistic(num_clients, num_examples, heterogeneity, *, dim=10, seed=0):
    """Create a problem whose clients have true models of their own.

    Args:
      num_clients, num_examples: N and n.
      heterogeneity: standard deviation of a client's true model around the common one, whose
        coordinates have the standard deviation 1.
      dim: d.
      seed: seed of all draws.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_clients, num_examples, dim))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    true = rng.normal(size=dim) + heterogeneity * rng.normal(size=(num_clients, 1, dim))
    chance = 1 / (1 + np.exp(-4 * (x * true).sum(-1)))
    y = np.where(rng.random(chance.shape) < chance, 1.0, -1.0)
    return Logistic(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
