"""What all methods share: common arguments, local training, and the decorator of their factories.

A factory names its own arguments and takes the common ones as they come::

    @factory
    def method(loss_fn: LossFn, *, momentum: Scalar = 0.9, **common: Unpack[Common]) -> Algorithm:
        training = LocalTraining(loss_fn, **common)

To give all methods one more argument, add it to ``Common`` and ``LocalTraining``: signatures, help
and recorded hyper-parameters follow.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Required, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import optax

from fedjax_lab import tree
from fedjax_lab.algorithms.hyper import (
    Symbols,
    at_round,
    at_step,
    check_example_privacy,
    meant_by,
)
from fedjax_lab.checks import check_scalar_or_schedule
from fedjax_lab.clients.local import (
    Direction,
    Gradient,
    LocalResult,
    Step,
    StepReport,
    local_steps,
)
from fedjax_lab.clients.transforms import check_transform
from fedjax_lab.descriptions import describe
from fedjax_lab.round import Phase
from fedjax_lab.signatures import (
    SYNONYMS,
    check_flags,
    described,
    other_arguments,
    show,
    spell_out,
    unknown,
)
from fedjax_lab.types import (
    ClientBatch,
    Cohort,
    LossFn,
    Params,
    PyTree,
    Scalar,
    ScalarOrSchedule,
)

Factory = TypeVar("Factory", bound=Callable[..., Any])


class LocalGradient(NamedTuple):
    """What a local step descends, before the corrections of a method that takes any gradient.

    Attributes:
      at: (local params, step, round) -> (gradient, report).
      gradients: how many gradients of the loss it computes.
    """

    at: Callable[[Params, Step, jax.Array], tuple[PyTree, StepReport]]
    gradients: int = 1


class Common(TypedDict, total=False):
    """Arguments of every method; those that are not required are None by default.

    Attributes:
      client_lr: local learning rate, or a schedule of the round.
      gradient_transform: optax transformation of each mini-batch gradient.
      step_transform: optax transformation of the whole direction of a local step, after the
        method's own terms; its state is new in every round. Random keys in the state of either
        transform are combined with the client's key of the round.
      example_clip: largest norm of each example's gradient in a mini-batch's mean, above 0. Each
        example is then given to the loss alone.
      example_noise: with it, standard deviation of the Gaussian noise on the sum of these, in
        clips: DP-SGD inside the client. Not for methods that take several gradients in a step;
        those that take a full gradient as well need ``full_examples``, and it is one use more.
    """

    client_lr: Required[ScalarOrSchedule]
    gradient_transform: optax.GradientTransformation | None
    step_transform: optax.GradientTransformation | None
    example_clip: Scalar | None
    example_noise: Scalar | None


_RATES = ("client_lr", "server_lr")
# Not recorded at these defaults: a run recorded before the arguments existed stays the same.
_OMITTED_AT_DEFAULT = {"example_clip": None, "example_noise": None, "mean_from": "gradients"}


class LocalTraining:
    """A client's local training: a loss function with the ``Common`` arguments.

    Attributes:
      gradient: of the mean loss over a mini-batch, transformed.
      client_lr: local learning rate, or a schedule of the round.
      step_transform: of the whole direction of a local step, or None.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        *,
        client_lr: ScalarOrSchedule,
        gradient_transform: optax.GradientTransformation | None = None,
        step_transform: optax.GradientTransformation | None = None,
        example_clip: Scalar | None = None,
        example_noise: Scalar | None = None,
    ):
        check_scalar_or_schedule("client_lr", client_lr)
        check_transform("gradient_transform", gradient_transform)
        check_transform("step_transform", step_transform)
        check_example_privacy(example_clip, example_noise)
        self.gradient = Gradient(loss_fn, gradient_transform, example_clip, example_noise)
        self.client_lr = client_lr
        self.step_transform = step_transform

    def rate(self, round: jax.Array) -> Scalar:
        """Return the local learning rate of a round.

        Args:
          round: int32 scalar, counted from 0.
        """
        return at_round(self.client_lr, round)

    def rate_at_step(self, step: jax.Array, steps: int) -> Scalar:
        """Return the local learning rate at a global local step.

        Args:
          step: int32 scalar, the global local step, counted from 0.
          steps: as in ``hyper.at_step``.
        """
        return at_step(self.client_lr, step, steps)

    def reported_rate(self, cohort: Cohort) -> jax.Array:
        """Return the metric ``client_lr``, a scalar, for rates of the global local step.

        Args:
          cohort: cohort of the round, of whose first local step it is the rate.
        """
        steps = cohort.max_steps
        return jnp.asarray(self.rate_at_step(cohort.round * steps, steps), cohort.weights.dtype)

    @property
    def local_gradient(self) -> LocalGradient:
        """The plain gradient."""
        return LocalGradient(lambda params, step, round: self.gradient(params, step))

    def steps(
        self,
        params: Params,
        batch: ClientBatch,
        direction: Direction | None = None,
        *,
        lr: Scalar | Callable[[jax.Array, jax.Array], jax.Array] | None = None,
        memory: PyTree = (),
        transform: optax.GradientTransformation | None = None,
        sum_directions: bool = False,
    ) -> LocalResult:
        """Take the client's local steps, as ``local_steps`` does.

        Args:
          params: where the client starts.
          batch: the client's mini-batches, with examples [K, B, ...].
          direction: what a step descends. None: the gradient, which is local SGD.
          lr: learning rate, or a function of (k, K_i). None: that of the round.
          memory: initial ``step.memory``; () if the method carries nothing.
          transform: of the direction, in place of ``step_transform``. None: that.
          sum_directions: as in ``local_steps``, for ``LocalResult.untransformed``.
        """
        lr = self.rate(batch.round) if lr is None else lr
        direction = direction or self.gradient
        return local_steps(
            direction,
            self.gradient,
            params,
            batch,
            lr,
            memory,
            self.step_transform if transform is None else transform,
            sum_directions,
        )

    def client_update(self, params: Params, row: PyTree, batch: ClientBatch):
        """Run local SGD, as the client half of a phase.

        Args:
          params: what the server broadcast, x_t.
          row: the client's row, which stays as it is.
          batch: the client's mini-batches, with examples [K, B, ...].

        Returns:
          (message, row, report). The message is ``delta`` = x_t - x^i_K, a descent direction.
        """
        local = self.steps(params, batch)
        return {"delta": tree.subtract(params, local.params)}, row, local.report


