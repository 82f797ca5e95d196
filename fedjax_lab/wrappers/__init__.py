"""Wrappers: a method becomes another method, with something done to its messages or its model."""

from fedjax_lab.wrappers.client_metrics import with_client_metrics
from fedjax_lab.wrappers.compression import with_compression
from fedjax_lab.wrappers.frozen import with_frozen
from fedjax_lab.wrappers.personal import client_params, personal_first, with_personal

__all__ = [
    "client_params",
    "personal_first",
    "with_client_metrics",
    "with_compression",
    "with_frozen",
    "with_personal",
]
