"""FedOpt: the mean client step is a pseudo-gradient for an optimiser on the server.

FedAvgM: Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification. arXiv 1909.06335; as written in GradMA (CVPR 2023), Algorithm 5.
FedAdagrad, FedYogi, FedAdam: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan:
Adaptive Federated Optimization. ICLR 2021, Algorithm 2.
FedAMS: Wang, Lin, Chen: Communication-Efficient Adaptive Federated Learning. ICML 2022,
Algorithm 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
Δ_t (points uphill: +)     minus ``delta``: our delta = mean_i (x_t - x^i_K) is subtracted
m_t, v_t                   ``momentum``, ``second_moment``
η_l, η                     ``client_lr``, ``server_lr``
β_1, β_2, τ                ``beta1``, ``beta2``, ``tau``
v̂_t, ε (FedAMS)            ``largest``, ``tau``
β (FedAvgM)                ``momentum``
=========================  ==========================================

Down d, up d. Departures: FedAvgM has no factor (1 - momentum), as in GradMA; the adaptive
methods start from v = τ² and apply no bias correction, as their paper does and optax does not.
FedAMS starts from v = 0; its published code corrects the bias, its paper does not.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.algorithms.server import MomentumServer, ServerSGD, broadcast_params
from fedjax_lab.checks import check_int, check_number
from fedjax_lab.clients.transforms import direction, has_parts
from fedjax_lab.machine.keys import compact, is_key
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {
    "eta": "server_lr",
    "beta_1": "beta1",
    "beta_2": "beta2",
    "beta": "momentum",
    "tau": "tau",
    "epsilon": "tau",
}


class FedOptServer(NamedTuple):
    """Server state of FedOpt."""

    params: Params  # x_t
    opt_state: PyTree  # with the data of random keys in place of the keys


class AdaptiveServer(NamedTuple):
    """Server state of FedAdagrad, FedYogi and FedAdam."""

    params: Params  # x_t
    momentum: Params  # m_t
    second_moment: Params  # v_t


class AMSServer(NamedTuple):
    """Server state of FedAMS."""

    params: Params  # x_t
    momentum: Params  # m_t
    second_moment: Params  # v_t
    largest: Params  # v̂_t
    steps: jax.Array | tuple[()]  # that the server has taken; () without bias correction


def _with_server_step(name, training, start, server_step):
    """Build plain local SGD with ``server_step(server, delta, round) -> server``."""

    def server_update(server, messages, cohort):
        delta = messages["delta"]
        return server_step(server, delta, cohort.round), {"delta_norm": tree.norm(delta)}

    phase = Phase(broadcast_params, training.client_update, server_update, reduce={"delta": "mean"})
    return Algorithm(name, lambda params, num_clients, batch: (start(params), ()), (phase,))


@factory
def fedopt(
    loss_fn: LossFn,
    server_optimizer: optax.GradientTransformation | optax.MultiSteps,
    **common: Unpack[Common],
) -> Algorithm:
    """Any optax optimiser on the server; it receives the mean delta as its gradient.

    Args:
      server_optimizer: holds the server learning rate; a schedule in it counts the rounds in
        which somebody took part. ``optax.sgd(1.0)`` is FedAvg. An optimiser that draws random
        numbers, such as ``optax.noisy_sgd``, draws from its own key, whatever the run's seed is.

    Raises:
      ValueError: its updates have the sign of the gradients.
      TypeError: it is no optax optimiser, or (when the round is traced) its update requires more
        than gradients, state and params, such as the loss.
    """
    if not has_parts(server_optimizer):
        raise TypeError(
            f"server_optimizer is {server_optimizer!r}; it must be an optax optimiser, such as "
            "optax.adam(0.01)."
        )

    if direction(server_optimizer) == 1:
        raise ValueError(
            "server_optimizer keeps the sign of its input, as optax.scale_by_adam() and "
            "optax.trace(0.9) do, so that the server would ascend: pass an optimizer with a "
            "learning rate, such as optax.adam(0.01)."
        )

    def start(params):
        return FedOptServer(params, _key_data(server_optimizer.init(params)))

    def server_step(server, delta, round):
        state = _with_keys(server.opt_state, server_optimizer.init(server.params))
        try:
            updates, state = server_optimizer.update(delta, state, server.params)
        except TypeError as error:
            raise TypeError(
                f"server_optimizer cannot be used by fedopt, whose server has the mean delta and "
                f"the params, but no loss: {error}"
            ) from error
        return FedOptServer(optax.apply_updates(server.params, updates), _key_data(state))

    training = LocalTraining(loss_fn, **common)
    return _with_server_step("fedopt", training, start, server_step)


def _key_data(state: PyTree) -> PyTree:
    """Replace random keys by their data, which are arrays like others in sums, files and tables."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, state)


