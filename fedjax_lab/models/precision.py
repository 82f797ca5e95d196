"""Mixed precision: a model that computes in bfloat16 with float32 parameters.

Micikevicius et al.: Mixed Precision Training. ICLR 2018; with bfloat16 (Kalamkar et al.: A Study
of BFLOAT16 for Deep Learning Training, 2019). Its exponents are those of float32, so losses need
no scaling.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.models.base import Apply, Model, with_mask
from fedjax_lab.models.batch_norm import running_statistics
from fedjax_lab.types import Key, Params

COMPUTE_DTYPES = ("float32", "bfloat16")


def mixed_precision(model: Model, dtype: Any = "bfloat16") -> Model:
    """Create a ``Model`` with the same params that computes in ``dtype``.

    Params and float inputs are cast to ``dtype``, and outputs to float32. So losses are float32,
    and gradients have the params' dtype. The state of a method (params, momentum, control variates,
    residuals) and its messages keep their dtypes. The layers of this package compute the statistics
    of norms, the softmax of attention and an LSTM's cell state in float32. Running statistics are
    never cast.

    Args:
      model: any model; ``features``, ``head`` and ``blocks`` are wrapped like ``apply``.
      dtype: "bfloat16", or "float32" for the unchanged model.

    Raises:
      ValueError: ``dtype`` is neither.
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in COMPUTE_DTYPES:
        raise ValueError(
            f"dtype is {name}; it must be float32 or bfloat16 (float16 would need losses scaled)."
        )
    if name == "float32":
        return model

    def low(x: Any) -> Any:
        return x.astype(name) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x

    def wrap(apply: Apply) -> Apply:
        def run(
            params: Params,
            x: jax.Array,
            key: Key | None = None,
            /,
            *,
            mask: jax.Array | None = None,
        ) -> jax.Array:
            is_statistic = running_statistics(params)
            params = jax.tree.map(lambda kept, p: p if kept else low(p), is_statistic, params)
            return with_mask(apply, mask)(params, low(x), key).astype(jnp.float32)

        return run

    return model._replace(
        apply=wrap(model.apply),
        features=None if model.features is None else wrap(model.features),
        head=None if model.head is None else wrap(model.head),
        blocks=None if model.blocks is None else tuple(map(wrap, model.blocks)),
    )
