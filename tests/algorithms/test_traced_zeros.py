"""A swept 0 gives no NaN, and the same run as a plain 0 that drops the computation."""

import jax
import numpy as np
import pytest

from fedjax_lab import algorithms as a
from tests.algorithms.cases import N
from tests.algorithms.networks import preprocess, two_blocks
from tests.algorithms.problem import flat, initial_params, loss_fn, stack_rounds
from tests.reference import problem as reference


@pytest.mark.methods
def test_traced_zeros(x64):
    batches = stack_rounds(reference.make_rounds(4, 2, cohort_size=4, max_steps=3, batch_size=4))

    def runs(zero):
        """Pairs of server models that must agree."""

        def end(algorithm):
            state = algorithm.init(initial_params(), N)
            state, _ = jax.lax.scan(algorithm.round_fn, state, batches)
            return algorithm.params(state)

        fedavg, start = end(a.fedavg(loss_fn, client_lr=0.2)), initial_params()
        return {
            "fednova": (
                end(
                    a.fednova(
                        loss_fn,
                        client_lr=0.2,
                        local_momentum=zero,
                        prox_weight=zero,
                        server_momentum=zero,
                    )
                ),
                end(a.fednova(loss_fn, client_lr=0.2)),
            ),
            "fednova, rate 0": (
                end(a.fednova(loss_fn, client_lr=zero, server_momentum=0.5)),
                start,
            ),
            "mifa of gradients, rate 0": (
                end(a.mifa(loss_fn, client_lr=zero, table="gradient")),
                start,
            ),
            "moon": (
                end(
                    a.moon(
                        two_blocks(),
                        client_lr=0.2,
                        contrastive_weight=zero,
                        preprocess=preprocess,
                    )
                ),
                fedavg,
            ),
            "fedprox": (end(a.fedprox(loss_fn, client_lr=0.2, prox_weight=zero)), fedavg),
            "feddyn": (end(a.feddyn(loss_fn, client_lr=0.2, prox_weight=zero)), fedavg),
            "fedams with decays of 1": (
                end(
                    a.fedams(
                        loss_fn, client_lr=0.2, beta1=1 - zero, beta2=1 - zero, bias_correction=True
                    )
                ),
                start,
            ),
        }

    for name, (traced, plain) in jax.jit(runs)(0.0).items():
        np.testing.assert_allclose(flat(traced), flat(plain), atol=1e-12, err_msg=name)
