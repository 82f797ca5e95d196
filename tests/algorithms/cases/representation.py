"""Rows of representation. Twins see the perceptron, all other tests the model of two blocks."""

from fedjax_lab import algorithms
from fedjax_lab.models import Model
from tests.algorithms import networks
from tests.algorithms.cases.base import LR, TRANSFORM, Case, Problem, decaying
from tests.reference.mlp_numpy import MLP
from tests.reference.representation_numpy import MOON, MOONM, FedMLB, FedMLBM

TANH, RELU = MLP(), MLP(activation="relu")


def subject(loss_fn):
    return loss_fn if isinstance(loss_fn, Model) else networks.two_blocks(loss_fn)


def problem(twin):
    return Problem(
        networks.perceptron(twin),
        lambda: networks.perceptron_params(twin),
        networks.flat_perceptron,
        twin,
    )


def case(id, factory, twin, options, ours, theirs, *, main=False, network=TANH):
    return Case(
        id,
        factory,
        twin,
        options,
        only_factory={"preprocess": networks.preprocess} | ours,
        only_twin=theirs,
        main=main,
        subject=subject,
        problem=problem(network),
    )


MU = ({"contrastive_weight": 2.0}, {"mu": 2.0})
WEIGHTS = (
    {"ce_weight": 0.7, "hybrid_ce_weight": 0.5, "hybrid_kl_weight": 1.5},
    {"ce_weight": 0.7, "lambda1": 0.5, "lambda2": 1.5},
)
MOMENTUM = LR | {"momentum": 0.7}
FALLING = {"client_lr": decaying(0.2)}

CASES = [
    case("moon", algorithms.moon, MOON, LR | {"temperature": 0.5}, *MU, main=True),
    case("moonm", algorithms.moonm, MOONM, MOMENTUM, *MU, main=True),
    case("fedmlb", algorithms.fedmlb, FedMLB, LR | {"temperature": 2.0}, *WEIGHTS, main=True),
    case("fedmlbm", algorithms.fedmlbm, FedMLBM, MOMENTUM, *WEIGHTS, main=True),
    case(
        "moon-options",
        algorithms.moon,
        MOON,
        FALLING | {"temperature": 0.3},
        {"contrastive_weight": decaying(2.0)} | TRANSFORM["only_factory"],
        {"mu": decaying(2.0), "first_previous": "global"} | TRANSFORM["only_twin"],
        network=RELU,
    ),
    case(
        "fedmlb-options",
        algorithms.fedmlb,
        FedMLB,
        FALLING,
        TRANSFORM["only_factory"],
        TRANSFORM["only_twin"],
        network=RELU,
    ),
]
