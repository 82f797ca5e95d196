"""Local training on one client: gradients and local steps, both with masks.

Axes: K local steps, B examples of a mini-batch, M examples of a client.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_lab import tree
from fedjax_lab.clients.batch_statistics import (
    warn_of_batch_statistics,
    warn_of_lone_examples,
)
from fedjax_lab.clients.example_clipping import clipped_gradient
from fedjax_lab.clients.metrics import Measures, apply_loss, with_constants
from fedjax_lab.clients.resident import gather
from fedjax_lab.clients.results import check_direction, check_memory, check_parts
from fedjax_lab.clients.transforms import initial_state, transformed
from fedjax_lab.descriptions import clip_norm_of
from fedjax_lab.machine.keys import fold_in
from fedjax_lab.machine.trace_once import trace_once
from fedjax_lab.models.batch_norm import running_statistics
from fedjax_lab.types import ClientBatch, Key, LossFn, Metrics, Params, PyTree, Scalar

# The entry of a client's report that is no metric: the local params after the last step. Wrappers
# have access to a client's message, row and report only.
LOCAL_PARAMS = "local_params"
# Folded into a client's key for its full gradient; local steps fold in 0, 1, 2, ..., and the states
# of transforms 2^32 - 2.
_FULL_GRADIENT = np.uint32(2**32 - 1)
_MANY_STEPS = 16  # from which on the steps of a client are skipped in blocks


class Step(NamedTuple):
    """Input of one local step.

    Attributes:
      examples: pytree [B, ...].
      mask: bool [B], which examples are real; None: all.
      key: PRNG key of the step, shared by all its gradients.
      memory: values that the method carries from step to step (see ``local_steps``).
      transform_state: state of the gradient transform.
      measures: metrics of each gradient in addition to its loss; None: no such metrics.
      constants: the client's own constants; () if there are none.
    """

    examples: PyTree
    mask: jax.Array | None
    key: Key
    memory: PyTree
    transform_state: PyTree
    measures: Measures | None = None
    constants: PyTree = ()


class StepReport(NamedTuple):
    """Report of a gradient. A direction returns the report of its first gradient.

    Attributes:
      loss: mean loss over the valid examples at the point of the gradient.
      num_examples: number of valid examples.
      memory: ``step.memory`` of the next step; change it with ``_replace``.
      transform_state: state of the gradient transform after its update.
      metrics: scalars to average over the client's steps.
      example_metrics: means over the valid examples, averaged over steps like the loss.
    """

    loss: jax.Array
    num_examples: jax.Array
    memory: PyTree
    transform_state: PyTree
    metrics: Metrics
    example_metrics: Metrics = {}  # noqa: RUF012 (never changed in place)


# (local params, step) -> (what to descend, report)
Direction = Callable[[Params, Step], tuple[PyTree, StepReport]]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Gradient of the masked mean loss, with an optional gradient transform.

    ``gradient(params, step)`` is itself a ``Direction``, the one of plain SGD.

    Attributes:
      loss_fn: (params, examples [B, ...], key) -> losses, float [B]; or (losses, metrics). It may
        have an argument ``mask``, see ``apply_loss``, and an argument ``constants``.
      transform: optax transformation of the raw gradient, such as clipping and weight decay. Its
        state is initialised in every round. None: the raw gradient.
      example_clip: maximum norm of each example's gradient in the mean; None: no clipping.
      example_noise: with ``example_clip``, standard deviation of the noise on the sum of these
        gradients, as a multiple of ``example_clip``; None: no noise.
    """

    loss_fn: LossFn
    transform: optax.GradientTransformation | None = None
    example_clip: Scalar | None = None
    example_noise: Scalar | None = None

    def init(self, params: Params, key: Key) -> PyTree:
        """Initialise the state of the transform at the start of a round.

        Args:
          params: the local params before the first step.
          key: the client's key of the round.

        Raises:
          ValueError: as ``initial_state``.
        """
        return initial_state(self.transform, params, key, "gradient_transform")

    def __call__(self, params: Params, step: Step) -> tuple[PyTree, StepReport]:
        """Compute (gradient of the step's mean loss at ``params``, report)."""
        grads, report = self.raw(params, step)
        return self.transformed(grads, params, report)

    def raw(self, params: Params, step: Step) -> tuple[PyTree, StepReport]:
        """Compute the gradient without the transform.

        For methods that evaluate a gradient at one point and apply it at another one.

        Args:
          params: the point at which to compute the gradient.
          step: the mini-batch, its mask and its key.

        Returns:
          (gradient, report), the gradient with the params' structure, shapes and dtypes.
        """
        loss_fn = with_constants(self.loss_fn, step.constants)
        of_step = (params, step.examples, step.mask, step.key)
        if self.example_clip is None:
            if step.mask is not None:
                warn_of_batch_statistics(loss_fn, params, step.examples, step.key, step.mask)
            (loss, (num_examples, per_step, per_example)), grads = jax.value_and_grad(
                functools.partial(_mean_loss, loss_fn), has_aux=True
            )(*of_step)
        else:
            warn_of_lone_examples(loss_fn, params, step.examples, step.key)
            grads, loss, num_examples, per_step, per_example = clipped_gradient(
                loss_fn, *of_step, self.example_clip, self.example_noise
            )
        if step.measures is not None:
            per_step |= step.measures.of(params, grads, loss, {*per_step, *per_example})
        memory, state = step.memory, step.transform_state
        return grads, StepReport(loss, num_examples, memory, state, per_step, per_example)

    def transformed(
        self, grads: PyTree, params: Params, report: StepReport
    ) -> tuple[PyTree, StepReport]:
        """Apply the transform to a raw gradient; the returned report has the transform's new state.

        Args:
          grads: raw gradient, with the structure of ``params``.
          params: params for the transform, such as for weight decay.
          report: report of the raw gradient, with the transform's state.
        """
        if self.transform is None:
            return grads, report
        report = _count_clipped(self.transform, grads, report)
        grads, state = transformed(self.transform, grads, report.transform_state, params)
        return grads, report._replace(transform_state=state)

    def full(self, params: Params, batch: ClientBatch) -> PyTree:
        """Compute the gradient over all examples of the client, with a fresh transform state.

        The examples are ``batch.full_examples`` or, without them, the valid examples of the
        client's steps. The latter may contain an example several times, which the noise for one
        occurrence would not cover. They are therefore refused with ``example_noise``.

        Args:
          params: the point at which to compute the gradient.
          batch: the client's batch of the round.

        Raises:
          ValueError: ``example_noise`` is set, and the batch has no ``full_examples``.
        """
        examples, mask = batch.full_examples, batch.full_mask
        if examples is None and self.example_noise is not None:
            raise ValueError(
                f"example_noise is {self.example_noise}, but the batch has no full_examples. The "
                "round's mini-batches contain an example once for each pass, and the noise of a "
                "full gradient covers one. Use full_examples=True, and count that gradient as a "
                "pass."
            )
        if examples is None:
            shape = jax.tree.leaves(batch.examples)[0].shape[:2]
            examples = jax.tree.map(lambda e: e.reshape(-1, *e.shape[2:]), batch.examples)
            mask = jnp.ones(shape, bool) if batch.example_mask is None else batch.example_mask
            if batch.step_mask is not None:
                mask = mask & batch.step_mask[:, None]
            mask = mask.reshape(-1)
        examples = gather(_fill(examples, mask), batch.source)
        key = fold_in(batch.key, _FULL_GRADIENT)
        state = self.init(params, batch.key)
        return self(params, Step(examples, mask, key, (), state, constants=batch.constants))[0]


