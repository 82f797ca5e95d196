"""Types of the values in a communication round. This file imports no other file of the package.

Axes: N clients, S slots of the cohort, K local steps, B examples of a mini-batch,
M examples of a client. A slot is a place in the cohort's arrays: it holds a client or padding.
A row is the state of one client between rounds, in a table with one row for each client.
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
# (params, examples [B, ...], key) -> per-example losses, float [B]; or (losses, metrics), where
# metrics is a dict name -> float [B] or scalar. A loss with an argument named ``mask`` also gets
# bool [B], False for padding, which repeats one of the real examples; one with an argument named
# ``constants`` gets the client's constants.
LossFn = Callable[..., Any]


class CohortBatch(NamedTuple):
    """The cohort of a round and its mini-batches.

    Attributes:
      client_ids: int32 [S], distinct; a padded slot has id N.
      examples: pytree [S, K, B, ...]. With ``source``, int32 indices [S, K, B] into it.
      key: PRNG key of the round; each client folds its own id into it.
      round: int32 scalar, counted from 0; schedules are functions of it.
      full_examples: pytree [S, M, ...], the whole data set of each client (indices with
        ``source``), for methods that use full local gradients. None: such methods use the examples
        of the round.
      full_mask: bool [S, M], which of ``full_examples`` are real.
      example_mask: bool [S, K, B], which examples are real; None: all.
      num_steps: int32 [S], the local steps K_i <= K of each client; None: K for all. Steps
        beyond K_i are not computed, whereas a step whose examples are all masked may be.
      weights: float [S], aggregation weights, not normalised; None: equal.
      participates: bool [S], whether a slot participates; None: all but padded slots.
      source: pytree [n, ...] of resident examples. Each local step gathers its own mini-batch from
        it, so that memory does not grow with K.
      expected_size: float scalar, the expected number of clients under Poisson sampling. NaN: more
        clients were sampled than there are slots, and the batch must not be used. None: the size of
        the cohort is not random.
      seconds: float [S], simulated seconds until each client finishes; None: time is not simulated.
      measured: additional metrics of the round, scalars that are known when the batch is drawn;
        None: no such metrics.
      frozen: frozen weights, for first estimates that ``Algorithm.init`` computes from this batch;
        ``init`` sets it. () if there are none. During a round they are in the state.
      constants: pytree [N, ...], the constants of all clients (``client_constants``); a round reads
        the rows of its cohort. () if there are none.
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
    constants: PyTree = ()


class Cohort(NamedTuple):
    """The cohort of a round, as the server sees it.

    Attributes:
      client_ids: int32 [S]; a padded slot has id N.
      participates: bool [S], whether the slot participates.
      weights: float [S], aggregation weights; they add up to 1 over the participating clients.
      round: int32 scalar.
      num_clients: int32 scalar N.
      max_steps: K, the local steps of a round; a client takes K_i <= K of them.
      num_steps: int32 [S], K_i.
      key: PRNG key of the round. The clients' keys are derived by folding in the number of the
        phase, so a server that draws numbers must fold in something else.
      equal_weights: whether all weights are equal because the batch has none.
      expected_size: as in ``CohortBatch``.
      total_weight: sum of the participating clients' weights before they were normalised, for
        servers that combine clients of several rounds.
      seconds: float [S], as in ``CohortBatch``.
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
        """1 / N, float scalar: the weight of one client in a mean over all clients."""
        return 1 / self.num_clients.astype(self.weights.dtype)


class ClientBatch(NamedTuple):
    """The batch of one client in a round: a ``CohortBatch`` without its leading axis S.

    Attributes:
      examples: pytree [K, B, ...]; indices [K, B] with ``source``.
      example_mask: bool [K, B] or None (all examples are real).
      step_mask: bool [K], the steps that are taken; None: all steps with a valid example.
      num_steps: int32 scalar K_i, the number of local steps.
      key: PRNG key of this client in this round and phase.
      round: int32 scalar.
      full_examples: pytree [M, ...]; indices [M] with ``source``; None: not asked for.
      full_mask: bool [M], or None.
      source: resident examples shared by all clients, or None; ``clients.resident.gather`` reads
        them.
      longest: int32 scalar, the number of steps after which all clients of a batched group have
        finished; later steps are not computed. None: clients are not batched.
      frozen: pytree of arrays that the loss reads in addition to the params (see ``with_frozen``);
        () if there are none.
      measures: metrics of each gradient in addition to its loss, a ``clients.metrics.Measures``
        (see ``with_client_metrics``); None: no such metrics.
      client_id: int32 scalar, the client's number; N in a padded slot.
      constants: pytree [...], the client's own constants (``client_constants``); those of any
        client in a padded slot. () if there are none.
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
    client_id: jax.Array | None = None
    constants: PyTree = ()

    @property
    def max_steps(self) -> int:
        """K, the maximum number of local steps; this client takes K_i of them."""
        return jax.tree.leaves(self.examples)[0].shape[0]


class FedState(NamedTuple):
    """The state of a method between rounds.

    Attributes:
      server: the server state, a NamedTuple of the method.
      clients: pytree with leading axis N, one row per client; ``()`` if clients are stateless.
      num_clients: int32 scalar N; a padded slot has this id.
      frozen: pytree of arrays that the loss reads and no round changes (see ``with_frozen``); ()
        if there are none.
    """

    server: PyTree
    clients: PyTree
    num_clients: jax.Array
    frozen: PyTree = ()


class Personal(NamedTuple):
    """A method's way to make a model for each client.

    Attributes:
      params: (state, int32 id) -> that client's params. The state is the one of the method with all
        its wrappers. Both arguments may be traced.
      fine_tune: (these params, ``ClientBatch`` of the client's own data) -> fine-tuned params for
        its evaluation; None: no fine-tuning.
      steps: K, the number of mini-batches for ``fine_tune``.
    """

    params: Callable[[FedState, jax.Array], Params]
    fine_tune: Callable[[Params, ClientBatch], Params] | None = None
    steps: int = 0

    def inside(self, unwrap: Callable[[FedState], FedState]) -> "Personal":
        """Return the same for a wrapped method.

        Args:
          unwrap: state of the wrapped method -> state of the method inside the wrapper.
        """
        return self._replace(params=lambda state, client: self.params(unwrap(state), client))
