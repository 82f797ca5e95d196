"""MOON and FedMLB: losses that compare what the local and the global model make of an example.

MOON: Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021, Algorithm 1. FedMLB: Kim,
Kim, Han: Multi-Level Branched Regularization for Federated Learning. ICML 2022. MOON-M, FedMLB-M:
the same under the server momentum of GradMA (CVPR 2023), Algorithm 5.

=========================  ==========================================
paper                      here
=========================  ==========================================
w^t, w^t_i                 server params x_t, local params y
z, z_glob, z_prev (MOON)   ``model.features`` of an example: under y, under x_t, and under
                           ``previous``, the client's local model when it last took part
μ, τ                       ``contrastive_weight``, ``temperature``
blocks 1, ..., M + 1       ``model.blocks``, so M hybrid paths: path m runs blocks 1 to m under y,
                           and the rest under x_t, whose params are frozen
q_L, q_H (FedMLB)          logits of the local model, and of the hybrid paths
λ_1, λ_2, τ (FedMLB)       ``hybrid_ce_weight``, ``hybrid_kl_weight``, ``temperature``
β_1 (GradMA)               ``momentum``
=========================  ==========================================

MOON: down d, up d, client state d; a step takes one gradient, and two forward passes besides.
FedMLB: down d, up d; a step costs 1 + M/2 gradients if all blocks cost the same.

The factories take a ``Model`` instead of a loss function: the loss is its cross-entropy. The
metric ``loss`` is that alone. Local params get dropout (if the model has any) and the models that
MOON compares with do not; all paths of FedMLB share one key, so that they agree where y = x_t.

Departures: MOON's network has a projection head before its classifier; here the representation
is the input of the last dense layer of any model. A client that has no previous model is left
without the contrastive term, as in the published code (x_t in its place would add log 2 to the
loss, and nothing to the gradient). FedMLB's paper fixes the weight of the plain cross-entropy to
1; it is ``ce_weight`` here, as in its code.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round, is_plain_zero
from fedjax_lab.algorithms.server import MomentumServer, ServerSGD, broadcast_params
from fedjax_lab.checks import check_number, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.models.base import Model, with_mask
from fedjax_lab.models.losses import (
    Preprocess,
    classification_loss,
    cross_entropy,
    training_inputs,
)
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import Params, Scalar, ScalarOrSchedule

SYMBOLS = {
    "mu": "contrastive_weight",
    "tau": "temperature",
    "lambda_1": "hybrid_ce_weight",
    "lambda_2": "hybrid_kl_weight",
    "beta_1": "momentum",
}


class MoonRow(NamedTuple):
    """A client's row in MOON."""

    previous: Params  # its local model when it last took part
    has_previous: jax.Array  # bool, whether it ever did


