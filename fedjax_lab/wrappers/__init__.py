"""Wrappers: a method becomes another method, with something done to its messages."""

from fedjax_lab.wrappers.compression import with_compression

__all__ = ["with_compression"]