def _mean_loss(loss_fn: LossFn, params, examples, mask, key):
    losses, metrics = apply_loss(loss_fn, params, examples, key, mask)
    per_step = {name: value for name, value in metrics.items() if value.ndim == 0}
    count = jnp.asarray(losses.size if mask is None else mask.sum(), losses.dtype)

    def mean(values):
        if mask is None:
            return values.mean()
        # Not values * mask: for an infinite loss on padding, this would be NaN.
        return jnp.where(mask, values, 0).sum() / jnp.maximum(count, 1)

    per_example = {name: mean(v) for name, v in metrics.items() if name not in per_step}
    return mean(losses), (count, per_step, per_example)


def _count_clipped(
    transform: optax.GradientTransformation, direction: PyTree, report: StepReport
) -> StepReport:
    """Report whether a transformation that begins with clipping shortens a direction."""
    if (largest := clip_norm_of(transform)) is None:
        return report
    # The same operations as optax's own, which the compiler then does once.
    is_clipped = (optax.tree.norm(direction) > largest).astype(report.loss.dtype)
    return report._replace(metrics={**report.metrics, "clipped_steps": is_clipped})


class LocalResult(NamedTuple):
    """Result of a client's local steps.

    Attributes:
      params: the local params after K_i steps.
      memory: the method's memory after the last step.
      lr_sum: sum of the learning rates of all steps; K_i * lr for a constant learning rate.
      direction_sum: sum of the steps' directions before ``transform``, each times its learning
        rate; None if ``local_steps`` was not asked for it.
      report: name -> (total, weight); a metric of the round is sum(total) / sum(weight). The entry
        ``LOCAL_PARAMS`` is no metric; it has ``params``, for wrappers.
    """

    params: Params
    memory: PyTree
    lr_sum: jax.Array
    report: dict[str, Any]
    direction_sum: PyTree | None = None

    def untransformed(self, delta: Params) -> PyTree:
        """Return the sum of lr_k * direction_k; without a step transform it is ``delta``.

        Divided by ``lr_sum`` it is the mean direction, in the units of a gradient. ``delta`` is
        not: with momentum or Adam a client goes another way than its gradients say.

        Args:
          delta: x - y, how far the steps moved the client.
        """
        return delta if self.direction_sum is None else self.direction_sum


