"""The twins of FedExP and of the personal methods, against numbers found by hand.

One coordinate each, f_i(y) = (y - b_i)^2 / 2, so that the gradient is y - b_i.
"""

import numpy as np
import pytest

from tests.reference.base import ReferenceClient
from tests.reference.ditto_numpy import APFL, Ditto, PFedMe
from tests.reference.fedexp_numpy import FedExP
from tests.reference.personal_layers_numpy import FedBABU, FedPer, FedRep, LocalOnly

pytestmark = pytest.mark.methods  # `make check` runs these where a twin has changed


def gradient(y, b):
    return y - b


def client(i, b, steps=1):
    return ReferenceClient(i, [np.asarray(b, float)] * steps)


def test_fedexp():
    """d_i = (1, 0), (0, 2): eta = max(1, (5/2) / (2 (5/4 + eps))), which is 1 where eps is 0."""
    clients = [client(0, [-2.0, 0.0]), client(1, [0.0, -4.0])]
    twin = FedExP(np.zeros(2), 2, gradient, client_lr=0.5, epsilon=0.0)
    twin.round(clients, 0)
    assert twin.step == pytest.approx(1)
    np.testing.assert_allclose(twin.x, [-0.25, -0.5])  # half way: x_0 = 0 is averaged in
    three = [client(i, -6 * np.eye(3)[i]) for i in range(3)]
    twin = FedExP(np.zeros(3), 3, gradient, client_lr=0.5, epsilon=1.0, average_last_two=False)
    twin.round(three, 0)  # d_i = 3 e_i: 9 / (2 (3 + 1)) = 9/8 on a mean of ones
    np.testing.assert_allclose(twin.x, [-9 / 8] * 3)


def test_ditto():
    """x = 0, v = 0, b = 4, eta = 1/2, lambda = 1: v = 2, then 2 - (2 - 4 + 2) / 2 = 2."""
    twin = Ditto(np.zeros(1), 1, gradient, client_lr=0.5, prox_weight=1.0)
    twin.round([client(0, [4.0], steps=2)], 0)
    np.testing.assert_allclose(twin.personal_model(0), [2.0])
    np.testing.assert_allclose(twin.x, [3.0])  # 2, then 3
    twin.round([client(0, [4.0])], 1)  # v - (v - 4 + v - 3) / 2 with v = 2
    np.testing.assert_allclose(twin.personal_model(0), [3.5])


def test_pfedme():
    """b = 4, lambda = 2, eta_p = 1/4, two inner steps from 0: 1, then 1 - (1 - 4 + 2) / 4 = 5/4."""
    options = {"client_lr": 0.1, "prox_weight": 2.0, "personal_lr": 0.25, "inner_steps": 2}
    twin = PFedMe(np.zeros(1), 1, gradient, server_lr=0.5, **options)
    twin.round([client(0, [4.0])], 0)
    np.testing.assert_allclose(twin.personal_model(0), [1.25])
    np.testing.assert_allclose(twin.x, [0.5 * 0.1 * 2 * 1.25])
    twin.round([client(0, [4.0])], 1)  # from 5/4, with w = 1/8
    theta = 1.25 - 0.25 * (1.25 - 4 + 2 * (1.25 - 0.125))
    theta = theta - 0.25 * (theta - 4 + 2 * (theta - 0.125))
    np.testing.assert_allclose(twin.personal_model(0), [theta])


def test_apfl():
    """v, w, alpha = 0, 0, 1/2; b = 4, eta = 1/2: w = 2, v = 1; then alpha learns from -1 * g(m)."""
    twin = APFL(np.zeros(1), 1, gradient, client_lr=0.5, mixing=0.5)
    twin.round([client(0, [4.0])], 0)
    assert (twin.v[0, 0], twin.x[0], twin.alpha[0]) == (1.0, 2.0, 0.5)  # v = w: no slope
    twin.round([client(0, [4.0])], 1)  # m = 3/2, g(m) = -5/2, v - w = -1
    assert twin.alpha[0] == 0  # 1/2 - 1/2 * 5/2, clipped
    assert (twin.v[0, 0], twin.x[0]) == (1 + 0.25 * 2.5, 3.0)
    np.testing.assert_allclose(twin.personal_model(0), twin.x)


def test_personal_layers():
    """Two coordinates, the second the client's own; b = (4, 8), eta = 1/2."""
    far, near = client(0, [4.0, 8.0], steps=2), client(1, [0.0, 0.0], steps=2)
    per = FedPer(np.zeros(2), 2, gradient, client_lr=0.5, own=slice(1, 2))
    per.round([far, near], 0)
    np.testing.assert_allclose(per.x, [1.5, 3.0])  # means of (3, 0), and of the rows (6, 0)
    np.testing.assert_allclose(per.personal_model(0), [1.5, 6.0])
    rep = FedRep(np.zeros(2), 2, gradient, client_lr=0.5, own=slice(1, 2), head_steps=1)
    rep.round([far], 0)
    np.testing.assert_allclose(rep.personal_model(0), [2.0, 4.0])
    np.testing.assert_allclose(rep.personal_model(1), [2.0, 0.0])
    for steps, half in ((1, [2.0, 0.0]), (2, [2.0, 4.0]), (3, [3.0, 4.0])):
        rep = FedRep(np.zeros(2), 2, gradient, client_lr=0.5, own=slice(1, 2))
        rep.round([client(0, [4.0, 8.0], steps)], 0)  # a single step moves the shared part
        np.testing.assert_allclose(rep.personal_model(0), half)
    babu = FedBABU(np.zeros(2), 2, gradient, client_lr=0.5, own=slice(1, 2))
    babu.round([far], 0)
    np.testing.assert_allclose(babu.x, [3.0, 0.0])
    np.testing.assert_allclose(babu.fine_tuned(far.minibatches[:1], 0.5), [3.5, 4.0])
    np.testing.assert_allclose(babu.fine_tuned(far.minibatches[:1], 0.5, True), [3.0, 4.0])
    alone = LocalOnly(np.zeros(2), 2, gradient, client_lr=0.5)
    alone.round([far], 0)
    np.testing.assert_allclose(alone.personal_model(0), [3.0, 6.0])
    np.testing.assert_allclose(alone.x, [1.5, 3.0])
