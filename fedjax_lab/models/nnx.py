"""Models from flax NNX modules."""

from collections.abc import Callable

import jax
from flax import nnx

from fedjax_lab.machine.keys import seeded
from fedjax_lab.models.base import Model
from fedjax_lab.models.lowering import lowered
from fedjax_lab.types import Key, Params


def from_nnx(build: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """Create a ``Model`` from a function that builds a flax NNX module.

    The module's call takes ``x`` [B, ...] and returns logits [B, C]. With a key it trains
    (``module.train()``), and the key seeds all its streams of random numbers. Without a key it
    evaluates. ``params`` is the ``nnx.State`` of its parameters.

    Args:
      build: ``nnx.Rngs`` -> module, such as ``lambda rngs: Net(rngs=rngs)``.

    Raises:
      TypeError: ``build`` does not return a module.
      ValueError: the module has variables besides parameters and random numbers, such as
        BatchNorm's running statistics, which no client or server would average.
    """
    module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    if not isinstance(module, nnx.Module):
        raise TypeError(f"build returns {module}; it must return an nnx.Module.")
    graph = nnx.graphdef(module)
    others = nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    kinds = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(others)})
    if kinds:
        raise ValueError(
            f"{type(module).__name__} has variables of the kind {', '.join(kinds)}; only "
            "parameters are allowed. nnx.GroupNorm and nnx.LayerNorm have no others; BatchNorm "
            "with its statistics among the parameters is fedjax_lab.models.batch_norm.BatchNorm, "
            "of flax linen."
        )

    def init(key: Key, example_x: jax.Array) -> Params:
        return jax.jit(lambda key: nnx.state(build(nnx.Rngs(key)), nnx.Param))(key)

    def apply(params: Params, x: jax.Array, key: Key | None = None, /) -> jax.Array:
        def outputs(params: Params, x: jax.Array, key: Key | None) -> jax.Array:
            streams = nnx.state(build(nnx.Rngs(seeded(0) if key is None else key)), nnx.RngState)
            net = nnx.merge(graph, params, streams)
            if key is None:
                net.eval()
            else:
                net.train()
            return net(x)

        return lowered(outputs)(params, x, key)

    return Model(init, apply)
