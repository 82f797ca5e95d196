"""Wrappers turn a method into another one: compression, privacy, robust aggregation and others."""

from fedjax_lab.wrappers.attacks import with_attack
from fedjax_lab.wrappers.buffered import with_buffered_aggregation
from fedjax_lab.wrappers.client_metrics import with_client_metrics
from fedjax_lab.wrappers.compression import with_compression
from fedjax_lab.wrappers.frozen import with_frozen
from fedjax_lab.wrappers.personal import client_params, personal_first, with_personal
from fedjax_lab.wrappers.privacy import with_dp
from fedjax_lab.wrappers.ranks import with_ranks
from fedjax_lab.wrappers.robust import with_robust_aggregation
from fedjax_lab.wrappers.secure import with_secure_aggregation
from fedjax_lab.wrappers.update_metrics import with_update_metrics

__all__ = [
    "client_params",
    "personal_first",
    "with_attack",
    "with_buffered_aggregation",
    "with_client_metrics",
    "with_compression",
    "with_dp",
    "with_frozen",
    "with_personal",
    "with_ranks",
    "with_robust_aggregation",
    "with_secure_aggregation",
    "with_update_metrics",
]
