"""Rows of the personal methods. Of the softmax regression, the bias b is the client's own part."""

from fractions import Fraction

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case, decaying
from tests.reference import problem as reference
from tests.reference.ditto_numpy import APFL, Ditto, PFedMe
from tests.reference.personal_layers_numpy import FedBABU, FedPer, FedRep, LocalOnly

WEIGHTS, BIAS = reference.LEAVES
NUMBERS = reference.DIMENSION
FALLING = {"client_lr": decaying(0.2), "server_lr": 0.8}
PROX = LR | {"prox_weight": 0.7}
INNER = {"client_lr": 0.4, "server_lr": 0.8, "prox_weight": 2.0, "personal_lr": 0.2}


def own(pattern, part, argument="personal", factory=(), twin=()):
    """What says to both sides which part is the client's own."""
    return {
        "only_factory": {argument: pattern, **dict(factory)},
        "only_twin": {"own": part, **dict(twin)},
    }


OWN_BIAS, OWN_WEIGHTS = own("^b$", BIAS), own("W", WEIGHTS)
MOVED = own("^b$", BIAS, "personal", TRANSFORM["only_factory"], TRANSFORM["only_twin"])
HEAD = own(lambda path: path == "b", BIAS, "head")
HEAD_MOVED = own("b", BIAS, "head", TRANSFORM["only_factory"], TRANSFORM["only_twin"])
SHARE = Fraction(15, NUMBERS)  # of a vector, the weights


def shared(name, *arguments, uplink=SHARE, **more):
    return Case(name, *arguments, main=True, uplink=uplink, **more)


CASES = [
    shared("fedper", algorithms.fedper, FedPer, LR, **OWN_BIAS),
    Case("fedper-schedule-transform", algorithms.fedper, FedPer, FALLING, **MOVED),
    shared("lg_fedavg", algorithms.lg_fedavg, FedPer, LR, uplink=1 - SHARE, **OWN_WEIGHTS),
    Case("lg_fedavg-bias", algorithms.lg_fedavg, FedPer, LR, **OWN_BIAS),
    shared("fedbn", algorithms.fedbn, FedPer, LR, **OWN_BIAS),
    Case("fedbn-weights", algorithms.fedbn, FedPer, LR, **OWN_WEIGHTS),
    shared("fedrep", algorithms.fedrep, FedRep, LR, **OWN_BIAS),  # half of each client's K_i
    Case("fedrep-two", algorithms.fedrep, FedRep, LR | {"head_steps": 2}, **OWN_BIAS),
    Case("fedrep-transform", algorithms.fedrep, FedRep, FALLING | {"head_steps": 1}, **MOVED),
    shared("local_only", algorithms.local_only, LocalOnly, {"client_lr": 0.2}, uplink=0),
    Case(
        "local_only-schedule-transform",
        algorithms.local_only,
        LocalOnly,
        {"client_lr": decaying(0.2)},
        **TRANSFORM,
    ),
    shared("fedbabu", algorithms.fedbabu, FedBABU, LR, **HEAD),
    Case("fedbabu-schedule-transform", algorithms.fedbabu, FedBABU, FALLING, **HEAD_MOVED),
    Case("ditto", algorithms.ditto, Ditto, PROX, main=True),
    Case(
        "ditto-schedule-transform",
        algorithms.ditto,
        Ditto,
        FALLING | {"prox_weight": decaying(1.0), "personal_lr": decaying(0.1)},
        **TRANSFORM,
    ),
    Case("pfedme", algorithms.pfedme, PFedMe, INNER | {"inner_steps": 2}, main=True),
    Case(
        "pfedme-schedule-transform",
        algorithms.pfedme,
        PFedMe,
        INNER | {"personal_lr": decaying(0.1), "prox_weight": decaying(2.0), "inner_steps": 3},
        **TRANSFORM,
    ),
    Case("apfl", algorithms.apfl, APFL, LR | {"mixing": 0.5}, main=True),
    Case("apfl-fixed", algorithms.apfl, APFL, LR | {"mixing": 0.3, "adaptive_mixing": False}),
    Case("apfl-schedule-transform", algorithms.apfl, APFL, FALLING | {"mixing": 0.5}, **TRANSFORM),
]