def metrics_of(report: dict[str, Any]) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return a client's report without the local params: name -> (total, weight), float scalars."""
    return {name: value for name, value in report.items() if name != LOCAL_PARAMS}


def _fill(examples: PyTree, mask: jax.Array | None) -> PyTree:
    """Replace masked examples by the first valid one; a NaN in them would survive a factor 0."""
    if mask is None:
        return examples
    place = jnp.where(mask, jnp.arange(mask.shape[0]), jnp.argmax(mask))
    return jax.tree.map(lambda leaf: leaf[place], examples)


def _scan_steps(body, carry, xs, needed):
    """``jax.lax.scan`` over K steps; where none of a block of steps is needed, all are skipped.

    To skip copies all that is carried, on a CPU. A client of few steps in a round of many skips
    often, and ``body`` one step at a time; in blocks of sqrt(K) steps, 2 sqrt(K) times at most.

    Args:
      body: (carry, step) -> (carry, totals, zero in a step that is skipped).
      xs: leaves [K, ...].
      needed: bool [K]; None: ``body`` decides alone.
    """
    num_steps = xs[0].shape[0]
    if needed is None or num_steps < _MANY_STEPS:
        return jax.lax.scan(body, carry, xs)
    size = math.isqrt(num_steps - 1) + 1
    extra = -num_steps % size

    def blocks(leaf):
        padding = jnp.zeros((extra, *leaf.shape[1:]), leaf.dtype)  # of masks: not taken
        return jnp.concatenate([leaf, padding]).reshape(-1, size, *leaf.shape[1:])

    xs, needed = jax.tree.map(blocks, xs), blocks(needed).any(1)
    take_block, (_, totals) = trace_once(
        functools.partial(jax.lax.scan, body), carry, jax.tree.map(lambda leaf: leaf[0], xs)
    )

    def skip(carry, block):
        return carry, tree.zeros_like(totals)

    def take_or_skip(carry, block):
        is_needed, steps = block
        return jax.lax.cond(is_needed, take_block, skip, carry, steps)

    carry, totals = jax.lax.scan(take_or_skip, carry, (needed, xs))
    return carry, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), totals)


