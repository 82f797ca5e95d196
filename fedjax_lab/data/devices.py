"""System heterogeneity: stragglers with fewer local steps, and dropouts.

Everything is a function of (key, round, client id).

Axes: N clients, S slots of the cohort.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_choice, check_int, check_number
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Key

# Time that is exceeded by this share of it counts as met: 10 * 0.09 is more than 0.9 in binary, and
# the share is four times the spacing of float32.
ROUNDING = 2.0**-21
# Folded into the run's key, apart from the numbers of rounds.
_SPEED, _STEPS = jnp.iinfo(jnp.uint32).max, jnp.iinfo(jnp.uint32).max - 1


@suggest_keywords
@dataclasses.dataclass(frozen=True)
class Devices:
    """Numbers of local steps K_i and dropouts of the clients, applied in this order.

    1. The schedule asks for K steps, or for E passes over the client's data.
    2. With ``min_local_steps`` the client takes a uniformly drawn number between that and the
       number of step 1.
    3. With ``time_budget`` a straggler takes only the steps that it finishes in time. A local step
       takes ``step_time * exp(step_time_spread * z_i)`` seconds, z_i standard normal, the same in
       every round. A client that finishes no step (K_i = 0) does not participate. The last step
       may end later than the budget by ``ROUNDING`` of it, the error of decimals in float32.
    4. With probability ``dropout`` a sampled client fails and does not participate.

    Attributes:
      min_local_steps: least number of local steps, at least 1; None: the number of step 1.
      redraw: "round": step 2 draws anew in each round; "run": once for each client.
      time_budget: simulated seconds that the server waits; None: until all clients are done.
      step_time: median over the clients of the simulated seconds of one local step with one
        gradient. In ``simulate`` and its kin, a step of a method with g gradients takes g times as
        long (``Algorithm.gradients_per_step``).
      step_time_spread: standard deviation over the clients of its logarithm; 0: all equal.
      dropout: probability that a client fails, in [0, 1), independent in each round.

    Raises:
      TypeError: a value has the wrong type.
      ValueError: a value is out of range.
    """

    min_local_steps: int | None = None
    redraw: str = "round"
    time_budget: float | None = None
    step_time: float = 1.0
    step_time_spread: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.min_local_steps is not None:
            check_int("min_local_steps", self.min_local_steps, minimum=1)
        check_choice("redraw", self.redraw, ("round", "run"))
        if self.time_budget is not None:
            check_number("time_budget", self.time_budget, minimum=0.0, exclusive_minimum=True)
        check_number("step_time", self.step_time, minimum=0.0, exclusive_minimum=True)
        check_number("step_time_spread", self.step_time_spread, minimum=0.0)
        check_number("dropout", self.dropout, minimum=0.0, maximum=1.0, exclusive_maximum=True)

    def step_seconds(self, key: Key, client_ids: jax.Array) -> jax.Array:
        """Compute the simulated seconds of a local step of each client, float [S].

        Args:
          key: the run's key.
          client_ids: int32 [S].
        """
        normal = _per_client(jax.random.normal, jax.random.fold_in(key, _SPEED), client_ids)
        return self.step_time * jnp.exp(self.step_time_spread * normal)

    def local_steps(
        self, key: Key, round: jax.Array, client_ids: jax.Array, planned: jax.Array
    ) -> jax.Array:
        """Compute the number of local steps of each client, int32 [S].

        Args:
          key: the run's key.
          round: int32 scalar, counted from 0.
          client_ids: int32 [S].
          planned: int32 [S], the steps that the schedule asks for.
        """
        steps = planned
        if self.min_local_steps is not None:
            draw_key = jax.random.fold_in(key, _STEPS)
            if self.redraw == "round":
                draw_key = jax.random.fold_in(draw_key, round)
            least = jnp.minimum(self.min_local_steps, planned)
            share = _per_client(jax.random.uniform, draw_key, client_ids)
            drawn = jnp.floor(share * (planned - least + 1)).astype(jnp.int32)
            steps = jnp.minimum(least + drawn, planned)
        if self.time_budget is not None:
            in_time = self.time_budget / self.step_seconds(key, client_ids)
            in_time = jnp.floor(in_time * (1 + ROUNDING))
            steps = jnp.minimum(steps, jnp.minimum(in_time, planned).astype(jnp.int32))
        return steps

    def reports(self, key: Key, client_ids: jax.Array) -> jax.Array | None:
        """Sample which clients do not fail, bool [S]; None: no client fails.

        Args:
          key: the round's key for dropouts.
          client_ids: int32 [S].
        """
        if self.dropout == 0:
            return None
        return _per_client(jax.random.uniform, key, client_ids) >= self.dropout

    def seconds(self, key: Key, client_ids: jax.Array, steps: jax.Array) -> jax.Array:
        """Compute the simulated seconds until each client is done, float [S].

        A client that finishes no step is done at the end of the budget.

        Args:
          key: the run's key.
          client_ids: int32 [S].
          steps: int32 [S], the steps taken.
        """
        seconds = steps * self.step_seconds(key, client_ids)
        if self.time_budget is None:
            return seconds
        return jnp.where(steps > 0, jnp.minimum(seconds, self.time_budget), self.time_budget)

    def round_seconds(
        self, seconds: jax.Array, reports: jax.Array, is_client: jax.Array
    ) -> jax.Array:
        """Compute the simulated seconds that the server waits for computation; a float scalar.

        The server waits until the last client reports, or until the end of the budget if a client
        never does. Without a budget, the server knows which clients have failed.

        Args:
          seconds: float [S], as of ``seconds``.
          reports: bool [S], which clients take a step and do not fail.
          is_client: bool [S], which slots hold a client.
        """
        last = jnp.where(reports, seconds, 0.0).max()
        if self.time_budget is None:
            return last
        return jnp.where((reports | ~is_client).all(), last, self.time_budget)


def _per_client(draw, key: Key, client_ids: jax.Array) -> jax.Array:
    # float32 in every mode of JAX, so that the same clients are drawn.
    one = lambda client_id: draw(jax.random.fold_in(key, client_id), (), jnp.float32)  # noqa: E731
    return jax.vmap(one)(client_ids)