# What a docstring says of arguments that it leaves out, besides those of ``Common``.
_SHARED = {
    "loss_fn": "(params, examples [B, ...], key) -> losses, float [B], or (losses, metrics). One\n"
    "  that names an argument ``mask`` gets bool [B]: which examples are real (None for all, if\n"
    "  its default is None). One that names an argument ``constants`` gets its client's\n"
    "  ``client_constants``.",
    "server_lr": "server learning rate, or a schedule of the round",
    "mean_from": "what the mean gradient of a client's steps is computed from where there is a\n"
    '  ``step_transform``: "gradients": the directions of the steps before the transform;\n'
    '  "displacement": (x - y) / (K η), which the transform has changed (published code). With\n'
    "  momentum or Adam the latter is no gradient, and training may diverge.",
}
_RAISES = "  ValueError: a hyper-parameter is outside what is allowed."


def factory(build: Factory) -> Factory:
    """Make a method's factory from a function with ``**common``, the ``Common`` arguments.

    Signature and docstring then show the common arguments like any other, learning rates are
    checked, and arguments are recorded in ``algorithm.hyperparameters``, defaults included:
    numbers, strings and None as they are; a compressor as its text; a schedule, an optimiser or
    another function by its name and arguments (``describe``); a traced scalar as "traced". A
    function without ``**common`` only gets the record.

    Args:
      build: own arguments, ``**common`` -> ``Algorithm``.
    """

    def recording(given: inspect.BoundArguments) -> Any:
        described = {
            name: str(value) if getattr(value, "recorded_as_text", False) else describe(value)
            for name, value in given.arguments.items()
            if name not in ("loss_fn", "model", "preprocess")
            and not (name in _OMITTED_AT_DEFAULT and value == _OMITTED_AT_DEFAULT[name])
        }
        algorithm = build(*given.args, **given.kwargs)
        if algorithm.gradients_per_step > 1 and given.arguments.get("example_noise") is not None:
            raise ValueError(
                f"example_noise is {given.arguments['example_noise']}; {build.__name__} takes "
                f"{algorithm.gradients_per_step} gradients in a step with one key, and so with the "
                "same noise, which their difference is without: choose a method of one gradient."
            )
        loss_fn = given.arguments.get("loss_fn", algorithm.loss_fn)
        phases = _reporting_rates(algorithm.phases, given.arguments)
        return dataclasses.replace(
            algorithm, hyperparameters=described, loss_fn=loss_fn, phases=phases
        )

    return _checked(build, recording)


def takes_common(function: Factory) -> Factory:
    """Let a function with ``**common`` that is no factory check and show its arguments like one.

    Args:
      function: own arguments, ``**common`` -> anything.
    """
    return _checked(function, lambda given: function(*given.args, **given.kwargs))


