"""Models from flax NNX modules."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from fedjax_lab.machine.keys import seeded
from fedjax_lab.models.base import Model, mode_of
from fedjax_lab.models.lowering import lowered
from fedjax_lab.signatures import parameter_of
from fedjax_lab.types import Key, Params


def from_nnx(build: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """Create a ``Model`` from a function that builds a flax NNX module.

    The module's call takes ``x`` [B, ...] and returns logits [B, C]. With a key it trains
    (``module.train()``), and the key seeds all its streams of random numbers. Without a key it
    evaluates. If the call has an argument ``train``, ``training``, ``is_training`` or
    ``deterministic``, it is set, too. An argument ``rngs`` of the call gets the key's streams if it
    has no default, or in training if the module has no streams of its own. In training, an argument
    ``example_mask`` of the call gets the mask of the mini-batch, bool [B], or None: all examples
    are real. ``params`` is the ``nnx.State`` of its parameters.

    Args:
      build: ``nnx.Rngs`` -> module, such as ``lambda rngs: Net(rngs=rngs)``.

    Raises:
      TypeError: ``build`` is not a function, or does not return a module.
      ValueError: the module has variables besides parameters and random numbers, such as
        BatchNorm's running statistics, which no client or server would average.
    """
    if not callable(build) or isinstance(build, nnx.Module):
        raise TypeError(
            f"build is of type {type(build).__name__}; it must be a function that returns a new "
            "nnx.Module, such as lambda rngs: Net(rngs=rngs)."
        )
    module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    if not isinstance(module, nnx.Module):
        raise TypeError(f"build returns {module}; it must return an nnx.Module.")
    call = type(module).__call__
    others = nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    kinds = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(others)})
    if kinds:
        raise ValueError(
            f"{type(module).__name__} has variables of the kind {', '.join(kinds)}; only "
            "parameters are allowed. nnx.GroupNorm and nnx.LayerNorm have no others; "
            "fedjax_lab.models.batch_norm.normalise_batch makes a BatchNorm with its statistics "
            "among the parameters."
        )

    def init(key: Key, example_x: jax.Array) -> Params:
        return jax.jit(lambda key: nnx.state(build(nnx.Rngs(key)), nnx.Param))(key)

    def apply(
        params: Params, x: jax.Array, key: Key | None = None, /, *, mask: jax.Array | None = None
    ) -> jax.Array:
        def outputs(params: Params, x: jax.Array, key: Key | None) -> jax.Array:
            rngs = nnx.Rngs(seeded(0) if key is None else key)
            module = build(rngs)
            graph, streams = nnx.graphdef(module), nnx.state(module, nnx.RngState)
            net = nnx.merge(graph, params, streams)
            if key is None:
                net.eval()
            else:
                net.train()
            given: dict[str, Any] = mode_of(call, training=key is not None)
            named = parameter_of(call, "rngs")
            is_silent = key is None or jax.tree.leaves(streams)
            if named is not None and (named.default is named.empty or not is_silent):
                given["rngs"] = rngs
            if mask is not None and parameter_of(call, "example_mask") is not None:
                given["example_mask"] = mask
            return net(x, **given)

        return lowered(outputs)(params, x, key)

    return Model(init, apply)