def _with_keys(state: PyTree, like: PyTree) -> PyTree:
    """Reverse ``_key_data``, with keys of the same kinds as in ``like``."""

    def restore(like: jax.Array, leaf: jax.Array) -> jax.Array:
        if not is_key(like):
            return leaf
        return compact(jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like)))

    return jax.tree.map(restore, like, state)


@factory
def fedavgm(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    momentum: Scalar = 0.9,
    **common: Unpack[Common],
) -> Algorithm:
    """FedAvg with server momentum: m <- momentum * m + delta;  x <- x - server_lr * m.

    Args:
      momentum: in [0, 1]; 0 is FedAvg.
    """
    training = LocalTraining(loss_fn, **common)
    check_number("momentum", momentum, minimum=0.0, maximum=1.0)
    server_sgd = ServerSGD(server_lr, momentum)

    def start(params, num_clients, batch):
        return MomentumServer(params, server_sgd.first_momentum(params)), ()

    phase = Phase(broadcast_params, training.client_update, server_sgd, reduce={"delta": "mean"})
    return Algorithm("fedavgm", start, (phase,))


def _adaptive(name, training, second_moment, server_lr, beta1, tau, initial=None):
    """Build FedAdagrad, FedYogi or FedAdam, which differ in v_t = ``second_moment(v, delta²)``."""
    check_number("beta1", beta1, minimum=0.0, maximum=1.0)
    check_number("tau", tau, minimum=0.0, exclusive_minimum=True)

    def start(params):
        v = jnp.square(tau) if initial is None else initial
        moments = jax.tree.map(lambda leaf: jnp.full_like(leaf, v), params)
        return AdaptiveServer(params, tree.zeros_like(params), moments)

    def next_moment(v, d):
        return second_moment(*tree.widen((v, jnp.square(d)))).astype(v.dtype)

    def server_step(server, delta, round):
        m = tree.add_scaled(tree.scale(delta, 1 - beta1), beta1, server.momentum)
        v = jax.tree.map(next_moment, server.second_moment, delta)
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + jnp.asarray(tau, v.dtype)), m, v)
        params = tree.descend(server.params, at_round(server_lr, round), direction)
        return AdaptiveServer(params, m, v)

    return _with_server_step(name, training, start, server_step)


