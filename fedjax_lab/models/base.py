"""The model interface: pure functions on a pytree of parameters, from any library.

Axes: B examples, C classes, F features; L words of a sequence.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax

from fedjax_lab.machine.keys import compact
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.types import Key, Params


class Apply(Protocol):
    """``(params, x [B, ...], key=None) -> [B, ...]``; without a key there is no dropout."""

    def __call__(self, params: Params, x: jax.Array, key: Key | None = None, /) -> jax.Array:
        """Run the model, or a part of it, on one mini-batch."""


class Model(NamedTuple):
    """What algorithms, losses and evaluation know about a model.

    Attributes:
      init: ``(key, example_x) -> params``. ``example_x`` is a batch [B, ...], as for ``apply``;
        one row will do (``train.x[:1]``), also in the integer dtype in which images are stored:
        its values are not used. ``params`` is a pytree of float arrays.
      apply: ``(params, x, key=None) -> logits`` float [B, C], of language models [B, L, C].
        ``key`` None means evaluation: no dropout. With a key, the key is consumed by dropout (if
        the model has any).
      features: ``(params, x, key=None) -> representation`` float [B, F], the input of the last
        dense layer; None where the model has no such split.
      head: ``(params, representation, key=None) -> logits`` float [B, C]: the last dense layer.
        ``head(params, features(params, x, key), key)`` equals ``apply(params, x, key)``.
      blocks: functions ``(params, h [B, ...], key=None) -> h``. One after the other, with the
        same params and the same key, they equal ``apply``; None where nobody has said where the
        model may be cut. Each reads its own parameters out of the whole ``params``.
    """

    init: Callable[[Key, jax.Array], Params]
    apply: Apply
    features: Apply | None = None
    head: Apply | None = None
    blocks: Sequence[Apply] | None = None


def from_linen(module: nn.Module) -> Model:
    """Create a ``Model`` from a flax linen module.

    The module's call takes ``x`` [B, ...] and returns logits [B, C]. An argument ``train`` or
    ``deterministic``, where it has one, is set by whether there is a key; the key is the rng
    named "dropout". A module with both methods ``features(x)`` and ``head(h)`` gets these fields
    of the ``Model`` too; its call must then equal ``head(features(x))``. If it also has a field
    ``blocks``, modules of which ``features`` is made, they and the head are the ``Model``'s
    blocks; its call must then equal the head of the blocks one after the other.

    Args:
      module: a linen module whose only variables are parameters.

    Raises:
      TypeError: ``module`` is not a linen module (at construction).
      ValueError: it has variables other than parameters, such as BatchNorm's running
        statistics, which no client or server of the library would average (when ``init`` runs).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {module!r}; it must be an instance of flax.linen.Module.")

    @jax.jit  # the forward pass, whose result nobody reads, is then never computed
    def init_variables(key: Key, x: jax.Array) -> dict[str, Any]:
        mode: dict[str, Any] = _mode(type(module).__call__, training=False)
        return dict(module.init({"params": compact(key)}, x, **mode))

    def init(key: Key, example_x: jax.Array) -> Params:
        keep_by_default()
        variables = init_variables(key, example_x)
        params = variables.pop("params", {})
        if variables:
            raise ValueError(
                f"module {type(module).__name__} has variables in {', '.join(sorted(variables))}; "
                "only parameters are allowed. fedjax_lab.models.batch_norm.BatchNorm keeps its "
                "running statistics among them; GroupNorm and LayerNorm have none."
            )
        return params

    def part(function: Callable[..., Any], call: Callable[..., Any]) -> Apply:
        """``call`` of the module with its parameters, and the flag that ``function`` has."""

        def run(params: Params, x: jax.Array, key: Key | None = None, /) -> jax.Array:
            mode: dict[str, Any] = _mode(function, training=key is not None)
            rngs = None if key is None else {"dropout": compact(key)}
            outputs: Any = module.apply({"params": params}, x, rngs=rngs, method=call, **mode)
            return outputs

        return run

    def method(name: str) -> Apply:
        function = getattr(type(module), name)
        return part(function, function)

    def block(index: int, function: Callable[..., Any]) -> Apply:
        return part(function, lambda module, h, **mode: module.blocks[index](h, **mode))

    parts: dict[str, Any] = {
        name: method(name)
        for name in ("features", "head")
        # A dataclass field called ``features`` (a width, in flax) is no method.
        if inspect.isfunction(getattr(type(module), name, None))
    }
    if len(parts) < 2:
        return Model(init, method("__call__"))
    blocks = getattr(module, "blocks", None)
    if isinstance(blocks, Sequence) and all(isinstance(b, nn.Module) for b in blocks):
        inner = [block(i, type(b).__call__) for i, b in enumerate(blocks)]
        parts["blocks"] = (*inner, parts["head"])
    return Model(init, method("__call__"), **parts)


def _mode(function: Callable[..., Any], training: bool) -> dict[str, bool]:
    """The flag by which ``function`` tells training from evaluation, if it has one."""
    flags = {"train": training, "deterministic": not training}
    return {name: flags[name] for name in inspect.signature(function).parameters if name in flags}
