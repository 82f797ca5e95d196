"""Evaluation on resident data, jitted once, in batches of fixed size."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_int
from fedjax_lab.data import FederatedArrays
from fedjax_lab.types import Params, PyTree

# (params, examples [B, ...]) -> (correct [B], losses [B]), both float
CountFn = Callable[[Params, PyTree], tuple[jax.Array, jax.Array]]


def build_evaluation(
    count_fn: CountFn, test: PyTree, batch_size: int = 1000
) -> Callable[[Params], dict[str, jax.Array]]:
    """Build ``evaluate(params) -> {"accuracy", "test_loss"}`` over all of ``test``.

    Args:
      count_fn: (params, examples [B, ...]) -> (correct [B], losses [B]), such as
        ``fedjax_lab.models.accuracy_counts`` returns.
      test: pytree [n, ...]; copied to the device once, in its storage dtype.
      batch_size: examples per step of the evaluation's scan.

    Raises:
      ValueError: ``batch_size`` is below 1.
    """
    check_int("batch_size", batch_size, minimum=1)
    test = jax.tree.map(jnp.asarray, test)
    run = jax.jit(functools.partial(_per_example, count_fn, batch_size=batch_size))

    def evaluate(params):
        correct, losses = run(params, test)
        return {"accuracy": correct.mean(), "test_loss": losses.mean()}

    return evaluate


def with_perplexity(
    evaluate: Callable[[Params], dict[str, jax.Array]],
) -> Callable[[Params], dict[str, jax.Array]]:
    """``evaluate`` with "perplexity" added: exp("test_loss"), of a mean cross-entropy per word.

    It is the size of the vocabulary for a model that finds all words equally probable.
    """

    def evaluate_text(params):
        scores = evaluate(params)
        return {**scores, "perplexity": jnp.exp(scores["test_loss"])}

    return evaluate_text


def build_client_evaluation(
    count_fn: CountFn, clients: FederatedArrays, batch_size: int = 1000
) -> Callable[[Params], jax.Array]:
    """Build ``evaluate(params) -> accuracy [N]`` on each client's own training examples.

    A client without data gets NaN.

    Raises:
      ValueError: ``batch_size`` is below 1.
    """
    check_int("batch_size", batch_size, minimum=1)

    @jax.jit
    def run(params, clients):
        correct, _ = _per_example(count_fn, params, clients.examples, batch_size=batch_size)
        position = jnp.arange(clients.indices.shape[0])
        owner = jnp.searchsorted(clients.starts + clients.sizes, position, side="right")
        counts = jax.ops.segment_sum(correct[clients.indices], owner, clients.num_clients)
        return counts / clients.sizes  # 0/0 is NaN: no data, no accuracy

    return lambda params: run(params, clients)


def _per_example(count_fn, params, examples, *, batch_size):
    """(correct [n], losses [n]); the last batch is padded with its first rows."""
    total = jax.tree.leaves(examples)[0].shape[0]
    size = min(batch_size, total)
    rows = jnp.arange(-(-total // size) * size).reshape(-1, size) % total

    def one_batch(rows):
        return count_fn(params, jax.tree.map(lambda leaf: leaf[rows], examples))

    correct, losses = jax.lax.map(one_batch, rows)
    return correct.reshape(-1)[:total], losses.reshape(-1)[:total]
