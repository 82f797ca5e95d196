"""MOON, FedMLB and their -M variants: local objectives that look inside the model.

MOON (Li, He, Song, CVPR 2021, Algorithm 1); z, z_g, z_p are one example's representations under
the local model y, under x_t, and under the client's last local model:

    l_con = log( 1 + exp( (cos(z, z_p) - cos(z, z_g)) / T ) )
    cos(a, b) = <a, b> / max(|a| |b|, 1e-8)
    L(y)  = mean over the examples of CE + mu l_con ;  no gradient into z_g and z_p

A client without a last local model has l_con = 0 (``first_previous="skip"``) or z_p = z_g
("global"), which is log 2 with gradient 0.

FedMLB (Kim, Kim, Han, ICML 2022, Algorithm 1): blocks 1..M+1, here the layers. q_0 are the logits
of the local model, q_m those of its blocks 1..m followed by x_t's frozen blocks m+1..M+1:

    L(y)  = ce_weight CE(q_0) + lambda1 (1/M) sum_m CE(q_m)
            + lambda2 (1/M) sum_m KL( softmax(q_m / T) || softmax(q_0 / T) )

Means over the examples, no factor T^2; the gradient flows through both arguments of KL, and through
the frozen blocks into the local ones.

The transform acts on the gradient of L. The server is FedAvg's, or GradMA's heavy ball (-M).
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import at
from tests.reference.fedavg_numpy import FedAvg
from tests.reference.fedopt_numpy import FedAvgM
from tests.reference.mlp_numpy import cross_entropy, log_softmax


def cosine(a, b):
    """Per example: cos(a, b) [n] and its gradient by a [n, F]."""
    norm_a = np.linalg.norm(a, axis=1, keepdims=True)
    product = norm_a * np.linalg.norm(b, axis=1, keepdims=True)
    floored = np.maximum(product, 1e-8)
    value = (a * b).sum(axis=1, keepdims=True) / floored
    bent = np.divide(value * a, norm_a**2, out=np.zeros_like(a), where=product > 1e-8)
    return value[:, 0], b / floored - bent


def contrastive(z, z_global, z_previous, temperature):
    """Per example: l_con [n] and its gradient by z [n, F]."""
    positive, by_positive = cosine(z, z_global)
    negative, by_negative = cosine(z, z_previous)
    difference = (negative - positive) / temperature
    slope = 1 / (1 + np.exp(-difference)) / temperature
    return np.logaddexp(0, difference), slope[:, None] * (by_negative - by_positive)


def divergence(q, q_main, temperature):
    """Per example: KL(softmax(q/T) || softmax(q_main/T)) [n], its gradients by q and by q_main."""
    log_p, log_main = log_softmax(q / temperature), log_softmax(q_main / temperature)
    p, ratio = np.exp(log_p), log_p - log_main
    value = (p * ratio).sum(axis=1)
    by_q = p * (ratio - value[:, None]) / temperature
    return value, by_q, (np.exp(log_main) - p) / temperature


def moon_objective(model, y, x_global, x_previous, minibatch, *, mu, temperature):
    """L(y) and its gradient; ``x_previous`` None leaves l_con out."""
    x, labels = minibatch
    path = model.forward(y, x)
    losses, upstream = cross_entropy(path[-1], labels)
    injected = {}
    if x_previous is not None:
        others = [model.representation(other, x) for other in (x_global, x_previous)]
        pull, by_z = contrastive(path[-2], *others, temperature)
        losses = losses + mu * pull
        injected = {model.depth - 1: mu * by_z / len(labels)}
    return losses.mean(), model.backward(y, path, upstream / len(labels), injected=injected)[0]


def fedmlb_objective(
    model, y, x_global, minibatch, *, lambda1=1.0, lambda2=1.0, temperature=1.0, ce_weight=1.0
):
    """L(y) and its gradient."""
    x, labels = minibatch
    path = model.forward(y, x)
    losses, upstream = cross_entropy(path[-1], labels)
    losses, upstream = ce_weight * losses, ce_weight * upstream
    m_paths, injected = model.depth - 1, {}
    for m in range(1, model.depth):
        hybrid = model.forward(x_global, path[m], depth=m)
        ce, ce_by_q = cross_entropy(hybrid[-1], labels)
        kl, kl_by_q, kl_by_main = divergence(hybrid[-1], path[-1], temperature)
        losses = losses + (lambda1 * ce + lambda2 * kl) / m_paths
        upstream = upstream + lambda2 * kl_by_main / m_paths
        by_q = (lambda1 * ce_by_q + lambda2 * kl_by_q) / (m_paths * len(labels))
        injected[m] = model.backward(x_global, hybrid, by_q, depth=m)[1]
    return losses.mean(), model.backward(y, path, upstream / len(labels), injected=injected)[0]


class LocalObjective:
    """Local SGD on ``objective_gradient(y, minibatch, client, t)``; the model is an ``MLP``."""

    def __init__(self, x0, num_clients, model, *, client_lr, **options):
        super().__init__(x0, num_clients, model.gradient, client_lr=client_lr, **options)
        self.model = model

    def local_sgd(self, client, t):
        y, S = self.x.copy(), self.new_step()
        for minibatch in client.minibatches:
            g = self.transformed(self.objective_gradient(y, minibatch, client, t), y)
            y = y - at(self.client_lr, t) * S(g, y)
        return self.x - y


class Contrastive(LocalObjective):
    """``previous`` [N, d], valid where ``has_previous`` [N]."""

    def __init__(
        self,
        x0,
        num_clients,
        model,
        *,
        client_lr,
        mu=1.0,
        temperature=0.5,
        first_previous="skip",
        **options,
    ):
        super().__init__(x0, num_clients, model, client_lr=client_lr, **options)
        self.mu, self.temperature, self.first_previous = mu, temperature, first_previous
        self.previous = self.client_rows()
        self.has_previous = np.zeros(num_clients, bool)

    def objective_gradient(self, y, minibatch, client, t):
        previous = self.x if self.first_previous == "global" else None
        if self.has_previous[client.id]:
            previous = self.previous[client.id]
        options = {"mu": at(self.mu, t), "temperature": self.temperature}
        return moon_objective(self.model, y, self.x, previous, minibatch, **options)[1]

    def local_sgd(self, client, t):
        d = super().local_sgd(client, t)
        self.previous[client.id] = self.x - d
        self.has_previous[client.id] = True
        return d


class MOON(Contrastive, FedAvg):
    pass


class MOONM(Contrastive, FedAvgM):
    pass


class MultiLevelBranches(LocalObjective):
    def __init__(
        self,
        x0,
        num_clients,
        model,
        *,
        client_lr,
        lambda1=1.0,
        lambda2=1.0,
        temperature=1.0,
        ce_weight=1.0,
        **options,
    ):
        super().__init__(x0, num_clients, model, client_lr=client_lr, **options)
        self.lambda1, self.lambda2, self.ce_weight = lambda1, lambda2, ce_weight
        self.temperature = temperature

    def objective_gradient(self, y, minibatch, client, t):
        options = {
            "lambda1": at(self.lambda1, t),
            "lambda2": at(self.lambda2, t),
            "temperature": self.temperature,
            "ce_weight": self.ce_weight,
        }
        return fedmlb_objective(self.model, y, self.x, minibatch, **options)[1]


class FedMLB(MultiLevelBranches, FedAvg):
    pass


class FedMLBM(MultiLevelBranches, FedAvgM):
    pass
