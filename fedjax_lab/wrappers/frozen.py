"""Weights that the loss reads and nobody trains: a frozen body, the model under its adapters.

A round trains ``params``. What stays as it is (most of a pretrained model) is no part of them, so
that no message, no client's row and no optimiser has a place for it; but closed over by the loss it
would be a constant of every program, written out in its text. Here it is an argument.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_lab.clients.metrics import apply_loss, takes_mask
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import ClientBatch, CohortBatch, Key, LossFn, Params, Personal, PyTree

# (params, examples [B, ...], key, frozen) -> what a ``LossFn`` returns; it may name ``mask``
FrozenLossFn = Callable[..., Any]


@suggest_keywords
def with_frozen(
    build: Callable[[LossFn], Algorithm], loss_fn: FrozenLossFn, frozen: PyTree
) -> Algorithm:
    """A method whose loss reads weights that are not trained.

    The rounds of ``simulate`` and ``sweep`` have one copy of ``frozen`` on each device that takes
    part: the caller's own arrays on a single one. It is an argument of every program, and donated
    to none. It rides in ``state.frozen``, is in no checkpoint, and is no part of
    ``algorithm.params(state)``; bytes count ``params`` alone. A run directory knows it by its hash
    and is not gone on with under other weights: keep them yourself. In a sweep, all runs share it.

    If you compile rounds yourself, call ``algorithm.init`` outside of the program, where ``frozen``
    would be a constant, and do not donate the state: your own arrays are in it.

    Other wrappers go around the result or into ``build``. ``build_evaluation`` takes ``frozen`` as
    well; what sees a state (``diagnose``, ``build_personal_evaluation``) finds it there.

    Args:
      build: loss function of (params, examples, key) -> the method, such as
        ``functools.partial(algorithms.scaffold, client_lr=0.1)``. Methods that take a model in
        place of a loss (MOON, FedMLB) have no such function. It is called anew wherever a client's
        half is traced, with a loss that has the traced weights in hand.
      loss_fn: (params, examples [B, ...], key, frozen) -> per-example losses, float [B], or
        (losses, metrics). One that names an argument ``mask`` gets bool [B]: which are real.
      frozen: pytree of arrays of any dtype; or their shapes, for ``fedjax_lab.plan`` alone.

    Raises:
      TypeError: ``build`` or ``loss_fn`` is no function, ``build`` takes a model or returns no
        ``Algorithm``, or a leaf of ``frozen`` is no array.
      ValueError: ``frozen`` has no leaves, or the method has frozen weights already.
    """
    for name, function in (("build", build), ("loss_fn", loss_fn)):
        if not callable(function) or isinstance(function, Algorithm):
            kind = type(function).__name__
            what = (
                "(loss_fn) -> Algorithm" if name == "build" else "(params, examples, key, frozen)"
            )
            raise TypeError(f"{name} is of the type {kind}; it must be a function {what}.")
    if _first_parameter(build) == "model":
        raise TypeError(
            "build takes a model and makes a loss of its own, as moon and fedmlb do; with_frozen "
            "takes methods that are given a loss function."
        )
    leaves = jax.tree_util.tree_leaves_with_path(frozen)
    if not leaves:
        raise ValueError("frozen has no leaves; it must hold at least one array.")
    for path, leaf in leaves:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
            where = jax.tree_util.keystr(path)
            raise TypeError(f"frozen{where} is of the type {type(leaf).__name__}, not an array.")

    def method(weights: PyTree) -> Any:
        """The method around a loss that has the weights in hand."""

        def bound(params: Params, examples: PyTree, key: Key) -> Any:
            return loss_fn(params, examples, key, weights)

        def bound_with_mask(params: Params, examples: PyTree, key: Key, mask: jax.Array) -> Any:
            return loss_fn(params, examples, key, weights, mask=mask)

        return build(bound_with_mask if takes_mask(loss_fn) else bound)

    algorithm = method(frozen)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"build returned a {type(algorithm).__name__}; it must return an Algorithm."
        )
    if jax.tree.leaves(algorithm.frozen):
        raise ValueError(
            f"build returned {algorithm.name}, which has frozen weights already; give all of them "
            "to one with_frozen."
        )

    def start(params, num_clients, batch):
        # Without a batch there is no loss to take, and nothing is frozen.
        inner = algorithm if batch is None else method(_held(batch))
        return inner.start(params, num_clients, batch)

    def loss(params: Params, examples: PyTree, key: Key, frozen: PyTree) -> Any:
        return apply_loss(method(frozen).loss_fn, params, examples, key)

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
    """The phase whose clients find the frozen weights in their batch."""

    def client_update(received, row, batch):
        inner = method(_held(batch))
        return inner.phases[number].client_update(received, row, batch)

    return phase._replace(client_update=client_update)


def _tuned_with(method: Callable[[PyTree], Any], personal: Personal | None) -> Personal | None:
    """The same models of clients, fine-tuned with the frozen weights of the client's batch."""
    if personal is None or personal.fine_tune is None:
        return personal

    def fine_tune(params, batch):
        return method(_held(batch)).personal.fine_tune(params, batch)

    return personal._replace(fine_tune=fine_tune)


def _held(batch: ClientBatch | CohortBatch) -> PyTree:
    if not jax.tree.leaves(batch.frozen):
        raise RuntimeError(
            "the loss of with_frozen has no weights to read: its method was called with a state "
            "whose field ``frozen`` is (); algorithm.init and result.state have it."
        )
    return batch.frozen


def _first_parameter(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except ValueError:  # some built-in functions have none
        return None
