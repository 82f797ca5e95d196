"""Frozen weights, which the loss reads but no client trains, such as the model below adapters.

A round trains ``params``. Weights that are not trained, such as most of a pretrained model, should
not be among them: they would take space in messages, client state and optimisers. If the loss
closed over them, they would be constants in the text of every program. Here they are an argument.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_lab.clients.metrics import (
    apply_loss,
    constants_argument,
    mask_argument,
    with_constants,
)
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import other_arguments, suggest_keywords
from fedjax_lab.types import ClientBatch, CohortBatch, Key, LossFn, Params, Personal, PyTree

# (params, examples [B, ...], key, frozen) -> as ``LossFn``; it may have an argument ``mask``
FrozenLossFn = Callable[..., Any]


@suggest_keywords
def with_frozen(
    build: Callable[[LossFn], Algorithm], loss_fn: FrozenLossFn, frozen: PyTree
) -> Algorithm:
    """Build a method whose loss reads frozen weights.

    In ``simulate`` and ``sweep``, each device that runs clients has one copy of ``frozen``; with a
    single device, the caller's own arrays. The weights are an argument of every program and are not
    donated. They are in ``state.frozen``, but not in ``algorithm.params(state)`` or in checkpoints,
    and not in byte counts. A run directory records their hash, and does not resume with other
    weights; store the weights yourself. In a sweep, all runs share them.

    If you compile rounds yourself, call ``algorithm.init`` outside the program, because inside
    ``frozen`` would be a constant. Do not donate the state, which has your own arrays.

    Apply other wrappers to the result or inside ``build``. ``build_evaluation`` has an argument
    ``frozen``, too. Functions of a state (``diagnose``, ``build_personal_evaluation``) find the
    weights there.

    Args:
      build: function of a loss (params, examples, key) that returns the method, such as
        ``functools.partial(algorithms.scaffold, client_lr=0.1)``. Methods of a model in place of a
        loss (MOON, FedMLB) are not supported. ``build`` is called again whenever a client's half is
        traced, with a loss that has the traced weights.
      loss_fn: (params, examples [B, ...], key, frozen) -> per-example losses, float [B], or
        (losses, metrics). If it has an argument named ``mask``, it gets bool [B], True for real
        examples; if it has one named ``constants``, the client's constants.
      frozen: pytree of arrays of any dtype; or their shapes, only for ``fedjax_lab.plan``.

    Raises:
      TypeError: ``build`` or ``loss_fn`` is no function, ``loss_fn`` takes other arguments,
        ``build`` takes a model or returns no ``Algorithm``, or a leaf of ``frozen`` is no array.
      ValueError: ``frozen`` has no leaves, or the method has frozen weights already.
    """
    for name, function, what in (
        ("build", build, "(loss_fn) -> Algorithm"),
        ("loss_fn", loss_fn, "(params, examples, key, frozen)"),
    ):
        if not callable(function) or isinstance(function, Algorithm):
            kind = type(function).__name__
            raise TypeError(f"{name} is of the type {kind}; it must be a function {what}.")
    if found := other_arguments(loss_fn, 4, "mask", "constants"):
        raise TypeError(
            f"loss_fn takes ({found}); with frozen weights it must take (params, examples, key, "
            "frozen), and may name further arguments mask and constants."
        )
    if _first_parameter(build) == "model":
        raise TypeError(
            "build takes a model and makes a loss of its own, as moon and fedmlb do; with_frozen "
            "requires a method of a loss function."
        )
    leaves = jax.tree_util.tree_leaves_with_path(frozen)
    if not leaves:
        raise ValueError("frozen has no leaves; it must have at least one array.")
    for path, leaf in leaves:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
            where = jax.tree_util.keystr(path)
            raise TypeError(f"frozen{where} is of the type {type(leaf).__name__}, not an array.")

    def method(weights: PyTree) -> Any:
        """Build the method with a loss that has the weights."""

        def bound(
            params: Params,
            examples: PyTree,
            key: Key,
            mask: jax.Array | None = None,
            constants: PyTree = (),
        ) -> Any:
            size = jax.tree.leaves(examples)[0].shape[0]
            named = mask_argument(loss_fn, mask, size) | constants_argument(loss_fn, constants)
            return loss_fn(params, examples, key, weights, **named)

        bound.original = loss_fn  # type: ignore[attr-defined]
        return build(bound)

    algorithm = method(frozen)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"build returned a {type(algorithm).__name__}; it must return an Algorithm."
        )
    if jax.tree.leaves(algorithm.frozen):
        raise ValueError(
            f"build returned {algorithm.name}, which has frozen weights already; pass all of them "
            "to one with_frozen."
        )

    def start(params, num_clients, batch):
        # Without a batch, no loss is computed, and no frozen weights are needed.
        inner = algorithm if batch is None else method(_held(batch))
        return inner.start(params, num_clients, batch)

    def loss(
        params: Params,
        examples: PyTree,
        key: Key,
        frozen: PyTree,
        mask: jax.Array | None = None,
        constants: PyTree = (),
    ) -> Any:
        own = with_constants(method(frozen).loss_fn, constants)
        return apply_loss(own, params, examples, key, mask)

    loss.original = loss_fn  # type: ignore[attr-defined]
    phases = (_given(method, number, phase) for number, phase in enumerate(algorithm.phases))
    return dataclasses.replace(
        algorithm,
        name=f"{algorithm.name}+frozen",
        start=start,
        phases=tuple(phases),
        personal=_tuned_with(method, algorithm.personal),
        loss_fn=None if algorithm.loss_fn is None else loss,
        frozen=frozen,
    )


def _given(method: Callable[[PyTree], Any], number: int, phase: Phase) -> Phase:
    """Wrap a phase so that the method gets the frozen weights of the client's batch."""

    def client_update(received, row, batch):
        inner = method(_held(batch))
        return inner.phases[number].client_update(received, row, batch)

    return phase._replace(client_update=client_update)


def _tuned_with(method: Callable[[PyTree], Any], personal: Personal | None) -> Personal | None:
    """Wrap personal models so that fine-tuning uses the frozen weights of the client's batch."""
    if personal is None or personal.fine_tune is None:
        return personal

    def fine_tune(params, batch):
        return method(_held(batch)).personal.fine_tune(params, batch)

    return personal._replace(fine_tune=fine_tune)


def _held(batch: ClientBatch | CohortBatch) -> PyTree:
    if not jax.tree.leaves(batch.frozen):
        raise RuntimeError(
            "the loss of with_frozen has no frozen weights: the field ``frozen`` of the state is "
            "(). Use a state of algorithm.init or result.state."
        )
    return batch.frozen


def _first_parameter(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except ValueError:  # some built-in functions have none
        return None