@factory
def fedadam(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.99,
    tau: Scalar = 1e-3,
    initial_second_moment: Scalar | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """FedAdam: v <- beta2 v + (1 - beta2) delta²;  x <- x - server_lr m / (sqrt(v) + tau).

    Args:
      server_lr: server learning rate: about the size of a step per coordinate.
      beta1: decay of the momentum m.
      beta2: decay of the second moment v.
      tau: added to sqrt(v).
      initial_second_moment: every coordinate of v at the start. None: tau²; several published
        codes have 0.
    """
    check_number("beta2", beta2, minimum=0.0, maximum=1.0)
    if initial_second_moment is not None:
        check_number("initial_second_moment", initial_second_moment, minimum=0.0)

    def second_moment(v, squared):
        return tree.average(v, squared, beta2)

    training = LocalTraining(loss_fn, **common)
    start = initial_second_moment
    return _adaptive("fedadam", training, second_moment, server_lr, beta1, tau, start)


@factory
def fedyogi(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.99,
    tau: Scalar = 1e-3,
    **common: Unpack[Common],
) -> Algorithm:
    """FedYogi: v <- v - (1 - beta2) delta² sign(v - delta²); otherwise as ``fedadam``.

    Args:
      server_lr: server learning rate: about the size of a step per coordinate.
      beta1: decay of the momentum m.
      beta2: 1 - beta2 is the share of delta² by which v moves.
      tau: added to sqrt(v); v starts at tau².
    """
    check_number("beta2", beta2, minimum=0.0, maximum=1.0)

    def second_moment(v, squared):
        return v - (1 - jnp.asarray(beta2, v.dtype)) * squared * jnp.sign(v - squared)

    training = LocalTraining(loss_fn, **common)
    return _adaptive("fedyogi", training, second_moment, server_lr, beta1, tau)


@factory
def fedadagrad(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule,
    beta1: Scalar = 0.0,
    tau: Scalar = 1e-3,
    **common: Unpack[Common],
) -> Algorithm:
    """FedAdagrad: v <- v + delta²; otherwise as ``fedadam``.

    Args:
      beta1: decay of the momentum m.
      tau: added to sqrt(v); v starts at tau².
    """
    training = LocalTraining(loss_fn, **common)
    return _adaptive("fedadagrad", training, jnp.add, server_lr, beta1, tau)


@factory
def fedams(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.99,
    tau: Scalar = 1e-3,
    option: int = 1,
    bias_correction: bool = False,
    **common: Unpack[Common],
) -> Algorithm:
    """FedAMS: FedAdam whose denominator never falls; m and v start from 0.

    Option 1: v̂ <- max(v̂, v, tau);  x <- x - server_lr m / sqrt(v̂).
    Option 2: v̂ <- max(v̂, v);       x <- x - server_lr m / (sqrt(v̂) + tau).

    Args:
      server_lr: server learning rate: about the size of a step per coordinate.
      beta1: decay of the momentum m.
      beta2: decay of the second moment v.
      tau: option 1: the floor under v, a square; option 2: added to the root.
      option: 1 (FedAMS) or 2 (FedAMSGrad).
      bias_correction: divide m and v̂ by 1 - beta^n in the step, n counting the server's steps
        (the published code).

    Raises:
      TypeError: ``option`` is no integer.
      ValueError: a hyper-parameter is out of range.
    """
    check_number("beta1", beta1, minimum=0.0, maximum=1.0)
    check_number("beta2", beta2, minimum=0.0, maximum=1.0)
    check_number("tau", tau, minimum=0.0, exclusive_minimum=True)
    check_int("option", option, minimum=1, maximum=2)

    def start(params):
        zeros = tree.zeros_like(params)
        steps = jnp.zeros((), jnp.int32) if bias_correction else ()
        return AMSServer(params, zeros, zeros, zeros, steps)

    def server_step(server, delta, round):
        m = tree.add_scaled(tree.scale(delta, 1 - beta1), beta1, server.momentum)
        square = jax.tree.map(jnp.square, delta)
        v = tree.add_scaled(tree.scale(square, 1 - beta2), beta2, server.second_moment)
        steps, m_scale, v_scale = (), jnp.ones(()), jnp.ones(())
        if bias_correction:
            steps = server.steps + 1
            m_scale = tree.safe_divide(1.0, 1 - jnp.asarray(beta1, float) ** steps)
            v_scale = tree.safe_divide(1.0, 1 - jnp.asarray(beta2, float) ** steps)

        def largest(v_hat, v):
            larger = jnp.maximum(v_hat, v)
            return jnp.maximum(larger, jnp.asarray(tau, v.dtype)) if option == 1 else larger

        def direction(m, v_hat):
            root = jnp.sqrt(tree.scale(v_hat, v_scale))
            root = root if option == 1 else root + jnp.asarray(tau, v_hat.dtype)
            return tree.safe_divide(tree.scale(m, m_scale), root)

        v_hat = jax.tree.map(largest, server.largest, v)
        step = jax.tree.map(direction, m, v_hat)
        params = tree.descend(server.params, at_round(server_lr, round), step)
        return AMSServer(params, m, v, v_hat, steps)

    training = LocalTraining(loss_fn, **common)
    return _with_server_step("fedams", training, start, server_step)
