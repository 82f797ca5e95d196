"""The values that travel through a round. This file imports nothing of ours.

Axes: N clients, S slots of the cohort, K local steps, B examples of a mini-batch,
M examples of a client. A slot is a place in the cohort's arrays: it holds a client, or is padding.
A client's row is what it keeps from round to round, in a table with one row for each client.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

PyTree = Any
Params = PyTree  # a model's parameters
Key = jax.Array  # a typed PRNG key, consumed once
Scalar = float | jax.Array
# A schedule is a function of the round, such as optax's.
ScalarOrSchedule = Scalar | Callable[[jax.Array], jax.Array]
Metrics = dict[str, jax.Array]
# (params, examples [B, ...], key) -> per-example losses, float [B]; or these and a dict of metrics,
# name -> float [B] or scalar. With an argument named ``mask`` it also gets bool [B]: which examples
# are real, and not padding that repeats one of them.
LossFn = Callable[..., Any]


class CohortBatch(NamedTuple):
    """Everything drawn for one round.

    Attributes:
      client_ids: int32 [S], distinct; a padded slot has id N.
      examples: pytree [S, K, B, ...]. With ``source``, int32 indices [S, K, B] into it.
      key: the round's PRNG key; every client folds its own id into it.
      round: int32 scalar, counted from 0; schedules are functions of it.
      full_examples: pytree [S, M, ...], each client's whole data set (indices with
        ``source``), for methods that take a full local gradient. Where it is None they take
        the round's own examples.
      full_mask: bool [S, M], which of ``full_examples`` are real.
      example_mask: bool [S, K, B], which examples are real; None: all.
      num_steps: int32 [S], the local steps K_i <= K of each client; None: K for all.
      weights: float [S], aggregation weights, not normalised; None: equal.
      participates: bool [S], whether a slot takes part; None: all but padded slots.
      source: pytree [n, ...] of resident examples. Each local step gathers its own
        mini-batch from it, so that memory does not grow with K.
      expected_size: float scalar, of a cohort in which each client is by a coin of its own: how
        many are expected. NaN: more came than there are slots, and the batch is not to be used.
        None: the size of the cohort is no matter of chance.
      seconds: float [S], simulated seconds until each client is done; None: time is not counted.
      measured: scalars that are known when the batch is drawn, for the round's metrics; or None.
      frozen: what the loss reads beside the params where ``Algorithm.init`` takes first estimates
        from this batch; ``init`` sets it. A round has it in its state. () if there is nothing.
    """

    client_ids: jax.Array
    examples: PyTree
    key: Key
    round: jax.Array
    full_examples: PyTree = None
    full_mask: jax.Array | None = None
    example_mask: jax.Array | None = None
    num_steps: jax.Array | None = None
    weights: jax.Array | None = None
    participates: jax.Array | None = None
    source: PyTree = None
    expected_size: jax.Array | None = None
    seconds: jax.Array | None = None
    measured: Metrics | None = None
    frozen: PyTree = ()


class Cohort(NamedTuple):
    """Who took part in a round, as the server sees it.

    Attributes:
      client_ids: int32 [S]; a padded slot has id N.
      participates: bool [S], whether the slot took part.
      weights: float [S], aggregation weights, adding up to 1 over those who took part.
      round: int32 scalar.
      num_clients: int32 scalar N.
      max_steps: K, the local steps of a round; a client takes K_i <= K of them.
      num_steps: int32 [S], K_i.
      key: the round's PRNG key; the clients' keys are folded from it with the number of the
        phase, so that a server's own draws fold in something else.
      equal_weights: whether the batch leaves all weights equal by giving none.
      expected_size: as of the batch.
      total_weight: what the weights of those who took part added up to in the batch; a server that
        combines clients of several rounds needs it.
      seconds: float [S], as of ``CohortBatch``.
    """

    client_ids: jax.Array
    participates: jax.Array
    weights: jax.Array
    round: jax.Array
    num_clients: jax.Array
    max_steps: int
    num_steps: jax.Array
    key: Key
    equal_weights: bool = False
    expected_size: jax.Array | None = None
    total_weight: Scalar = 1.0
    seconds: jax.Array | None = None

    @property
    def client_share(self) -> jax.Array:
        """1 / N, float scalar: what one client weighs in a mean over all of them."""
        return 1 / self.num_clients.astype(self.weights.dtype)


class ClientBatch(NamedTuple):
    """One client's slice of the round: a ``CohortBatch`` without its leading axis S.

    Attributes:
      examples: pytree [K, B, ...]; indices [K, B] with ``source``.
      example_mask: bool [K, B] or None (all examples are real).
      step_mask: bool [K] or None (all K steps are taken).
      num_steps: int32 scalar K_i, the number of steps that are taken.
      key: this client's key of this round.
      round: int32 scalar.
      full_examples: pytree [M, ...], or None.
      full_mask: bool [M], or None.
      source: resident examples shared by all clients, or None.
      longest: int32 scalar, after how many steps all clients that run together are done; steps
        beyond it are not computed even where clients are batched. None: nobody waits.
      frozen: pytree of arrays that the loss reads beside the params (see ``with_frozen``); () if
        there are none.
      measures: what is reported of each gradient besides its loss, a ``clients.metrics.Measures``
        (see ``with_client_metrics``); None: nothing.
    """

    examples: PyTree
    example_mask: jax.Array | None
    step_mask: jax.Array | None
    num_steps: jax.Array
    key: Key
    round: jax.Array
    full_examples: PyTree
    full_mask: jax.Array | None
    source: PyTree
    longest: jax.Array | None = None
    frozen: PyTree = ()
    measures: Any = None

    @property
    def max_steps(self) -> int:
        """K, of which this client takes K_i."""
        return jax.tree.leaves(self.examples)[0].shape[0]


class FedState(NamedTuple):
    """What a method carries from round to round.

    Attributes:
      server: the method's own NamedTuple.
      clients: pytree with leading axis N, one row per client; ``()`` if clients keep nothing.
      num_clients: int32 scalar N, by which a padded slot (id N) is recognised.
      frozen: pytree of arrays that the loss reads and no round changes (see ``with_frozen``); ()
        if there are none.
    """

    server: PyTree
    clients: PyTree
    num_clients: jax.Array
    frozen: PyTree = ()


class Personal(NamedTuple):
    """How a method makes the model that each client has of its own.

    Attributes:
      params: (state, int32 id) -> that client's params, for the state of the method as it is
        wrapped; both may be traced.
      fine_tune: (these params, ``ClientBatch`` of the client's own data) -> the params with which
        it is evaluated; None: as they are.
      steps: mini-batches that ``fine_tune`` takes, K.
    """

    params: Callable[[FedState, jax.Array], Params]
    fine_tune: Callable[[Params, ClientBatch], Params] | None = None
    steps: int = 0

    def inside(self, unwrap: Callable[[FedState], FedState]) -> "Personal":
        """The same for a wrapped method.

        Args:
          unwrap: the wrapped method's state -> the state of the method inside.
        """
        return self._replace(params=lambda state, client: self.params(unwrap(state), client))