def _checked(function: Factory, call: Callable[[inspect.BoundArguments], Any]) -> Factory:
    """Return ``call`` of a function's checked arguments, with its name, signature and docstring."""
    own = inspect.signature(function)
    has_common = "common" in own.parameters
    signature = own
    if has_common:
        signature = spell_out(own, "common", Common, dict.fromkeys(Common.__optional_keys__))

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        given = _bound(function, signature, args, kwargs)
        for name in _RATES if has_common else ():
            if name in given.arguments:
                check_scalar_or_schedule(name, given.arguments[name])
        return call(given)

    if has_common:
        show(wrapper, signature, _shared(signature), _RAISES)
    return wrapper  # type: ignore[return-value]


def _bound(
    function: Callable[..., Any], signature: inspect.Signature, args: Any, kwargs: Any
) -> inspect.BoundArguments:
    """Check the names of arguments, flags and the loss; return all arguments."""
    for name in kwargs.keys() - signature.parameters.keys():
        known = list(signature.parameters)
        raise unknown(function.__name__, name, known, hint_of(function, name, known))
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None
    check_flags(signature.parameters, given.arguments)
    given.apply_defaults()
    if "loss_fn" in given.arguments:
        _check_loss(function.__name__, given.arguments["loss_fn"])
    return given


def _reporting_rates(phases: tuple[Phase, ...], given: Mapping[str, Any]) -> tuple[Phase, ...]:
    """Add the learning rates of the round to the metrics of the last phase that lacks them."""
    rates = {name: given[name] for name in _RATES if given.get(name) is not None}
    *others, last = phases

    def server_update(server, messages, cohort):
        server, metrics = last.server_update(server, messages, cohort)
        own = {name: at_round(rate, cohort.round) for name, rate in rates.items()}
        of_round = {name: jnp.asarray(rate, cohort.weights.dtype) for name, rate in own.items()}
        return server, {**of_round, **metrics}

    return (*others, last._replace(server_update=server_update)) if rates else phases


# Arguments of a run, which a method is often given.
RUN_ARGUMENTS = (
    *("cohort_size", "batch_size", "local_steps", "local_epochs", "replace", "weights"),
    *("full_examples", "devices", "sample_cohort", "sampling", "client_constants"),
    *("rounds", "seed", "evaluate", "eval_every", "num_clients"),
)
_OF_A_STEP = {
    "clip_norm": "gradient_transform=optax.clip_by_global_norm(...)",
    "weight_decay": "gradient_transform=optax.add_decayed_weights(...)",
}


def hint_of(build: Callable[..., Any], name: str, known: Collection[str]) -> str | None:
    """Say which argument of a method an unknown one means, such as a paper's symbol; or None.

    Args:
      build: a factory, whose module has ``SYMBOLS`` if its paper has any.
    """
    symbols: Symbols = getattr(inspect.getmodule(build), "SYMBOLS", {})
    if meant := meant_by(name, symbols, known):
        of = [f"the paper's {symbol} is {argument!r}" for argument, symbol in meant.items()]
        return f"{', '.join(of)} here."
    if name in ("eta", "eta_l", "eta_c", "gamma_l"):
        return "the learning rate of the local steps is 'client_lr' here."
    if name == "eta_g" and "server_lr" in known:
        return "the learning rate of the server is 'server_lr' here."
    if name in _OF_A_STEP:
        return f"give {_OF_A_STEP[name]}."
    if run_names := {name, *SYNONYMS.get(name, ())} & set(RUN_ARGUMENTS):
        return f"{min(run_names)!r} is an argument of simulate, not of a method."
    return None


def _check_loss(method: str, given: Any) -> None:
    """Check that a value can be called as a loss function, which a model cannot."""
    is_network = hasattr(given, "apply") and hasattr(given, "init")  # of flax, haiku or equinox
    if not callable(given) or is_network:
        raise TypeError(
            f"loss_fn of {method} is a {type(given).__name__}; it must be a function (params, "
            "examples, key) -> losses [B]: models.classification_loss(model.apply) makes one of a "
            "model, models.regression_loss(model.apply) one of numbers."
        )
    if found := other_arguments(given, 3, "mask", "constants"):
        raise TypeError(
            f"loss_fn of {method} takes ({found}); it must take (params, examples, key), and may "
            "name further arguments mask and constants."
        )


def _shared(signature: inspect.Signature) -> dict[str, str]:
    """Return argument -> what a docstring says of it unless it has a description of its own."""
    shared = described(Common) | {name: f"{name}: {text}" for name, text in _SHARED.items()}
    server_lr = signature.parameters.get("server_lr")
    if server_lr is not None:
        required = server_lr.default is inspect.Parameter.empty
        shared["server_lr"] += "." if required else f"; {server_lr.default} by default."
    return shared
