"""What a cell's method computes in two rounds of a fixed small problem.

A stored cell has the fingerprint of the code that made it. Where today's code has another one, the
method has changed since, and the cell is old. Refactoring changes no fingerprint, and neither does
another machine: the comparison is to a tolerance.
"""

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.study import Column, Method
from fedjax_lab import CohortBatch
from fedjax_lab.command.build import build_algorithm
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.factories import find

# What decides a round of a given batch, of all settings of a run.
SETTINGS = (
    *("algorithm", "option", "server_lr", "client_lr_schedule"),
    *("clip_norm", "weight_decay", "as_published", "weights"),
)
TOLERANCE = 2e-3  # float32, and other compilers
_CLIENT_LR, _ROUNDS = 0.1, 2
_CLIENTS, _COHORT, _STEPS, _BATCH, _FEATURES, _CLASSES = 100, 10, 3, 4, 5, 3


def specification(method: Method, column: Column) -> str | None:
    """Return what a cell's fingerprint depends on, as JSON; None: it has none.

    A method that looks inside its model has none.

    Args:
      method: the cell's row.
      column: the cell's column.
    """
    if "model" in inspect.signature(find("algorithm", method.algorithm)).parameters:
        return None
    grids = {**method.grid, **method.then}
    point = {**{name: values[0] for name, values in grids.items()}, **method.start}
    if method.personal is not None:
        own = {name: value for name, value in point.items() if name != "client_lr"}
        return json.dumps({"build": _path(method.personal.build), "option": own}, sort_keys=True)
    settings = method.settings_of(column, point)
    chosen = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
    wrapped = {} if method.wrap is None else {"wrap": _path(method.wrap)}
    return json.dumps({**chosen, **wrapped}, sort_keys=True)


@functools.cache
def fingerprint(specified: str) -> tuple[float, ...]:
    """Return the norm of the change of the params, a projection of it, and the loss.

    Where a study wraps or builds the method itself, the change is also that of the clients' states.

    Args:
      specified: from ``specification``.
    """
    settings = json.loads(specified)
    wrap, build = (settings.pop(name, None) for name in ("wrap", "build"))
    weighted = settings.pop("weights", None) == "examples"
    if build is not None:
        algorithm = _named(build)(_loss_fn, client_lr=_CLIENT_LR, **settings["option"])
    else:
        settings = {**settings, "client_lr": _CLIENT_LR, "rounds": _ROUNDS}
        algorithm = build_algorithm(RunConfig.from_dict(settings).resolve(), _loss_fn)
    if wrap is not None:
        algorithm = _named(wrap)(algorithm)
    start = {
        "classifier" if build else "kernel": jnp.sin(
            jnp.arange(_FEATURES * _CLASSES, dtype=jnp.float32)
        ).reshape(_FEATURES, _CLASSES),
        "bias": jnp.cos(jnp.arange(_CLASSES, dtype=jnp.float32)),
    }
    before = state = algorithm.init(start, _CLIENTS)
    round_fn = jax.jit(algorithm.round_fn)
    for number in range(_ROUNDS):
        state, metrics = round_fn(state, _batch(number, weighted))
    change = jax.tree.map(jnp.subtract, algorithm.params(state), start)
    leaves = jax.tree.leaves(change)
    if wrap is not None or build is not None:
        leaves += jax.tree.leaves(jax.tree.map(jnp.subtract, state.clients, before.clients))
    vector = np.concatenate([np.ravel(leaf) for leaf in leaves])
    direction = np.cos(np.arange(vector.size))
    found = (np.linalg.norm(vector), vector @ direction, metrics["loss"])
    return tuple(float(f"{float(value):.6g}") for value in found)


def _path(function: Callable[..., Any]) -> str:
    """Return where a function of a study is, as "module:name"."""
    return f"{function.__module__}:{function.__name__}"


def _named(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two fingerprints agree to the tolerance.

    Args:
      one, other: from ``fingerprint``.
    """
    size = max(abs(one[0]), abs(other[0]))
    return bool(np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * size, equal_nan=True))


def _loss_fn(params: Any, examples: Any, key: Any) -> jax.Array:
    del key
    kernel = params["classifier"] if "classifier" in params else params["kernel"]
    logits = examples["x"] @ kernel + params["bias"][None]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), examples["y"][:, None], 1)[:, 0]


def _batch(number: int, weighted: bool) -> CohortBatch:
    """Mini-batches that depend on the client, as they do in a run."""
    ids = (np.arange(_COHORT) * (3 + number) + number).astype(np.int32)
    shape = (_COHORT, _STEPS, _BATCH, _FEATURES)
    place = np.arange(np.prod(shape)).reshape(shape) + 1000.0 * number
    examples = {
        "x": jnp.asarray(np.sin(place * place) + 0.1 * ids[:, None, None, None], jnp.float32),
        "y": jnp.asarray((ids[:, None, None] + place[..., 0].astype(int)) % _CLASSES, jnp.int32),
    }
    more = {"weights": jnp.arange(1.0, _COHORT + 1)} if weighted else {}
    key = jax.random.key(number)
    return CohortBatch(jnp.asarray(ids), examples, key, jnp.int32(number), **more)