@factory
def moon(
    model: Model,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    contrastive_weight: ScalarOrSchedule = 1.0,
    temperature: Scalar = 0.5,
    preprocess: Preprocess | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """MOON: local steps descend cross-entropy + μ l_con; averaging as in FedAvg.

    Args:
      model: a model with ``features`` and ``head``.
      contrastive_weight: weight of the contrastive term, or a schedule of the round; 0 is
        FedAvg. The paper tunes it from 0.1 to 10.
      temperature: what cosines are divided by, above 0.
      preprocess: (examples, key) -> examples with fields ``x`` and ``y``: scaling and
        augmentation, as for ``models.classification_loss``. None: taken as they are.
      gradient_transform: optax transformation of the gradient of the whole local loss.

    Raises:
      TypeError: ``model`` is no ``Model``, or ``preprocess`` no function.
      ValueError: the model lacks a part, or a hyper-parameter is out of range.
    """
    return _moon(
        "moon", model, contrastive_weight, temperature, preprocess, ServerSGD(server_lr), common
    )


@factory
def moonm(
    model: Model,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    contrastive_weight: ScalarOrSchedule = 1.0,
    temperature: Scalar = 0.5,
    momentum: Scalar = 0.9,
    preprocess: Preprocess | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """MOON-M: MOON under m <- momentum * m + delta;  x <- x - server_lr * m.

    Args:
      model: a model with ``features`` and ``head``.
      contrastive_weight: weight of the contrastive term, or a schedule of the round.
      temperature: what cosines are divided by, above 0.
      momentum: in [0, 1]; 0 is MOON.
      preprocess: (examples, key) -> examples with fields ``x`` and ``y``, as for
        ``models.classification_loss``. None: taken as they are.
      gradient_transform: optax transformation of the gradient of the whole local loss.

    Raises:
      TypeError: ``model`` is no ``Model``, or ``preprocess`` no function.
      ValueError: the model lacks a part, or a hyper-parameter is out of range.
    """
    check_number("momentum", momentum, minimum=0.0, maximum=1.0)
    server_sgd = ServerSGD(server_lr, momentum)
    return _moon("moonm", model, contrastive_weight, temperature, preprocess, server_sgd, common)


def _moon(name, model, weight, temperature, preprocess, server_sgd, common):
    check_scalar_or_schedule("contrastive_weight", weight)
    check_number("temperature", temperature, minimum=0.0, exclusive_minimum=True)
    _check_model(name, model, ("features", "head"))

    def start_rows(params, num_clients):
        return MoonRow(one_row_per_client(params, num_clients), jnp.zeros(num_clients, bool))

    def client_update(x, row, batch):
        mu = at_round(weight, batch.round) * row.has_previous

        def loss_fn(y, examples, key, mask=None):
            inputs, labels, key = training_inputs(preprocess, examples, key)
            features, head = (with_mask(part, mask) for part in (model.features, model.head))
            z = features(y, inputs, key)
            ce = cross_entropy(head(y, z, key), labels)
            if is_plain_zero(weight):
                return ce
            z_global, z_previous = model.features(x, inputs), model.features(row.previous, inputs)
            distance = contrastive_loss(z, z_global, z_previous, temperature)
            return ce + _gradient_of(mu * distance)

        local = LocalTraining(loss_fn, **common).steps(x, batch)
        row = MoonRow(local.params, jnp.ones_like(row.has_previous))
        return {"delta": tree.subtract(x, local.params)}, row, local.report

    loss = classification_loss(model.apply, preprocess)
    return _averaged(name, start_rows, client_update, server_sgd, loss)


def contrastive_loss(
    z: jax.Array, positive: jax.Array, negative: jax.Array, temperature: Scalar
) -> jax.Array:
    """Compute -log of the softmax of ``positive`` against ``negative`` in cosines with ``z``.

    Args:
      z, positive, negative: representations, float [B, F].
      temperature: τ.

    Returns:
      float [B]: log(1 + exp((cos(z, negative) - cos(z, positive)) / τ)).
    """
    return jax.nn.softplus((_cosine(z, negative) - _cosine(z, positive)) / temperature)


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute <a, b> / max(|a| |b|, 1e-8) of rows; 0, with a finite derivative, of a zero row."""
    a, b = tree.widen((a, b))
    squares = (a * a).sum(-1) * (b * b).sum(-1)
    return (a * b).sum(-1) / jnp.sqrt(jnp.maximum(squares, 1e-16))


@factory
def fedmlb(
    model: Model,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    ce_weight: ScalarOrSchedule = 1.0,
    hybrid_ce_weight: ScalarOrSchedule = 1.0,
    hybrid_kl_weight: ScalarOrSchedule = 1.0,
    temperature: Scalar = 1.0,
    preprocess: Preprocess | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """FedMLB: hybrid paths of local and frozen global blocks teach the local model.

    Local steps descend ce_weight CE(q_L) + the means over the paths of hybrid_ce_weight CE(q_H)
    and hybrid_kl_weight KL(softmax(q_H / τ) || softmax(q_L / τ)), without a factor τ². Both
    sides of the divergence are trained. Averaging as in FedAvg.

    Args:
      model: a model with at least two ``blocks``; they say where the paths branch off.
      ce_weight: weight of the local model's cross-entropy, or a schedule of the round.
      hybrid_ce_weight: weight of that of the paths, or a schedule; with both weights of the
        paths 0, and ``ce_weight`` 1, it is FedAvg.
      hybrid_kl_weight: weight of the divergence, or a schedule of the round.
      temperature: what logits are divided by in the divergence, above 0.
      preprocess: (examples, key) -> examples with fields ``x`` and ``y``: scaling and
        augmentation, as for ``models.classification_loss``. None: taken as they are.
      gradient_transform: optax transformation of the gradient of the whole local loss.

    Raises:
      TypeError: ``model`` is no ``Model``, or ``preprocess`` no function.
      ValueError: the model lacks blocks, or a hyper-parameter is out of range.
    """
    weights = ce_weight, hybrid_ce_weight, hybrid_kl_weight
    return _fedmlb("fedmlb", model, weights, temperature, preprocess, ServerSGD(server_lr), common)


@factory
def fedmlbm(
    model: Model,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    ce_weight: ScalarOrSchedule = 1.0,
    hybrid_ce_weight: ScalarOrSchedule = 1.0,
    hybrid_kl_weight: ScalarOrSchedule = 1.0,
    temperature: Scalar = 1.0,
    momentum: Scalar = 0.9,
    preprocess: Preprocess | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """FedMLB-M: FedMLB under m <- momentum * m + delta;  x <- x - server_lr * m.

    Args:
      model: a model with at least two ``blocks``.
      ce_weight: weight of the local model's cross-entropy, or a schedule of the round.
      hybrid_ce_weight: weight of that of the paths, or a schedule of the round.
      hybrid_kl_weight: weight of the divergence, or a schedule of the round.
      temperature: what logits are divided by in the divergence, above 0.
      momentum: in [0, 1]; 0 is FedMLB.
      preprocess: (examples, key) -> examples with fields ``x`` and ``y``, as for
        ``models.classification_loss``. None: taken as they are.
      gradient_transform: optax transformation of the gradient of the whole local loss.

    Raises:
      TypeError: ``model`` is no ``Model``, or ``preprocess`` no function.
      ValueError: the model lacks blocks, or a hyper-parameter is out of range.
    """
    weights = ce_weight, hybrid_ce_weight, hybrid_kl_weight
    check_number("momentum", momentum, minimum=0.0, maximum=1.0)
    server_sgd = ServerSGD(server_lr, momentum)
    return _fedmlb("fedmlbm", model, weights, temperature, preprocess, server_sgd, common)


def _fedmlb(name, model, weights, temperature, preprocess, server_sgd, common):
    arguments = ("ce_weight", "hybrid_ce_weight", "hybrid_kl_weight")
    for argument, weight in zip(arguments, weights, strict=True):
        check_scalar_or_schedule(argument, weight)
    check_number("temperature", temperature, minimum=0.0, exclusive_minimum=True)
    _check_model(name, model, ("blocks",))
    if len(model.blocks) < 2:
        raise ValueError(
            f"model has {len(model.blocks)} block; {name} needs at least 2, between which its "
            "hybrid paths branch off."
        )

    def start_rows(params, num_clients):
        return ()

    def client_update(x, row, batch):
        w_ce, w_hybrid_ce, w_kl = (at_round(weight, batch.round) for weight in weights)

        def loss_fn(y, examples, key, mask=None):
            h, labels, key = training_inputs(preprocess, examples, key)
            paths: list[jax.Array] = []
            for block in (with_mask(block, mask) for block in model.blocks):
                # x is no argument of the gradient, so frozen; what runs through is not.
                paths = [block(x, hybrid, key) for hybrid in paths]
                h = block(y, h, key)
                paths.append(h)
            *hybrids, local = paths
            ce = cross_entropy(local, labels)
            hybrid_ce = sum(cross_entropy(q, labels) for q in hybrids) / len(hybrids)
            divergences = (divergence(q, local, temperature) for q in hybrids)
            kl = sum(divergences) / len(hybrids)
            return ce + _gradient_of((w_ce - 1) * ce + w_hybrid_ce * hybrid_ce + w_kl * kl)

        local = LocalTraining(loss_fn, **common).steps(x, batch)
        return {"delta": tree.subtract(x, local.params)}, row, local.report

    gradients = 1 + len(model.blocks) // 2  # M / 2 rounded up
    loss = classification_loss(model.apply, preprocess)
    return _averaged(name, start_rows, client_update, server_sgd, loss, gradients)


def divergence(p_logits: jax.Array, q_logits: jax.Array, temperature: Scalar) -> jax.Array:
    """Compute KL(softmax(p_logits / τ) || softmax(q_logits / τ)), float [B], of logits [B, C].

    Args:
      p_logits, q_logits: float [B, C].
      temperature: τ, above 0.
    """
    p_logits, q_logits = tree.widen((p_logits, q_logits))
    log_p = jax.nn.log_softmax(p_logits / temperature)
    log_q = jax.nn.log_softmax(q_logits / temperature)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def _averaged(name, start_rows, client_update, server_sgd, loss, gradients=1):
    """Build one of the four methods from its client half; ``loss`` has the same labels."""

    def start(params, num_clients, batch):
        server = MomentumServer(params, server_sgd.first_momentum(params))
        return server, start_rows(params, num_clients)

    costs = Costs(gradients=gradients)
    phase = Phase(broadcast_params, client_update, server_sgd, {"delta": "mean"}, costs=costs)
    return Algorithm(name, start, (phase,), loss_fn=loss)


def _gradient_of(term: jax.Array) -> jax.Array:
    """Return 0 with the gradient of ``term``, which local steps descend but ``loss`` excludes."""
    return term - jax.lax.stop_gradient(term)


def _check_model(name: str, model: Model, parts: tuple[str, ...]) -> None:
    if not isinstance(model, Model):
        what = getattr(model, "__name__", type(model).__name__)
        raise TypeError(
            f"model of {name} is {what}; it must be a Model, such as models.mlp() or "
            "models.from_linen(module): the method looks inside it, and has a loss of its own."
        )
    missing = [part for part in parts if getattr(model, part) is None]
    if missing:
        raise ValueError(
            f"model has no {' and no '.join(missing)}; {name} needs {' and '.join(parts)} (see the "
            "fields of fedjax_lab.models.Model)."
        )
