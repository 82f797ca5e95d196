"""The model interface: pure functions on a pytree of parameters, from any library.

Axes: B examples, C classes, F features; L words of a sequence.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax

from fedjax_lab.data.dtypes import to_device
from fedjax_lab.data.packing import Tokens
from fedjax_lab.machine.keys import compact, stored
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.machine.target import traced_for
from fedjax_lab.models.lowering import lowered
from fedjax_lab.signatures import parameter_of
from fedjax_lab.types import Key, Params


class Apply(Protocol):
    """``(params, x [B, ...], key=None) -> [B, ...]``; without a key there is no dropout.

    It may have a keyword argument ``mask``: bool [B], which examples are real, or None: all. The
    others are padding. The losses of this package pass it on.
    """

    def __call__(self, params: Params, x: jax.Array, key: Key | None = None, /) -> jax.Array:
        """Run the model, or a part of it, on a mini-batch."""


def with_mask(apply: Apply, mask: jax.Array | None) -> Apply:
    """Bind the mask of a mini-batch to a model, if the model has an argument for it.

    Args:
      mask: bool [B]; None: all examples are real.
    """
    if mask is None or parameter_of(apply, "mask") is None:
        return apply
    return functools.partial(apply, mask=mask)  # type: ignore[call-arg]


class Model(NamedTuple):
    """A model as algorithms, losses and evaluation see it.

    Attributes:
      init: ``(key, example_x) -> params``. ``example_x`` is a batch [B, ...], as for ``apply``;
        one row is enough (``train.x[:1]``), and stored images of integers are accepted, because
        its values are not used. ``params`` is a pytree of float arrays.
      apply: ``(params, x, key=None) -> logits`` float [B, C], of language models [B, L, C].
        A key means training and is consumed by dropout, if the model has any. None means
        evaluation: no dropout.
      features: ``(params, x, key=None) -> representation`` float [B, F], the input of the last
        dense layer; None where the model has no such split.
      head: ``(params, representation, key=None) -> logits`` float [B, C]: the last dense layer.
        ``head(params, features(params, x, key), key)`` equals ``apply(params, x, key)``.
      blocks: functions ``(params, h [B, ...], key=None) -> h``, whose composition with the same
        params and the same key equals ``apply``. Each selects its own parameters from the full
        ``params``. None: the model is not divided into blocks.
    """

    init: Callable[[Key, jax.Array], Params]
    apply: Apply
    features: Apply | None = None
    head: Apply | None = None
    blocks: Sequence[Apply] | None = None


def from_linen(module: nn.Module) -> Model:
    """Create a ``Model`` from a flax linen module.

    The module's call takes ``x`` [B, ...] and returns logits [B, C]. The key of ``Model.apply`` is
    the rng named "dropout". If the call has an argument ``train``, ``training``, ``is_training`` or
    ``deterministic``, it is set according to whether there is a key. In training, each module
    inside whose call has an argument ``example_mask`` gets the mask of the mini-batch, bool [B],
    such as ``batch_norm.BatchNorm``.

    A module with both methods ``features(x)`` and ``head(h)`` sets these fields of the ``Model``,
    too; its call must then equal ``head(features(x))``. If it also has a field ``blocks``, the
    modules that ``features`` consists of, then these and the head are the ``Model``'s blocks. The
    call must then equal the composition of the blocks and the head.

    Args:
      module: a linen module whose only variables are parameters.

    Raises:
      TypeError: ``module`` is not a linen module (at construction).
      ValueError: the module has variables other than parameters, such as BatchNorm's running
        statistics, which no client or server would average (when ``init`` runs).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {module!r}; it must be an instance of flax.linen.Module.")

    @jax.jit  # so the forward pass, whose result is not used, is never computed
    def init_variables(key: Key, x: jax.Array) -> dict[str, Any]:
        mode: dict[str, Any] = mode_of(type(module).__call__, training=False)
        return dict(module.init({"params": compact(key)}, x, **mode))

    def init(key: Key, example_x: jax.Array) -> Params:
        keep_by_default()
        put = functools.partial(to_device, "example_x")
        x: Any = jax.tree.map(put, example_x) if isinstance(example_x, Tokens) else put(example_x)
        variables = init_variables(key, x)
        params = variables.pop("params", {})
        if variables:
            raise ValueError(
                f"module {type(module).__name__} has variables in {', '.join(sorted(variables))}; "
                "only parameters are allowed. fedjax_lab.models.batch_norm.BatchNorm keeps its "
                "running statistics among them; GroupNorm and LayerNorm have none."
            )
        return params

    def part(function: Callable[..., Any], call: Callable[..., Any]) -> Apply:
        """Wrap ``call`` of the module with its parameters and the mode flag of ``function``."""

        def run(
            params: Params,
            x: jax.Array,
            key: Key | None = None,
            /,
            *,
            mask: jax.Array | None = None,
        ) -> jax.Array:
            mode: dict[str, Any] = mode_of(function, training=key is not None)
            rngs = None
            if key is not None:  # a CPU reads bits sooner than it hashes them again
                rngs = {"dropout": stored(key) if traced_for().platform == "cpu" else compact(key)}

            def outputs(params: Params, x: jax.Array, rngs: Any) -> Any:
                return module.apply({"params": params}, x, rngs=rngs, method=call, **mode)

            with _passing(mask):
                return lowered(outputs)(params, x, rngs)

        return run

    def method(name: str) -> Apply:
        function = getattr(type(module), name)
        return part(function, function)

    def block(index: int, function: Callable[..., Any]) -> Apply:
        return part(function, lambda module, h, **mode: module.blocks[index](h, **mode))

    parts: dict[str, Any] = {
        name: method(name)
        for name in ("features", "head")
        # A dataclass field called ``features`` (a width, in flax) is not a method.
        if inspect.isfunction(getattr(type(module), name, None))
    }
    if len(parts) < 2:
        return Model(init, method("__call__"))
    blocks = getattr(module, "blocks", None)
    if isinstance(blocks, Sequence) and all(isinstance(b, nn.Module) for b in blocks):
        inner = [block(i, type(b).__call__) for i, b in enumerate(blocks)]
        parts["blocks"] = (*inner, parts["head"])
    return Model(init, method("__call__"), **parts)


def _passing(mask: jax.Array | None) -> AbstractContextManager[None]:
    """Return a context in which the modules that take an ``example_mask`` get this one."""
    if mask is None:
        return nullcontext()

    def pass_on(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__call__" and parameter_of(
            type(context.module).__call__, "example_mask"
        ):
            given = inspect.signature(call).bind_partial(*args, **kwargs).arguments
            kwargs = kwargs if "example_mask" in given else {"example_mask": mask, **kwargs}
        return call(*args, **kwargs)

    return nn.intercept_methods(pass_on)


def mode_of(function: Callable[..., Any], training: bool) -> dict[str, bool]:
    """Return the argument that selects training or evaluation, if ``function`` has one."""
    flags = dict.fromkeys(("train", "training", "is_training"), training)
    flags["deterministic"] = not training
    return {name: flags[name] for name in inspect.signature(function).parameters if name in flags}
