"""Rows of cfedavg."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import algorithms, compressors
from fedjax_lab.wrappers.compression import message_key
from tests.algorithms.cases.base import LR, Case
from tests.reference import cfedavg_numpy
from tests.reference import problem as reference
from tests.reference.cfedavg_numpy import CFedAvg


def drop_masks(comp):
    """What ``random_drop`` keeps of a client's message in a round of ``problem.to_batch``."""
    compressor = compressors.random_drop(comp)

    def kept(client, t):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), t), 0)
        message = compressor.compress(
            message_key(jax.random.fold_in(key, client), 0), jnp.ones(reference.DIMENSION)
        )
        return np.asarray(compressor.decompress(message)) > 0

    return kept


TOP_K = {
    "only_factory": {"compressor": "top_k:0.5"},
    "only_twin": {"compressor": cfedavg_numpy.top_k(0.5)},
}
DROP = {
    "only_factory": {"compressor": "random_drop:0.4"},
    "only_twin": {"compressor": cfedavg_numpy.random_drop(drop_masks(0.4))},
}

CASES = [
    Case("cfedavg", algorithms.cfedavg, CFedAvg, LR, **TOP_K, main=True),
    Case(
        "cfedavg-no_feedback", algorithms.cfedavg, CFedAvg, LR | {"error_feedback": False}, **TOP_K
    ),
    Case(
        "cfedavg-by_steps", algorithms.cfedavg, CFedAvg, LR | {"normalize_by_steps": True}, **TOP_K
    ),
    Case(
        "cfedavg-by_steps-no_feedback",
        algorithms.cfedavg,
        CFedAvg,
        LR | {"normalize_by_steps": True, "error_feedback": False},
        **TOP_K,
    ),
    Case("cfedavg-drop", algorithms.cfedavg, CFedAvg, LR, **DROP),
    Case(
        "cfedavg-drop-no_feedback",
        algorithms.cfedavg,
        CFedAvg,
        LR | {"error_feedback": False},
        **DROP,
    ),
]