def local_steps(
    direction: Direction,
    gradient: Gradient,
    params: Params,
    batch: ClientBatch,
    lr: Scalar | Callable[[jax.Array, jax.Array], jax.Array],
    memory: PyTree = (),
    transform: optax.GradientTransformation | None = None,
    sum_directions: bool = False,
) -> LocalResult:
    """Take the client's K_i local steps ``y <- y - lr * direction(y, step)``.

    A masked step leaves the params and all carried values exactly unchanged. If the batch has a
    step mask and clients run one after the other, masked steps are not computed. If clients are
    batched, steps are computed until the client with the most steps has finished.

    Args:
      direction: (y, step) -> (direction of descent, report); it computes the gradients of the step.
      gradient: creates the initial state of the gradient transform.
      params: the client's initial params.
      batch: the client's mini-batches, with examples [K, B, ...].
      lr: learning rate, or a function of (k, K_i), where k is the number of earlier steps.
      memory: initial ``step.memory``; () if the method carries nothing.
      transform: optax transformation of the direction, with weight decay at y. Its state is
        initialised in every call. None: no transformation.
      sum_directions: with a ``transform``, add up the directions that it is given.

    Raises:
      ValueError: as ``initial_state``.
    """
    sum_directions = sum_directions and transform is not None

    def take(carry, step_index, examples, mask):
        y, carried, transform_state, descent_state, summed, taken_before = carry
        key = fold_in(batch.key, step_index)
        step = Step(examples, mask, key, carried, transform_state, batch.measures, batch.constants)
        descent, report = check_parts("a direction", direction(y, step), "direction", "StepReport")
        if not isinstance(report, StepReport):
            raise ValueError(
                f"a direction returned a {type(report).__name__} as StepReport; it must return the "
                "report of its first gradient."
            )
        check_direction(descent, y)
        check_memory(report.memory, carried)
        before = descent
        if transform is not None:
            report = _count_clipped(transform, descent, report)
            descent, descent_state = transformed(transform, descent, descent_state, y)
        rate = lr(taken_before, batch.num_steps) if callable(lr) else lr
        rate = jnp.asarray(rate, report.loss.dtype)
        if sum_directions:
            summed = tree.add_scaled(summed, rate, before)
        count = report.num_examples
        of_examples = {name: value * count for name, value in report.example_metrics.items()}
        totals = (report.loss * count, count, rate, report.metrics, of_examples)
        y = tree.descend(y, rate, descent)
        carry = (y, report.memory, report.transform_state, descent_state, summed, taken_before + 1)
        return carry, totals

    def body(carry, xs):
        step_index, examples, mask, taken = xs
        # Not inside the condition: batched, it would copy the source for each client.
        examples = gather(_fill(examples, mask), batch.source)
        if taken is None and mask is None:
            return take(carry, step_index, examples, mask)
        if taken is None:  # steps without examples are rare, and a select compiles faster
            is_taken = mask.any()
            after, totals = take(carry, step_index, examples, mask)
            return tree.where(is_taken, after, carry), tree.zero_unless(is_taken, totals)
        take_step, (_, totals) = trace_once(take, carry, step_index, examples, mask)

        def skip(carry):
            return carry, tree.zeros_like(totals)

        def take_or_skip(carry):
            given = step_index, examples, mask
            return jax.lax.cond(taken, lambda carry: take_step(carry, *given), skip, carry)

        if batch.longest is None:
            return take_or_skip(carry)
        # Under vmap ``taken`` differs between clients, so that both branches are computed;
        # ``longest`` does not.
        return jax.lax.cond(step_index < batch.longest, take_or_skip, skip, carry)

    xs = (jnp.arange(batch.max_steps), batch.examples, batch.example_mask, batch.step_mask)
    descent_state = initial_state(transform, params, batch.key)
    zeros = tree.zeros_like(params) if sum_directions else ()
    state = gradient.init(params, batch.key)
    carry = (params, memory, state, descent_state, zeros, jnp.zeros((), jnp.int32))
    needed = batch.step_mask if batch.longest is None else None  # one client after the other
    (y, memory, _, _, summed, _), totals = _scan_steps(body, carry, xs, needed)
    totals = jax.tree.map(lambda total: total.sum(0), totals)
    loss, examples, lr_sum, metrics, example_metrics = totals
    moved = jax.tree.leaves(tree.subtract(y, params))
    is_statistic = jax.tree.leaves(running_statistics(params))  # which follow the data
    moved = [leaf for leaf, no in zip(moved, is_statistic, strict=True) if not no]
    one = jnp.ones_like(lr_sum)
    steps = batch.num_steps.astype(lr_sum.dtype)
    report = {
        LOCAL_PARAMS: y,
        "loss": (loss, examples),
        "local_steps": (steps, one),
        "client_drift": (tree.norm(moved, squared=True), one),
        **{name: (total, steps) for name, total in metrics.items()},
        **{name: (total, examples) for name, total in example_metrics.items()},
    }
    return LocalResult(y, memory, lr_sum, report, summed if sum_directions else None)
