"""Wrong arguments of the proximal, dual and memory methods, FedNova and FedAMS."""

import jax
import pytest

from fedjax_lab import algorithms
from tests.algorithms.problem import loss_fn


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (algorithms.fedprox, {"prox_weight": -0.1}, "prox_weight is -0.1; .* at least 0"),
        (algorithms.fedproxm, {"momentum": 1.5}, "momentum is 1.5; .* at most 1"),
        (algorithms.feddyn, {"prox_weight": 0.0}, "prox_weight is 0.0; .* greater than 0"),
        (algorithms.fedadmm, {"prox_weight": 0}, "prox_weight is 0; .* greater than 0"),
        (algorithms.fedadmm, {"variant": "w"}, "variant is 'w'; it must be one of G, W"),
        (algorithms.fedadmm, {"prev": "locale"}, "Did you mean 'local'"),
        (algorithms.fedadmm, {"prev": "global"}, "prev is 'global'; with variant 'W'"),
        (algorithms.fedpd, {"prox_weight": -1}, "prox_weight is -1; .* greater than 0"),
        (algorithms.fedpd, {"skip_probability": 2}, "skip_probability is 2; .* at most 1"),
        (algorithms.mifa, {"table": "gradients"}, "Did you mean 'gradient'"),
        (algorithms.mifa, {"start": "zero"}, "Did you mean 'zeros'"),
        (algorithms.mifam, {"momentum": -1}, "momentum is -1; .* at least 0"),
        (algorithms.fednova, {"local_momentum": 1}, "local_momentum is 1; .* less than 1"),
        (algorithms.fednova, {"prox_weight": -1}, "prox_weight is -1"),
        (algorithms.fednova, {"server_momentum": 2}, "server_momentum is 2; .* at most 1"),
        (
            algorithms.fednova,
            {"local_momentum": 0.5, "prox_weight": 0.1},
            "local_momentum is 0.5 and prox_weight is 0.1; .* one must be 0",
        ),
        (algorithms.fedams, {"tau": 0.0}, "tau is 0.0; .* greater than 0"),
        (algorithms.fedams, {"beta2": 2}, "beta2 is 2; .* at most 1"),
        (algorithms.fedams, {"option": 3}, "option is 3; it must be between 1 and 2"),
    ],
)
def test_hyper_parameters(factory, options, message):
    with pytest.raises(ValueError, match=message):
        factory(loss_fn, client_lr=0.1, **options)


@pytest.mark.parametrize("name", ["feddyn", "fedadmm", "fedpd"])
def test_a_schedule_is_checked_when_the_method_is_built(name):
    with pytest.raises(TypeError, match="prox_weight is <lambda>, a schedule that returns"):
        getattr(algorithms, name)(loss_fn, client_lr=0.1, prox_weight=lambda round: [0.1, 0.2])


def test_a_traced_pair_passes():
    """Its values are not known yet."""

    def build(momentum):
        algorithms.fednova(loss_fn, client_lr=0.1, local_momentum=momentum, prox_weight=0.1)
        return momentum

    jax.eval_shape(build, 0.0)
